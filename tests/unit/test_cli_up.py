"""``pilotfish up``: what it starts, and how it ends. The services are small stand-ins, the processes are real."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from processes import runs
from pydantic import ValidationError
from tiny_heads import FORMATS, LLAMA
from typer.testing import CliRunner
from waiting import eventually

from orchestrator import admission, server
from pilotfish.cli.main import app
from pilotfish.cli.plan import Model, Plan, threads_per_worker
from pilotfish.cli.up import MAX_DRAFT_LENGTH, MAX_TREE_NODES

ROOT = Path(__file__).parents[2]

SERVICE = """
import json, os, signal, sys, time

name, folder = {name!r}, {folder!r}
argv = sys.argv[1:]
port = {{"target_svc": 1, "orchestrator": 9}}.get(name, os.getpid())
note = os.path.join(folder, f"{{name}}-{{os.getpid()}}.json")
json.dump({{"argv": argv, "pid": os.getpid(), "threads": os.environ["OMP_NUM_THREADS"],
           "wait": os.environ["OMP_WAIT_POLICY"], "keys": os.environ.get("PILOTFISH_ORCHESTRATOR_API_KEY")}},
          open(note + ".part", "w"))
os.replace(note + ".part", note)  # nobody reads half a note

def end(*_):
    open(os.path.join(folder, "order"), "a").write(name + "\\n")
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, lambda *_: open(os.path.join(folder, "order"), "a").write(name + " got SIGINT\\n"))
if os.path.exists(os.path.join(folder, name + ".broken")):
    print("error: the checkpoint is corrupt", file=sys.stderr)
    sys.exit(2)
print("warming up", file=sys.stderr)
listen = argv[argv.index("--listen") + 1]
print(f"ready {{name}} {{listen.replace(':0', f':{{port}}')}}", flush=True)
while True:
    time.sleep(0.02)
    if os.path.exists(os.path.join(folder, f"die-{{os.getpid()}}")):
        print("out of luck", file=sys.stderr)
        os._exit(5)
"""


class Deployment:
    """One ``up`` on stand-ins that take notes in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 9}))
        for name in ("target_svc", "draft_svc", "orchestrator"):
            (folder / "fakes" / name).mkdir(parents=True)
            # What is not a stand-in is looked up in the real package: `up` itself asks what a draft's folder holds.
            (folder / "fakes" / name / "__init__.py").write_text(f"__path__.append({str(ROOT / name)!r})")
            (folder / "fakes" / name / "__main__.py").write_text(SERVICE.format(name=name, folder=str(folder)))

    @contextmanager
    def up(self, *flags: str) -> Iterator[subprocess.Popen[str]]:
        path = os.pathsep.join((str(self.folder / "fakes"), str(ROOT)))  # the stand-ins first
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "3"}
        argv = [sys.executable, "-m", "pilotfish", "up", "--target", str(self.model), "--listen", "127.0.0.1:0"]
        argv += [*([] if "--http" in flags else ["--http", "off"]), *flags]
        pipe = subprocess.PIPE
        with subprocess.Popen(argv, env=env, cwd=self.folder, stdout=pipe, stderr=pipe, text=True) as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.communicate(timeout=30)

    def notes(self, service: str) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob(f"{service}-*.json"))]

    def pids(self) -> list[int]:
        return [note["pid"] for service in ("target_svc", "draft_svc", "orchestrator") for note in self.notes(service)]

    def order(self) -> list[str]:
        path = self.folder / "order"
        return path.read_text().split("\n")[:-1] if path.exists() else []


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return Deployment(tmp_path)


def ready_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, stderr = process.communicate(timeout=30)
    return process.returncode, stderr


def test_http_and_its_keys_are_the_orchestrators(deployment: Deployment) -> None:
    file = deployment.folder / "keys"
    file.write_text("secret-3\n")
    flags = ["--http", "127.0.0.1:0", "--api-key", "secret-1", "--api-key", "secret-2", "--api-key-file", str(file)]
    options = ["--allowed-origins", "https://a.b", "--allowed-origins", "*", "--reasoning-parser", "qwen3"]
    options += ["--lenient", "--metrics-without-key"]
    with deployment.up("--draft", "none", *flags, *options) as process:
        ready_line(process)
        [orchestrator], [target] = deployment.notes("orchestrator"), deployment.notes("target_svc")
    argv = orchestrator["argv"]
    assert argv[argv.index("--http") + 1] == "127.0.0.1:0"
    assert argv[argv.index("--api-key-file") + 1] == str(file)
    assert argv[argv.index("--allowed-origins") :][: len(options)] == options
    assert orchestrator["keys"] == "secret-1,secret-2"
    assert target["keys"] is None
    assert "secret" not in "".join(argv)


