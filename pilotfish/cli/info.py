"""``pilotfish info``: what a server serves, who drafts, and which fields of a request it honours."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from pilotfish.cli import options
from pilotfish.cli.console import stdout

if TYPE_CHECKING:
    from pilotfish.client.results import Capabilities, ServerInfo


def info(
    server: options.Server = options.ADDRESS,
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print one object: server, fields, drafters.")
    ] = False,
    timeout: options.Timeout = 10.0,
) -> None:
    """Tell what a server serves, who drafts for it, and which fields of a request it honours.

    [dim]$ pilotfish info[/]
    [dim]$ pilotfish info --json | jq '.fields[] | select(.honoured | not)'[/]
    """
    from pilotfish.client.blocking import Client

    with Client(server) as client:
        found, capabilities = client.server_info(timeout=timeout), client.capabilities(timeout=timeout)
    if as_json:
        print(json.dumps({"server": dataclasses.asdict(found), **dataclasses.asdict(capabilities)}, ensure_ascii=False))
        return
    stdout.print(_summary(found), soft_wrap=True, markup=False)
    stdout.print(_drafters(capabilities))
    stdout.print(_fields(capabilities))


def _summary(found: ServerInfo) -> str:
    lengths = f"up to {found.draft_length} draft tokens a round" if found.draft_length else "no draft"
    chosen = ", chosen by what pays" if found.adaptive_draft_length else ""
    state = "" if found.target_ready else "; its target is away"
    return (
        f"{found.model} · pilotfish {found.version} · {found.max_len} tokens · "
        f"vocabulary of {found.vocab_size} · {lengths}{chosen}{state}"
    )


def _drafters(capabilities: Capabilities) -> Table:
    table = _table("draft model", "scheme", "replicas", "acceptance", "trees")
    for each in capabilities.drafters:
        rules, trees = ", ".join(each.acceptance_rules), "yes" if each.grows_trees else "no"
        table.add_row(each.model, each.scheme, str(each.replica_count), rules, trees)
    return table


def _fields(capabilities: Capabilities) -> Table:
    table = _table("field", "range", "default", "honoured")
    for field in capabilities.fields:
        table.add_row(field.name, field.range, field.default, "yes" if field.honoured else f"no: {field.reason}")
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
