"""Shows an answer as it comes: tokens coloured by how they came about, then what they cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from pilotfish.cli.console import note, stderr

if TYPE_CHECKING:
    from pilotfish.client.blocking import Stream
    from pilotfish.client.results import Completion, Piece, RoundTimes, Usage

STYLES = {
    "accepted": Style(color="green"),
    "recovered": Style(color="yellow"),
    "bonus": Style(color="cyan"),
}
# A model's control characters, as signs: an escape sequence would command the terminal.
_VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
_VISIBLE |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
LEGEND = "[green]accepted[/] from the draft · [yellow]recovered[/] by the target · [cyan]bonus[/] of the target"


def show(stream: Stream, console: Console) -> Completion:
    """Prints a stream's text as it comes and a line end after it; closes the stream.

    What is no terminal gets exactly the text.
    """
    with stream:
        started = False
        try:
            for piece in stream:
                started = True
                show_piece(piece, console)
        except BaseException:
            if started:
                console.print()  # what is said about it begins a line of its own
            raise
        console.print()
        return stream.result


def show_cost(usage: Usage, out: Console) -> None:
    """Prints what an answer that was shown on ``out`` cost, to stderr."""
    if stderr.is_terminal and not out.is_terminal:
        stderr.print()  # in `... | cat`, the line end of the answer is still on its way
    note(summary(usage))


def show_piece(piece: Piece, console: Console) -> None:
    # Segments, not Text: Text would expand the tabs of the answer.
    table = _VISIBLE if console.is_terminal else {}
    coloured = [Segment(token.text.translate(table), STYLES[token.kind]) for token in piece.tokens]
    console.print(Segments(coloured), end="", soft_wrap=True)


def summary(usage: Usage) -> str:
    """What an answer cost, in one line."""
    seconds = usage.total_us / 1e6
    parts = [f"{usage.completion_tokens} tokens", f"{usage.rounds} rounds"]
    if usage.acceptance is not None:
        parts.append(f"{usage.acceptance:.0%} of {usage.drafted} drafted accepted")
    if usage.tokens_per_round is not None:
        parts.append(f"{usage.tokens_per_round:.2f} tokens/round")
    parts.append(f"{seconds:.2f} s")
    if seconds > 0:
        parts.append(f"{usage.completion_tokens / seconds:.1f} tokens/s")
    if usage.rounds:
        parts.append(f"a round: {round_times(usage.round_median)}")
    return " · ".join(parts)


def round_times(times: RoundTimes) -> str:
    """The four parts of a round, in milliseconds."""
    parts = {"target": times.target_us, "draft": times.draft_us, "hops": times.hops_us}
    parts["orchestrator"] = times.orchestrator_us
    return ", ".join(f"{name} {us / 1000:.1f}" for name, us in parts.items()) + " ms"
