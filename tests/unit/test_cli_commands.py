"""The commands that ask a server, against a scripted one: what lands on stdout, on stderr, in the exit code."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from fake_generation import INFO, FakeGeneration, Status, answer, serving, started, unused_address
from rich.console import Console
from typer.testing import CliRunner

from pilotfish import Client, Piece, RoundTimes, Token
from pilotfish.cli import demo
from pilotfish.cli.answer import show_cost, show_piece
from pilotfish.cli.main import app

# generate


def test_generate_prints_the_text_alone_on_stdout(address: str) -> None:
    result = CliRunner().invoke(app, ["generate", "hello"])
    assert result.exit_code == 0
    assert result.stdout == "Hé\tyo!\n"
    assert result.stderr == (
        "4 tokens · 2 rounds · 50% of 4 drafted accepted · 2.00 tokens/round · 2.00 s · 2.0 tokens/s"
        " · a round: target 4.0, draft 3.0, hops 2.0, orchestrator 1.0 ms\n"
    )


def test_generate_json_is_one_object(address: str) -> None:
    result = CliRunner().invoke(app, ["generate", "hello", "--json"])
    assert result.stderr == ""
    printed = json.loads(result.stdout)
    assert set(printed) == {"text", "token_ids", "finish_reason", "usage"}
    assert (printed["text"], printed["token_ids"], printed["finish_reason"]) == ("Hé\tyo!", [1, 2, 3, 4], "length")
    assert printed["usage"]["accepted_per_position"] == [2, 0]
    assert printed["usage"]["round_median"] == {
        "target_us": 4000, "draft_us": 3000, "hops_us": 2000, "orchestrator_us": 1000,
        "feature_read_us": 500, "feature_bytes": 9000,
    }  # fmt: skip


def test_generate_sends_what_its_flags_say(fake: FakeGeneration, address: str) -> None:
    flags = "--max-tokens 5 --temperature 0.5 --seed 7 --top-k 3 --top-p 0.25 --min-p 0.125 --stop a --stop b"
    flags += " --ignore-eos --draft-length 2 --acceptance ratio --server " + address
    assert CliRunner().invoke(app, ["generate", "hello", *flags.split()]).exit_code == 0
    (request,) = fake.requests
    sampling = request.sampling
    assert request.text == "hello"
    assert (sampling.max_tokens, sampling.temperature, sampling.seed, sampling.top_k) == (5, 0.5, 7, 3)
    assert (sampling.top_p, sampling.min_p, list(sampling.stop)) == (0.25, 0.125, ["a", "b"])
    assert (sampling.ignore_eos, sampling.draft_length, sampling.acceptance) == (True, 2, 2)


def test_generate_reads_stdin(fake: FakeGeneration, address: str) -> None:
    assert CliRunner().invoke(app, ["generate", "-"], input="two\nlines").exit_code == 0
    assert fake.requests[0].text == "two\nlines"


def test_generate_can_ask_in_the_chat_template(fake: FakeGeneration, address: str) -> None:
    assert CliRunner().invoke(app, ["generate", "--chat", "hello"]).exit_code == 0
    assert [(m.role, m.content) for m in fake.requests[0].messages.messages] == [("user", "hello")]


def test_a_refusal_is_one_line_and_exit_code_1(fake: FakeGeneration, address: str) -> None:
    fake.script = [started(), Status(grpc.StatusCode.INVALID_ARGUMENT, "top_p is 2; it must be in (0, 1]")]
    result = CliRunner().invoke(app, ["generate", "hello", "--top-p", "2"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: top_p is 2; it must be in (0, 1]\n"


@pytest.mark.parametrize("command", [["generate", "x"], ["generate", "x", "--json"], ["chat"]])
def test_nobody_there_says_how_to_start_somebody(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--server", unused_address()])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: nobody answers at 127.0.0.1:")
    assert "start a server with `pilotfish up`" in result.stderr


@pytest.mark.parametrize("command", [["generate"], ["generate", "x", "--acceptance", "typical"], ["nonsense"]])
def test_bad_usage_exits_with_2(command: list[str]) -> None:
    assert CliRunner().invoke(app, command).exit_code == 2


def test_tokens_are_coloured_by_kind() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, color_system="standard", legacy_windows=False)
    tokens = (Token(1, "one\t", "accepted"), Token(2, " two", "recovered"), Token(3, " [b]three", "bonus"))
    show_piece(Piece(tokens, 2, RoundTimes(1, 1, 1, 1)), console)
    assert written.getvalue() == "\x1b[32mone\t\x1b[0m\x1b[33m two\x1b[0m\x1b[36m [b]three\x1b[0m"


def test_a_terminal_gets_no_commands_from_a_model() -> None:
    tokens = (Token(1, "a\x1b[2J\x07\x9b\tb\nc", "bonus"),)
    for is_terminal, text in ((True, "a␛[2J␇\ufffd\tb\nc"), (False, "a\x1b[2J\x07\x9b\tb\nc")):
        written = io.StringIO()
        console = Console(file=written, force_terminal=is_terminal, color_system=None, legacy_windows=False)
        show_piece(Piece(tokens, 0, RoundTimes(1, 1, 1, 1)), console)
        assert written.getvalue() == text


def test_an_answer_that_breaks_off_ends_its_line(fake: FakeGeneration, address: str) -> None:
    fake.script = [*answer()[:2], Status(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")]
    result = CliRunner().invoke(app, ["generate", "hello"])
    assert result.exit_code == 1
    assert result.output.endswith("\nerror: " + f"{address}: the server is shutting down\n")
    assert len(result.stdout) > 1


def test_costs_do_not_overtake_the_answer_s_line_end(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Client(address) as client:
        usage = client.generate("x").usage
    for is_terminal, before in ((True, "\n"), (False, "")):
        shown = io.StringIO()
        console = Console(file=shown, force_terminal=is_terminal, color_system=None, width=999)
        monkeypatch.setattr("pilotfish.cli.answer.stderr", console)
        monkeypatch.setattr("pilotfish.cli.console.stderr", console)
        show_cost(usage, Console(file=io.StringIO()))
        assert re.sub(r"\x1b\[\d*m", "", shown.getvalue()).startswith(f"{before}4 tokens · 2 rounds")


def test_long_lines_are_not_broken() -> None:
    written = io.StringIO()
    text = "word " * 100
    show_piece(Piece((Token(1, text, "bonus"),), 0, RoundTimes(1, 1, 1, 1)), Console(file=written, width=40))
    assert written.getvalue() == text


# chat


def contents(fake: FakeGeneration) -> list[list[str]]:
    return [[message.content for message in request.messages.messages] for request in fake.requests]


def test_chat_keeps_the_conversation_until_reset(fake: FakeGeneration, address: str) -> None:
    lines = "one\n\ntwo\n/reset\nthree\n"
    result = CliRunner().invoke(app, ["chat", "--system", "be brief"], input=lines)
    assert result.exit_code == 0
    assert result.stdout == "Hé\tyo!\n" * 3
    assert contents(fake) == [
        ["be brief", "one"],
        ["be brief", "one", "Hé\tyo!", "two"],
        ["be brief", "three"],
    ]
    roles = [message.role for message in fake.requests[1].messages.messages]
    assert roles == ["system", "user", "assistant", "user"]


def test_chat_ends_at_quit(fake: FakeGeneration, address: str) -> None:
    assert CliRunner().invoke(app, ["chat"], input="one\n/quit\ntwo\n").exit_code == 0
    assert contents(fake) == [["one"]]


def test_chat_says_whom_it_talks_to(address: str) -> None:
    result = CliRunner().invoke(app, ["chat"], input="")
    assert f"{INFO.model}, draft: {INFO.draft_model}" in result.stderr


def test_chat_refuses_an_unknown_command(fake: FakeGeneration, address: str) -> None:
    result = CliRunner().invoke(app, ["chat"], input="/nonsense now\n")
    assert result.exit_code == 1
    assert "error: no command '/nonsense'; /reset forgets" in result.stderr
    assert fake.requests == []


def test_chat_in_a_terminal_goes_on_after_an_error(
    fake: FakeGeneration, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: Iterator[str | Callable[[], str]] = iter(["/nonsense", "one", "two"])

    def typed(prompt: str) -> str:
        if fake.requests:
            fake.script = answer()
        try:
            return str(next(lines))
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr("pilotfish.cli.chat._interactive", lambda: True)
    fake.script = [started(), Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")]
    result = CliRunner().invoke(app, ["chat"])
    assert result.exit_code == 0
    assert "error: no command '/nonsense'" in result.stderr
    assert "error: the queue is full" in result.stderr
    assert contents(fake) == [["one"], ["two"]]  # the turn that failed is not part of the conversation


# pull, health, info, services


def test_pull_prints_the_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    result = CliRunner().invoke(app, ["pull", str(tmp_path)])
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{tmp_path}\n", "")


def test_pull_of_an_unknown_name_exits_with_1() -> None:
    result = CliRunner().invoke(app, ["pull", "nonsense"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(
        "error: no model 'nonsense'; give a known name (smollm2, smollm2-draft, smollm2-eagle3, smollm2-mtp)"
    )


def test_health_tells_by_its_exit_code(address: str) -> None:
    assert CliRunner().invoke(app, ["health", address]).stdout == "serving\n"
    with serving(FakeGeneration(), healthy=False) as other:
        result = CliRunner().invoke(app, ["health", other])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "does not serve now" in result.stderr


def test_info_tells_what_is_served_and_honoured(address: str) -> None:
    lines = CliRunner().invoke(app, ["info", "--server", address]).stdout.splitlines()
    assert lines[0] == (
        "tiny · pilotfish 1 · 64 tokens · vocabulary of 9 · up to 4 draft tokens a round, chosen by what pays"
    )
    assert [line.split() for line in lines[1:3]] == [
        ["draft", "model", "scheme", "replicas", "acceptance", "trees"],
        ["d", "mtp", "2", "match,", "ratio", "yes"],
    ]
    assert [line.split() for line in lines[3:]] == [
        ["field", "range", "default", "honoured"],
        ["n", "[1,", "128]", "1", "yes"],
        ["logprobs", "[0,", "20]", "none", "no:", "none", "here"],
    ]


def test_info_as_json(address: str) -> None:
    found = json.loads(CliRunner().invoke(app, ["info", "--server", address, "--json"]).stdout)
    assert found["server"]["model"] == "tiny"
    assert [drafter["scheme"] for drafter in found["drafters"]] == ["mtp"]
    assert [field["name"] for field in found["fields"] if not field["honoured"]] == ["logprobs"]


@pytest.mark.parametrize(
    ("command", "module"),
    [("target", "target_svc.server"), ("draft", "draft_svc.server"), ("orchestrator", "orchestrator.server")],
)
@pytest.mark.parametrize("argv", [[], ["--help"], ["--model", "m", "extra", "--flag=1", "-x"]])
def test_services_get_their_arguments_untouched(
    command: str, module: str, argv: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[list[str]] = []
    fake_module = types.ModuleType(module)
    fake_module.main = got.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module, fake_module)
    assert CliRunner().invoke(app, [command, *argv]).exit_code == 0
    assert got == [argv]


@pytest.mark.parametrize("command", ["", "pull", "up", "generate", "chat", "bench", "demo", "health", "info"])
def test_help_shows_examples(command: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0
    assert "pilotfish" in result.stdout.replace("Usage: pilotfish", "")


# demo


def test_the_demo_s_numbers(address: str) -> None:
    with Client(address) as client:
        completion = client.generate("x")
    slow = dataclasses.replace(completion, usage=dataclasses.replace(completion.usage, total_us=5_000_000))
    # Three repeats of each of two prompts: 2 s, 5 s, 2 s; the median counts.
    measured = demo._Measured([[completion, slow, completion]] * 2)
    plain = demo._Measured([[slow]] * 2)
    assert measured.seconds == 4.0
    written = io.StringIO()
    Console(file=written, width=80).print(demo._table(measured, plain))
    rows = [
        [cell.strip() for cell in line.strip("│\n").split("│")]
        for line in written.getvalue().splitlines()
        if "│" in line
    ]
    assert rows == [
        ["tokens", "8", "8"],
        ["rounds", "4", "4"],
        ["drafted", "8", "8"],
        ["accepted", "4", "4"],
        ["acceptance", "50%", "50%"],
        ["tokens per round", "2.00", "2.00"],
        ["time", "4.00 s", "10.00 s"],
        ["tokens per second", "2.0", "0.8"],
        ["a round: target", "4.0 ms", "4.0 ms"],
        ["a round: draft", "3.0 ms", "3.0 ms"],
        ["a round: hops", "2.0 ms", "2.0 ms"],
        ["a round: orchestrator", "1.0 ms", "1.0 ms"],
    ]
    assert "2.50 times as fast. It is the target itself, rounded to int8" in demo._about_the_draft(measured, plain)
    assert "2.50 times slower." in demo._about_the_draft(plain, measured)
    roundless = demo._Measured([[dataclasses.replace(slow, usage=dataclasses.replace(slow.usage, rounds=0))]])
    assert demo._milliseconds("target_us", roundless) == "–"
    assert demo._ratio(1, 0, "{:.2f}") == "–"


def test_the_demo_tells_where_texts_part(address: str) -> None:
    with Client(address) as client:
        completion = client.generate("x")
    same = demo._Measured([[completion] * 2] * 3)
    assert demo._verdict(same, same).endswith("the draft, token for token, in all 12 answers")
    other = dataclasses.replace(completion, token_ids=(1, 2, 9, 4))
    shorter = dataclasses.replace(completion, token_ids=(1, 2))
    for odd in (other, shorter):
        parted = demo._Measured([[completion] * 2, [completion, odd], [completion] * 2])
        first, why, _ = demo._verdict(same, parted).splitlines()
        assert first == f"[yellow]not the same text[/] from token 3 on: {demo._PROMPTS[1]}"
        assert why.startswith("The draft decides nothing.")


def test_the_demo_takes_turns(fake: FakeGeneration, address: str) -> None:
    with Client(address) as client:
        with_draft, without = demo._measure(client, 5, 2)
    asked = [(r.messages.messages[0].content, r.sampling.HasField("draft_length")) for r in fake.requests]
    prompts = list(demo._PROMPTS)
    assert asked[: 2 * len(prompts)] == [(prompt, plain) for prompt in prompts for plain in (False, True)]
    assert asked[2 * len(prompts) :] == [(prompt, plain) for prompt in prompts for plain in (True, False)]
    assert all(r.sampling.draft_length == 0 for r in fake.requests)
    assert [len(runs) for runs in with_draft.runs + without.runs] == [2] * 2 * len(prompts)