def test_http_is_served_by_default_on_the_first_free_port(deployment: Deployment) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(deployment.folder / "fakes"), str(ROOT)))}
    up = [sys.executable, "-m", "pilotfish", "up", "--target", str(deployment.model), "--listen", "127.0.0.1:0"]
    for flags in ([], ["--http", "off"]):
        with subprocess.Popen([*up, "--draft", "none", *flags], env=env, stdout=subprocess.PIPE, text=True) as process:
            ready_line(process)
            process.terminate()
    served, off = (note["argv"] for note in sorted(deployment.notes("orchestrator"), key=lambda note: note["pid"]))
    assert served[2:5] == ["--http", "127.0.0.1:8000", "--http-next-port"]
    assert "--http" not in off


def test_a_file_has_options_and_flags_win_over_it(deployment: Deployment) -> None:
    file = deployment.folder / "up.toml"
    file.write_text(
        'draft_length = 6\ndraft_layers = 2\nreplicas = 2\nhttp = "127.0.0.1:0"\napi_key = ["a", "b"]\npages = 40\n'
    )
    with deployment.up("--config", str(file), "--replicas", "1", "--http", "off", "--draft-length", "auto") as process:
        assert "--api-key and --api-key-file go with --http" in end(process)[1]
    with deployment.up("--config", str(file), "--replicas", "1", "--http", "127.0.0.1:0") as process:
        assert ready_line(process).endswith(":first-2-layers draft_length=6\n")
    assert len(deployment.notes("draft_svc")) == 1
    [orchestrator], [target] = deployment.notes("orchestrator"), deployment.notes("target_svc")
    assert orchestrator["keys"] == "a,b"
    assert target["argv"][-2:] == ["--pages", "40"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("draft-length = 6", "draft-length in {file} is no option of up; did you mean draft_length?"),
        ("config = 'x'", "config in {file} is no option of up"),
        ("replicas = 0", "replicas in {file}: "),
        ("draft_length = 'many'", "draft_length in {file}: 'many' is neither auto nor a number from 0 to 64"),
        ("draft_length = ", "{file} cannot be read as TOML"),
    ],
)
def test_a_file_s_faults_are_named(deployment: Deployment, text: str, message: str) -> None:
    file = deployment.folder / "f"
    file.write_text(text)
    result = CliRunner().invoke(app, ["up", "--config", str(file)])
    assert result.exit_code == 2
    shown = re.sub(r"[│\s]", "", result.stderr)  # however it was wrapped
    assert re.sub(r"\s", "", message.format(file=file)) in shown


def test_devices_are_those_of_the_workers(deployment: Deployment) -> None:
    with deployment.up("--device", "cpu", "--draft-layers", "2", "--replicas", "2") as process:
        ready_line(process)
        workers = [*deployment.notes("target_svc"), *deployment.notes("draft_svc")]
    assert [worker["argv"][worker["argv"].index("--device") + 1] for worker in workers] == ["cpu"] * 3


@pytest.mark.parametrize(
    "flags", [["--device", "gpu"], ["--target-device", "cuda:0,cuda:1"], ["--draft-device", "cpu,x"]]
)
def test_a_device_that_is_none_is_refused(flags: list[str]) -> None:
    result = CliRunner().invoke(app, ["up", *flags])
    assert result.exit_code == 2
    assert "is none of auto, cpu, cuda, cuda:N" in " ".join(result.stderr.replace("│", "").split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--draft", "none", "--draft-device", "cpu"], "--draft-device goes with a draft"),
        (["--draft-device", "cuda:0,cuda:1"], "--draft-device has 2 devices for 1 drafts; give --replicas N"),
    ],
)
def test_devices_without_a_draft_are_refused(flags: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["up", *flags])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", "").split())


