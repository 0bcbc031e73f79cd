"""The commands of ``pilotfish``, and what an error looks like."""

from __future__ import annotations

from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import pilotfish
from pilotfish import extras
from pilotfish.cli import bench, chat, check, demo, generate, health, info, pull, services, train, up
from pilotfish.cli.console import complain
from pilotfish.errors import PilotfishError
from pilotfish.logs import silence_grpc_core


class _Commands(TyperGroup):
    """Reports every error of ours as one line on stderr and exits with 1; bad usage exits with 2."""

    def invoke(self, ctx: Any) -> Any:
        silence_grpc_core()
        try:
            return super().invoke(ctx)
        except PilotfishError as error:
            _fail(error)
        except ModuleNotFoundError as error:
            explained = extras.explain(error, f"pilotfish {ctx.invoked_subcommand}")
            if explained is None:
                raise
            _fail(explained)


def _fail(error: PilotfishError) -> NoReturn:
    complain(f"error: {error}")
    raise typer.Exit(1) from error


app = typer.Typer(
    cls=_Commands,
    name="pilotfish",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    help="A small draft model proposes, the large target model checks: the target's own text, only sooner.",
    epilog="Start with [bold]pilotfish up[/], then in a second terminal [bold]pilotfish chat[/].",
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"pilotfish {pilotfish.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", metavar="", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.command(rich_help_panel="Start here")(demo.demo)
app.command(rich_help_panel="Start here")(up.up)
app.command(rich_help_panel="Ask")(generate.generate)
app.command(rich_help_panel="Ask")(chat.chat)
app.command(rich_help_panel="Ask")(bench.bench)
app.command(rich_help_panel="Ask")(check.check)
app.command(rich_help_panel="Ask")(info.info)
app.command(rich_help_panel="Run the parts yourself")(pull.pull)
app.add_typer(train.app, rich_help_panel="Run the parts yourself")
for _name, _command in services.COMMANDS.items():
    app.command(
        _name,
        rich_help_panel="Run the parts yourself",
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(_command)
app.command(rich_help_panel="Run the parts yourself")(health.health)
