"""Settings that both workers share; imports no torch, so that a bad flag is reported at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field

from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.grammar_limits import GrammarLimits
from pilotfish.settings import ListenAddress, Settings


def _checked_pages(value: object) -> object:
    """In one sentence, where the union would give one for each of its members."""
    if value != "auto" and not (str(value).isdecimal() and int(str(value)) >= 1):
        raise ValueError("must be auto or a number of at least 1")
    return value


class WorkerConfig(Settings):
    """How a worker runs its model."""

    listen: ListenAddress
    """HOST:PORT or port to serve on; port 0 takes a free one."""

    name: str | None = None
    """What to call the model; default: the name of its folder."""

    simulate: str | None = None
    """Simulate a model instead of running one, for as long as a profile says: llama-70b-8xh100, llama-8b-h100, or a
    .toml file. Needs only the tokenizer and config.json of --model, and no GPU."""

    device: str = "auto"
    """auto, cpu, cuda or cuda:N; auto takes the first GPU if there is one."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and cache. float32 is exact and slow; auto is float32 on the CPU, bfloat16 on a GPU."""

    quantize: Literal["none", "int8"] = "none"
    """Round the weights once read. int8 is another model, nearly the same: a quarter of float32's size, and on a
    CPU a third of its time."""

    kernels: Literal["auto", "native", "torch"] = "auto"
    """What runs the model on a CPU: fused kernels, compiled on first use, or torch; auto takes what works."""

    layers: int | None = Field(None, ge=1)
    """Use only the first so many layers of the checkpoint; default: all."""

    pages: Annotated[Literal["auto"] | int, BeforeValidator(_checked_pages)] = "auto"
    """Pages of the KV cache, granted to streams when they open. More pages hold more rows, and take memory. auto takes
    what is free: on a GPU as far as --gpu-memory-utilization goes, on a CPU half of it and at most 4 GiB, and never
    more than 64 rows of the longest length can fill."""

    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of a GPU's memory that this worker may take, weights and all. The rest is for what a step computes, and for
    other workers of the same GPU."""

    page_size: int = Field(16, ge=1, le=256)
    """Slots per page. Smaller pages share more of a prefix, larger ones are gathered faster."""

    max_len: int | None = Field(None, ge=1)
    """Longest row in tokens, prompt and completion together; default: what the model was made for."""

    max_step_tokens: int = Field(4096, ge=1)
    """Most new tokens in one step. Larger steps prefill faster, and hold up the rows beside them longer."""

    threads: int | None = Field(None, ge=1)
    """Threads of kernels and torch; default: torch's choice. Processes that share cores need counts that add up."""

    loading_lines: bool = False
    """Say on stdout how far the weights are loaded, for the process that started this one: `loading reading DONE TOTAL`
    and `loading packing DONE TOTAL`, in bytes. Off, the log says it now and then."""

    share_cores: Path | None = None
    """Workers of one host that name the same file lend each other the threads of those that wait."""

    grammar_timeout_s: float = Field(10, gt=0)
    """Most processor seconds to compile one grammar of structured output; one that takes more is refused."""

    grammar_memory_mib: int = Field(1024, ge=16)
    """Most memory to compile one grammar; one that takes more is refused."""

    grammar_size_mib: int = Field(64, ge=1)
    """Most memory of one grammar once compiled; a larger one is refused."""

    grammar_token_ms: float = Field(50, gt=0)
    """Most processor time to say which tokens a grammar lets follow; one that takes more is refused, since all rows of
    a step wait for it."""

    grammars_at_once: int = Field(4, ge=1)
    """Grammars compiled side by side, each in a process of its own. Where more are asked for, the one that has taken
    longest gives way after a second."""

    grammar_cache_mib: int = Field(1024, ge=1)
    """Memory of grammars that stay compiled; those used longest ago make room."""

    @property
    def grammar_limits(self) -> GrammarLimits:
        """What grammars may take."""
        return GrammarLimits(
            timeout_s=self.grammar_timeout_s,
            memory_mib=self.grammar_memory_mib,
            size_mib=self.grammar_size_mib,
            token_ms=self.grammar_token_ms,
            at_once=self.grammars_at_once,
            cache_mib=self.grammar_cache_mib,
        )

    @property
    def page_count(self) -> int:
        """``pages``, once they are decided; see ``with_pages``."""
        assert self.pages != "auto", "pages are decided where the worker's needs are known"
        return self.pages

    def with_pages(self, pages: int) -> Self:
        """The same, with a number of pages."""
        return self.model_copy(update={"pages": pages})

    def refuse_with_simulate(self, *names: str) -> None:
        """Raises ``InvalidArgumentError`` if one of these settings was given: a simulated worker has no use for it."""
        self.refuse("a simulated worker runs no model", *names)

    def refuse(self, because: str, *names: str) -> None:
        """Raises ``InvalidArgumentError`` if one of these settings was given, rather than let it do nothing."""
        for name in names:
            if name in self.model_fields_set:
                raise InvalidArgumentError(f"{name} is given, but {because}; leave it out")