def test_pages_that_do_not_fit_are_refused_before_anything_starts(deployment: Deployment) -> None:
    result = CliRunner().invoke(
        app, ["up", "--target", str(deployment.model), "--pages", "1000000000", "--http", "off"]
    )
    assert result.exit_code == 1
    assert re.search(
        r"error: --pages is 1,000,000,000, which takes [\d.]+ TB .* at most [\d,]+ pages fit\n", result.stderr
    )
    assert deployment.pids() == []


def test_pages_are_shared_out_and_told(deployment: Deployment) -> None:
    with deployment.up("--draft-layers", "2") as process:
        ready_line(process)
        [target], [draft] = deployment.notes("target_svc"), deployment.notes("draft_svc")
        process.terminate()
        _, stderr = end(process)
    pages = int(target["argv"][target["argv"].index("--pages") + 1])
    assert draft["argv"][draft["argv"].index("--pages") + 1] == str(pages)
    assert f"KV cache: {pages:,} pages = {pages * 16:,} tokens, " in stderr


def test_keys_without_http_are_refused(deployment: Deployment) -> None:
    flags = ["--http", "off", "--api-key", "secret"]
    result = CliRunner().invoke(app, ["up", "--target", str(deployment.model), *flags])
    assert result.exit_code == 2
    assert "secret" not in result.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_stops_all_in_order(deployment: Deployment, number: signal.Signals) -> None:
    with deployment.up("--replicas", "2") as process:
        line = ready_line(process)
        assert line == f"ready 127.0.0.1:9 target={deployment.model} draft={deployment.model}:int8 draft_length=auto\n"
        process.send_signal(number)
        code, stderr = end(process)
    assert code == 0
    assert deployment.order() == ["orchestrator", "draft_svc", "draft_svc", "target_svc"]
    assert len(deployment.pids()) == 4
    assert not any(runs(pid) for pid in deployment.pids())
    for name in ("target", "draft-0", "draft-1", "orchestrator"):
        assert f"{name} │ warming up" in stderr


def test_each_service_gets_its_flags(deployment: Deployment) -> None:
    flags = ["--draft-length", "6", "--dtype", "float32", "--pages", "40", "--draft-layers", "2", "--trace", "t"]
    flags += ["--draft-tree", "16", "--generation-config", "none"]
    with deployment.up(*flags) as process:
        assert ready_line(process).endswith(":first-2-layers draft_length=6\n")
        (target,), (draft,), (orchestrator,) = map(deployment.notes, ("target_svc", "draft_svc", "orchestrator"))
    model = str(deployment.model)
    worker = ["--listen", "127.0.0.1:0", "--threads", "3", "--loading-lines", "--log-level", "info", "--no-log-times"]
    assert target["argv"] == ["--model", model, "--name", model, *worker, "--dtype", "float32", "--pages", "40"]
    assert draft["argv"] == [
        *["--model", model, "--name", f"{model}:first-2-layers", *worker],
        *["--layers", "2", "--dtype", "float32", "--pages", "40", "--drafter", "model"],
    ]
    assert orchestrator["argv"] == [
        *["--listen", "127.0.0.1:0", "--target", "127.0.0.1:1", "--draft", f"127.0.0.1:{draft['pid']}"],
        *["--model", model, "--name", model, "--draft-length", "6", "--draft-tree", "16"],
        *["--generation-config", "none", "--trace", "t", "--log-level", "info", "--no-log-times"],
    ]
    assert (target["threads"], target["wait"]) == ("3", "PASSIVE")


def test_a_head_makes_the_target_keep_its_states(deployment: Deployment) -> None:
    head = FORMATS["eagle"].write(deployment.folder / "head")
    with deployment.up("--draft", str(head)) as process:
        assert (
            ready_line(process) == f"ready 127.0.0.1:9 target={deployment.model} draft={head}:int8 draft_length=auto\n"
        )
        (target,), (draft,) = map(deployment.notes, ("target_svc", "draft_svc"))
    assert target["argv"][-2:] == ["--features", "final"]
    assert draft["argv"][:2] == ["--model", str(head)]
    assert draft["argv"][-2:] == ["--target-model", str(deployment.model)]


def test_a_head_has_no_layers_to_leave_out(deployment: Deployment) -> None:
    head = FORMATS["eagle"].write(deployment.folder / "head")
    flags = ["--draft", str(head), "--draft-layers", "1"]
    result = CliRunner().invoke(app, ["up", "--target", str(deployment.model), *flags])
    assert result.exit_code == 2
    assert "--draft-layers is for models" in result.stderr


