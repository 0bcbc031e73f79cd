"""What ``pilotfish up`` starts: models, command lines, threads. Starts nothing itself."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

_ANY_PORT = "127.0.0.1:0"


@dataclass(frozen=True)
class Model:
    """A model to serve."""

    name: str
    folder: Path
    layers: int | None = None
    """Serve only the first so many; None serves all."""
    quantize: str | None = None
    """How the weights are rounded; None leaves them as they are."""
    features: tuple[str, ...] = ()
    """States of the target that a draft reads, by the names of types.proto."""

    @property
    def label(self) -> str:
        """The name that clients and logs see."""
        layers = "" if self.layers is None else f":first-{self.layers}-layers"
        return self.name + layers + ("" if self.quantize is None else f":{self.quantize}")


@dataclass(frozen=True)
class Plan:
    """What to start, and the command lines that it takes."""

    target: Model
    draft: Model | None
    draft_length: str
    replicas: int
    dtype: str | None
    listen: str
    target_pages: int | None = None
    """KV pages; None: the target decides."""
    draft_pages: tuple[int, ...] = ()
    """Of each replica; empty: they decide."""
    target_device: str | None = None
    """As torch names it; None: the target takes a GPU if there is one."""
    draft_devices: tuple[str, ...] = ()
    """The replicas take them in turn; empty: as the target without one."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory to take; None: the services' own."""
    log_level: str = "info"
    log_format: str = "text"
    simulate: str | None = None
    """Profile to simulate the workers by; None runs the models."""
    trace: Path | None = None
    """File for the orchestrator's trace; None writes none."""
    draft_tree: str = "auto"
    """Draft tokens of a tree, or auto, or off."""
    http: str | None = None
    """Where the OpenAI-compatible API is served; None serves gRPC only."""
    http_next_port: bool = False
    """Take the next free port where that one is taken."""
    api_keys: tuple[str, ...] = ()
    """Keys that its clients must send."""
    api_key_file: Path | None = None
    """File with further keys."""
    generation_config: str = "auto"
    """Whether the model's own sampling defaults count; simulated ones have no law to sample by."""
    http_options: tuple[str, ...] = ()
    """Further flags of the orchestrator on how it serves HTTP."""
    share_cores: Path | None = None
    """File by which the workers lend each other their cores."""

    @property
    def worker_count(self) -> int:
        return 1 + (self.replicas if self.draft is not None else 0)

    def target_argv(self, threads: int) -> list[str]:
        return _python("target_svc", *self.target_flags(threads))

    def draft_argv(self, draft: Model, threads: int, replica: int = 0) -> list[str]:
        return _python("draft_svc", *self.draft_flags(draft, threads, replica))

    def target_flags(self, threads: int) -> list[str]:
        features = self.draft.features if self.draft is not None else ()
        stored = ["--features", ",".join(features)] if features else []
        return [*self._worker(self.target, threads, self.target_device, self.target_pages), *stored]

    def draft_flags(self, draft: Model, threads: int, replica: int = 0) -> list[str]:
        drafter = [] if self.simulate is not None else ["--target-model", str(self.target.folder)]
        if self.simulate is None and draft.folder == self.target.folder and not draft.features:
            drafter = ["--drafter", "model"]  # even of a folder that holds a head, too
        devices = self.draft_devices
        device = devices[replica % len(devices)] if devices else None
        pages = self.draft_pages[replica] if self.draft_pages else None
        return [*self._worker(draft, threads, device, pages), *drafter]

    def orchestrator_argv(self, target: str, drafts: list[str]) -> list[str]:
        workers = ["--target", target, *(part for address in drafts for part in ("--draft", address))]
        model = ["--model", str(self.target.folder), "--name", self.target.label]
        length = ["--draft-length", self.draft_length]
        length += ["--draft-tree", self.draft_tree] if self.draft_tree != "auto" else []
        config = "none" if self.simulate is not None else self.generation_config
        length += ["--generation-config", config] if config != "auto" else []
        trace = ["--trace", str(self.trace)] if self.trace is not None else []
        http = ["--http", self.http] if self.http is not None else []
        http += ["--http-next-port"] if self.http_next_port else []
        http += ["--api-key-file", str(self.api_key_file)] if self.api_key_file is not None else []
        http += self.http_options
        served = ["--listen", self.listen, *http]
        return _python("orchestrator", *served, *workers, *model, *length, *trace, *self._logging())

    @property
    def orchestrator_env(self) -> dict[str, str]:
        """Variables beside the usual ones: other users of the machine can read a process's flags, but not these."""
        return {"PILOTFISH_ORCHESTRATOR_API_KEY": ",".join(self.api_keys)} if self.api_keys else {}

    def _worker(self, model: Model, threads: int, device: str | None, pages: int | None) -> list[str]:
        argv = ["--model", str(model.folder), "--name", model.label, "--listen", _ANY_PORT]
        argv += ["--threads", str(threads)] if self.simulate is None else ["--simulate", self.simulate]
        argv += ["--loading-lines"]
        argv += self._logging()
        given = {
            "--layers": model.layers,
            "--quantize": model.quantize,
            "--device": device,
            "--dtype": self.dtype,
            "--pages": pages,
            "--gpu-memory-utilization": self.gpu_memory_utilization,
            "--share-cores": self.share_cores,
        }
        return argv + [part for flag, value in given.items() if value is not None for part in (flag, str(value))]

    def _logging(self) -> list[str]:
        how = ["--no-log-times"] if self.log_format == "text" else ["--log-format", self.log_format]
        return ["--log-level", self.log_level, *how]


def threads_per_worker(cores: int, workers: int) -> list[int]:
    """Threads for each worker, the target first; they add up to the cores, with at least one each.

    OpenMP threads of two processes on the same core slow each other many times over.
    """
    share, left = divmod(cores, workers)
    return [max(1, share + (index < left)) for index in range(workers)]


def _python(module: str, *argv: str) -> list[str]:
    return [sys.executable, "-P", "-m", module, *argv]  # -P: never a module of that name in the current folder
