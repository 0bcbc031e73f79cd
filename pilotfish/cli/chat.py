"""``pilotfish chat``: a conversation, line by line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from pilotfish.cli import options
from pilotfish.cli.answer import LEGEND, show, show_cost
from pilotfish.cli.console import complain, note, stderr, stdout
from pilotfish.errors import InvalidArgumentError, PilotfishError

if TYPE_CHECKING:
    from pilotfish.client.blocking import Client
    from pilotfish.client.params import SamplingParams

_HELP = "/reset forgets the conversation · /quit or Ctrl-D leaves · Ctrl-C stops an answer"


def chat(
    server: options.Server = options.ADDRESS,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="Instruction before the conversation.")
    ] = None,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    top_p: options.TopP = 1.0,
    draft_length: options.DraftLength = None,
    timeout: options.Timeout = None,
) -> None:
    """Talk with the model; every line is a turn.

    /reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer.

    [dim]$ pilotfish chat --system "Answer in one sentence." --temperature 0.7[/]
    [dim]$ printf 'My name is Ada.\\nWhat is my name?\\n' | pilotfish chat[/]
    """
    from pilotfish.client.blocking import Client
    from pilotfish.client.params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, seed=seed, top_p=top_p, draft_length=draft_length
    )
    with Client(server) as client:
        info = client.server_info(timeout=timeout)
        stderr.print(Text(f"{info.model}, draft: {info.draft_model or 'none'}", style="bold"))
        if stdout.is_terminal:
            stderr.print(LEGEND)
        note(_HELP)
        Conversation(client, params, system, timeout).run()


class Conversation:
    """The turns so far, and the loop that adds to them."""

    def __init__(self, client: Client, params: SamplingParams, system: str | None, timeout: float | None) -> None:
        self._client = client
        self._params = params
        self._timeout = timeout
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._start)
        self._interactive = _interactive()

    def run(self) -> None:
        """Takes lines until the input ends or /quit."""
        if self._interactive:
            import readline  # noqa: F401  # gives input() history and editing
        while (line := self._read()) is not None:
            try:
                if not self._take(line):
                    return
            except PilotfishError as error:
                if not self._interactive:
                    raise
                complain(f"error: {error}")

    def _read(self) -> str | None:
        try:
            return input("> " if self._interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            if self._interactive:
                stdout.print()
            return None

    def _take(self, line: str) -> bool:
        """One line; False ends the conversation."""
        if line == "/quit":
            return False
        if line == "/reset":
            self._messages = list(self._start)
            note("forgotten")
        elif line.startswith("/"):
            raise InvalidArgumentError(f"no command {line.split()[0]!r}; {_HELP}")
        elif line:
            self._ask(line)
        return True

    def _ask(self, line: str) -> None:
        messages = [*self._messages, {"role": "user", "content": line}]
        stream = self._client.chat_stream(messages, self._params, timeout=self._timeout)
        try:
            completion = show(stream, stdout)
        except KeyboardInterrupt:
            note("stopped; this turn is forgotten")
            return
        # Only a finished turn counts, so that a failed one can be asked again.
        self._messages = [*messages, {"role": "assistant", "content": completion.text}]
        show_cost(completion.usage, stdout)


def _interactive() -> bool:
    """Whether a person types, not a pipe."""
    return sys.stdin.isatty()