def test_simulated_workers_get_the_profile_and_nothing_that_only_models_have(deployment: Deployment) -> None:
    with deployment.up("--simulate", "llama-8b-h100", "--replicas", "2", "--pages", "40") as process:
        name = "simulated-llama-8b-h100"
        assert ready_line(process) == f"ready 127.0.0.1:9 target={name} draft={name} draft_length=auto\n"
        workers = [*deployment.notes("target_svc"), *deployment.notes("draft_svc")]
    expected = ["--model", str(deployment.model), "--name", name, "--listen", "127.0.0.1:0"]
    expected += [
        "--simulate",
        "llama-8b-h100",
        "--loading-lines",
        "--log-level",
        "info",
        "--no-log-times",
        "--pages",
        "40",
    ]
    assert [worker["argv"] for worker in workers] == [expected] * 3


@pytest.mark.parametrize(
    "flags", [["--draft", "m"], ["--draft-layers", "2"], ["--dtype", "bfloat16"], ["--draft-device", "cpu"]]
)
def test_simulating_leaves_no_choice_of_models(flags: list[str]) -> None:
    result = CliRunner().invoke(app, ["up", "--simulate", "llama-8b-h100", *flags])
    assert result.exit_code == 2
    assert f"{flags[0]} is for real models" in result.stderr


def test_an_unknown_profile_is_refused_before_anything_starts(deployment: Deployment) -> None:
    result = CliRunner().invoke(app, ["up", "--target", str(deployment.model), "--simulate", "nope"])
    assert result.exit_code == 1
    assert "shipped profiles are llama-70b-8xh100" in result.stderr
    assert deployment.pids() == []


def test_with_json_all_of_stderr_is_objects(deployment: Deployment) -> None:
    with deployment.up("--replicas", "2", "--log-format", "json", "--log-level", "debug") as process:
        assert ready_line(process).startswith("ready ")
        (draft, _), [orchestrator] = deployment.notes("draft_svc"), deployment.notes("orchestrator")
        assert "--log-level debug --log-format json" in " ".join(orchestrator["argv"])
        (deployment.folder / f"die-{draft['pid']}").touch()
        assert eventually(lambda: not runs(draft["pid"]))
        (deployment.folder / f"die-{orchestrator['pid']}").touch()
        code, stderr = end(process)
    assert code == 1
    lines = [json.loads(line) for line in stderr.splitlines()]
    assert all({"time", "level", "service", "message"} <= line.keys() for line in lines)
    said = {(line["service"], line["level"], line["message"]) for line in lines}
    assert {(name, "info", "warming up") for name in ("target", "draft-0", "draft-1", "orchestrator")} <= said
    fault = "error: orchestrator exited with 5; its last lines:\n  warming up\n  out of luck"
    assert ("up", "error", fault) in said
    assert any(level == "error" and message.endswith("going on without it") for _, level, message in said)


def test_without_a_draft(deployment: Deployment) -> None:
    with deployment.up("--draft", "none") as process:
        assert "draft=none" in ready_line(process)
    assert deployment.notes("draft_svc") == []
    assert "--draft" not in deployment.notes("orchestrator")[0]["argv"]


@pytest.mark.parametrize(
    ("service", "name"), [("target_svc", "target"), ("draft_svc", "draft"), ("orchestrator", "orchestrator")]
)
def test_a_child_that_dies_before_ready_stops_all(deployment: Deployment, service: str, name: str) -> None:
    (deployment.folder / f"{service}.broken").touch()
    with deployment.up() as process:
        assert ready_line(process) == ""
        code, stderr = end(process)
    assert code == 1
    assert f"error: {name} exited with 2; its last lines:\n  error: the checkpoint is corrupt\n" in stderr
    assert not any(runs(pid) for pid in deployment.pids())


@pytest.mark.parametrize(("service", "name"), [("target_svc", "target"), ("orchestrator", "orchestrator")])
def test_a_death_of_target_or_orchestrator_stops_all(deployment: Deployment, service: str, name: str) -> None:
    with deployment.up() as process:
        ready_line(process)
        (deployment.folder / f"die-{deployment.notes(service)[0]['pid']}").touch()
        code, stderr = end(process)
    assert code == 1
    assert re.search(rf"error: {name} exited with 5; its last lines:\n  warming up\n  out of luck\n", stderr)
    assert not any(runs(pid) for pid in deployment.pids())


