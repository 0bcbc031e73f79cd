"""What a call has cost, in OpenAI's shape, with what speculation did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from orchestrator.usage import Usage


class UsageCount:
    """Adds up the samples of a call.

    Args:
        prompts: token counts; each prompt counts once, however many samples it has.

    Attributes:
        reasoning_tokens: tokens of reasoning, part of the completions.
    """

    def __init__(self, prompts: Sequence[int]) -> None:
        self._prompts = prompts
        self.reasoning_tokens = 0
        self._cached: dict[int, int] = {}
        self._usages: list[Usage] = []

    def add(self, prompt: int, usage: Usage) -> None:
        """Counts a sample of the prompt of that index."""
        self._cached[prompt] = max(self._cached.get(prompt, 0), usage.cached_tokens)
        self._usages.append(usage)

    def classic(self) -> dict[str, Any]:
        """The ``usage`` of completions and chat completions.

        ``accepted_prediction_tokens`` and ``rejected_prediction_tokens`` are draft tokens kept and dropped; dropped
        ones are not part of ``completion_tokens``.
        """
        prompt, completion = sum(self._prompts), self._sum("completion_tokens")
        accepted = self._sum("accepted")
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning_tokens,
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": self._sum("drafted") - accepted,
            },
            "speculation": self._speculation(),
        }

    def response(self) -> dict[str, Any]:
        """The ``usage`` of responses."""
        prompt, completion = sum(self._prompts), self._sum("completion_tokens")
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": sum(self._cached.values()), "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": prompt + completion,
            "speculation": self._speculation(),
        }

    def _speculation(self) -> dict[str, Any]:
        """Counts as in ``Usage`` of generation.proto, summed over the samples."""
        times = [usage.round_total for usage in self._usages]
        return {
            "rounds": self._sum("rounds"),
            "drafted": self._sum("drafted"),
            "accepted": self._sum("accepted"),
            "accepted_per_position": _sum_per_position(usage.accepted_per_position for usage in self._usages),
            "drafted_per_position": _sum_per_position(usage.drafted_per_position for usage in self._usages),
            "preemptions": self._sum("preemptions"),
            "round_total": _sum_by_name(map(asdict, times)),
        }

    def _sum(self, name: str) -> int:
        return sum(getattr(usage, name) for usage in self._usages)


def _sum_per_position(counts: Iterable[Sequence[int]]) -> list[int]:
    return [sum(at_position) for at_position in zip_longest(*counts, fillvalue=0)]


def _sum_by_name(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0) + value
    return total
