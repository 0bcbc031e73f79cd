"""The order in which a sweep is measured: settings take turns, so that a busy moment of the machine hits all alike."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pilotfish.bench.load import LoadGenerator
from pilotfish.bench.prompts import Prompt, synthetic
from pilotfish.bench.records import Load, Pass, Setting
from pilotfish.client.params import SamplingParams

_WARM_UP_TOKENS = 8
_WARM_UP_CONCURRENCY = 4  # where arrivals, not a number at once, make the load
_PROMPTS, _ARRIVALS = 0, 1  # what random numbers are for


@dataclass(frozen=True)
class Synthetic:
    """Prompts of random token ids, other ones in every pass."""

    count: int
    length: int


@dataclass(frozen=True)
class Sweep:
    """What to measure.

    Attributes:
        draft_lengths: begins with 0, speculation off, which the others are compared with; empty stands for 0 and the
            server's own, until the server has been asked.
        repeats: passes of each setting.
        seed: of arrivals and synthetic prompts; what the server samples stays random.
    """

    prompts: list[Prompt] | Synthetic
    loads: list[Load]
    temperatures: list[float]
    draft_lengths: list[int | None]
    repeats: int
    max_tokens: int
    seed: int

    @property
    def count(self) -> int:
        """Requests of one pass."""
        return self.prompts.count if isinstance(self.prompts, Synthetic) else len(self.prompts)

    @property
    def pass_count(self) -> int:
        """Passes that are measured."""
        return len(self.loads) * len(self.temperatures) * len(self.draft_lengths) * self.repeats

    def order(self) -> Iterator[tuple[int, Setting]]:
        """(repeat, setting) of every pass: off, on, then on, off, and so forth."""
        for load in self.loads:
            for temperature in self.temperatures:
                settings = [Setting(load, temperature, length) for length in self.draft_lengths]
                for repeat in range(self.repeats):
                    yield from ((repeat, setting) for setting in settings[:: -1 if repeat % 2 else 1])

    def prompts_of(self, number: int, vocab_size: int) -> list[Prompt]:
        """What pass ``number`` asks."""
        if not isinstance(self.prompts, Synthetic):
            return self.prompts
        rng = np.random.default_rng((self.seed, _PROMPTS, number))
        return synthetic(self.prompts.count, self.prompts.length, vocab_size, rng)

    def params(self, setting: Setting) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=setting.temperature,
            draft_length=setting.draft_length,
            ignore_eos=isinstance(self.prompts, Synthetic),
        )


async def measure(
    sweep: Sweep, vocab_size: int, generator: LoadGenerator, on_pass: Callable[[int, Setting], None]
) -> AsyncIterator[tuple[Setting, Pass]]:
    """Measures pass after pass; ``on_pass`` is told of each before it begins."""
    for number, (repeat, setting) in enumerate(sweep.order(), start=1):
        on_pass(repeat, setting)
        arrivals = np.random.default_rng((sweep.seed, _ARRIVALS, repeat))  # the same for all settings of a repeat
        prompts = sweep.prompts_of(number, vocab_size)
        yield setting, await generator.run(prompts, sweep.params(setting), setting.load, arrivals)


async def warm_up(sweep: Sweep, vocab_size: int, generator: LoadGenerator) -> None:
    """Asks every prompt for a few tokens, so that no pass is the first to find caches empty and code cold."""
    load = Load(concurrency=max(load.concurrency or _WARM_UP_CONCURRENCY for load in sweep.loads))
    params = SamplingParams(
        max_tokens=min(_WARM_UP_TOKENS, sweep.max_tokens), draft_length=sweep.draft_lengths[-1], ignore_eos=True
    )
    await generator.run(sweep.prompts_of(0, vocab_size), params, load, np.random.default_rng(sweep.seed))
