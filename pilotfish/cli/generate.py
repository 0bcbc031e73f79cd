"""``pilotfish generate``: one prompt, one answer."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from pilotfish.cli import options
from pilotfish.cli.answer import show, show_cost
from pilotfish.cli.console import stdout

if TYPE_CHECKING:
    from pilotfish.client.results import Completion


def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue; - reads it from stdin.")],
    server: options.Server = options.ADDRESS,
    max_tokens: options.MaxTokens = 64,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    draft_length: options.DraftLength = None,
    acceptance: options.Acceptance = None,
    chat: Annotated[
        bool, typer.Option("--chat", metavar="", help="Ask it as a user of the model's chat template.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print one object: text, token_ids, finish_reason, usage.")
    ] = False,
    timeout: options.Timeout = None,
) -> None:
    """Continue a text, or answer a question with [bold]--chat[/].

    The text goes to stdout as it is accepted, in a terminal with colours:
    [green]accepted[/] draft tokens, tokens [yellow]recovered[/] by the target
    where the draft failed, and the target's [cyan]bonus[/] tokens.
    What it cost goes to stderr.

    [dim]$ pilotfish generate "Once upon a time" --max-tokens 100[/]
    [dim]$ pilotfish generate --chat "Name three fish." --temperature 0.8 --seed 7[/]
    [dim]$ pilotfish generate --json - < prompt.txt | jq .usage.rounds[/]
    """
    from pilotfish.client.blocking import Client
    from pilotfish.client.params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=stop or (),
        ignore_eos=ignore_eos,
        draft_length=draft_length,
        acceptance=acceptance,
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    with Client(server) as client:
        if chat:
            stream = client.chat_stream([{"role": "user", "content": text}], params, timeout=timeout)
        else:
            stream = client.stream(text, params, timeout=timeout)
        if as_json:
            with stream:
                for _ in stream:
                    pass
            print(_json(stream.result))
        else:
            completion = show(stream, stdout)
            show_cost(completion.usage, stdout)


def _json(completion: Completion) -> str:
    fields = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "usage": dataclasses.asdict(completion.usage),
    }
    return json.dumps(fields, ensure_ascii=False)
