"""Options that several commands share, and the sampling parameters that they make."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

ADDRESS = "127.0.0.1:50050"  # where `up` listens and the others ask, unless told otherwise

Server = Annotated[
    str, typer.Option("--server", metavar="[HOST:]PORT", envvar="PILOTFISH_SERVER", help="Orchestrator to ask.")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", metavar="N", help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option("--temperature", metavar="T", help="0 always takes the likeliest token.")]
TopK = Annotated[int, typer.Option("--top-k", metavar="K", help="Keep the K likeliest tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option("--top-p", metavar="P", help="Keep the likeliest tokens that reach P together.")]
MinP = Annotated[float, typer.Option("--min-p", metavar="P", help="Drop tokens below P times the likeliest one's.")]
Seed = Annotated[int | None, typer.Option("--seed", metavar="S", help="Same seed, same text, whatever the draft.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help="Stop before this text; repeatable.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", metavar="", help="Go on after the model's own end token.")]
DraftLength = Annotated[
    int | None,
    typer.Option("--draft-length", metavar="K", help="Draft tokens a round; 0: none. Left out: the server's."),
]
Acceptance = Annotated[
    Literal["match", "ratio", "block"] | None,
    typer.Option("--acceptance", help="How draft tokens are judged; all rules are lossless."),
]
Timeout = Annotated[float | None, typer.Option("--timeout", metavar="SECONDS", help="Give up after so long.")]