def test_serving_goes_on_without_a_draft_that_died(deployment: Deployment) -> None:
    with deployment.up() as process:
        ready_line(process)
        pid = deployment.notes("draft_svc")[0]["pid"]
        (deployment.folder / f"die-{pid}").touch()
        assert eventually(lambda: not runs(pid))
        time.sleep(0.2)
        assert process.poll() is None
        process.terminate()
        code, stderr = end(process)
    assert code == 0
    assert "draft exited with 5; its last lines:\n  warming up\n  out of luck\ngoing on without it\n" in stderr
    assert deployment.order() == ["orchestrator", "target_svc"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a child's life to its parent's")
def test_no_child_outlives_an_up_that_is_killed(deployment: Deployment) -> None:
    with deployment.up() as process:
        ready_line(process)
        pids = deployment.pids()
        assert len(pids) == 3
        process.kill()
        assert eventually(lambda: not any(runs(pid) for pid in pids))


def test_a_signal_while_starting_stops_all(deployment: Deployment) -> None:
    fake = deployment.folder / "fakes" / "draft_svc" / "__main__.py"
    fake.write_text(fake.read_text().replace('print(f"ready', 'time.sleep(60); print(f"ready'))
    with deployment.up() as process:
        assert eventually(lambda: len(deployment.pids()) == 2)
        process.terminate()
        code, _ = end(process)
    assert code == 0
    assert not any(runs(pid) for pid in deployment.pids())


def test_draft_layers_without_a_draft_is_bad_usage() -> None:
    result = CliRunner().invoke(app, ["up", "--draft", "none", "--draft-layers", "2"])
    assert result.exit_code == 2


def test_the_longest_draft_is_the_orchestrator_s() -> None:
    assert MAX_DRAFT_LENGTH == admission.MAX_DRAFT_LENGTH
    for text in (str(MAX_DRAFT_LENGTH + 1), "-1", "many"):
        assert CliRunner().invoke(app, ["up", "--draft-length", text]).exit_code == 2


def test_the_biggest_tree_is_the_orchestrator_s() -> None:
    assert MAX_TREE_NODES == server.MAX_TREE_NODES
    for text in (str(MAX_TREE_NODES + 1), "0", "many"):
        assert CliRunner().invoke(app, ["up", "--draft-tree", text]).exit_code == 2
        with pytest.raises(ValidationError, match="must be auto, off or a number from 1 to 256"):
            server.OrchestratorSettings(model=Path("m"), draft_tree=text)  # type: ignore[arg-type]


def test_a_taken_port_is_refused_before_anything_starts(deployment: Deployment) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        listen = f"127.0.0.1:{server.getsockname()[1]}"
        result = CliRunner().invoke(app, ["up", "--target", str(deployment.model), "--listen", listen])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: --listen is '{listen}', which cannot be bound")
    assert deployment.pids() == []


@pytest.mark.parametrize(
    ("cores", "workers", "threads"),
    [(2, 2, [1, 1]), (8, 1, [8]), (8, 3, [3, 3, 2]), (1, 3, [1, 1, 1]), (5, 2, [3, 2])],
)
def test_threads_add_up_to_the_cores(cores: int, workers: int, threads: list[int]) -> None:
    assert threads_per_worker(cores, workers) == threads


def test_simulated_models_have_no_sampling_defaults() -> None:
    """Their folder's are those of a model that is not run, and some change logits that they have not."""
    model = Model("m", Path("/m"))
    for simulate, flags in ((None, []), ("llama-8b-h100", ["--generation-config", "none"])):
        argv = Plan(model, model, "4", 1, None, None, "h:1", simulate=simulate).orchestrator_argv("t", [])
        assert [each for each in argv if each in ("--generation-config", "none")] == flags


def test_a_plan_counts_its_workers() -> None:
    model = Model("m", Path("/m"))
    assert Plan(model, model, 4, 3, None, None, "h:1").worker_count == 4
    assert Plan(model, None, 4, 3, None, None, "h:1").worker_count == 1
