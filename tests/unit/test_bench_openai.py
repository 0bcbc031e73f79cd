"""``pilotfish bench --base-url`` against a server that knows nothing of ours."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_generation import FakeGeneration, unused_address
from fake_generation import serving as serving_grpc
from fake_openai import FakeOpenAI, serving
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from pilotfish.bench.openai_client import shared_out
from pilotfish.cli.main import app


def bench(url: str, *flags: str) -> Result:
    return CliRunner().invoke(app, ["bench", "--base-url", url, *flags], env={"COLUMNS": "80", "OPENAI_API_KEY": ""})


def measured(fake: FakeOpenAI, folder: Path, *flags: str, path: str = "/v1") -> tuple[Result, dict[str, Any]]:
    with serving(fake) as url:
        result = bench(url + path, "--requests", "3", "--repeats", "2", "--out", str(folder / "r"), *flags)
        assert isinstance(result.exception, SystemExit | None), result.exception
    return result, json.loads((folder / "r.json").read_text())


@pytest.mark.parametrize(("endpoint", "path"), [("chat", "/v1/chat/completions"), ("completions", "/v1/completions")])
def test_it_asks_what_any_server_knows(tmp_path: Path, endpoint: str, path: str) -> None:
    fake = FakeOpenAI()
    result, value = measured(fake, tmp_path, "--endpoint", endpoint, "--max-tokens", "7", "--temperature", "0.5")
    assert result.exit_code == 0, result.output
    assert set(fake.paths) == {path}
    _, *asked = fake.bodies
    prompt = "messages" if endpoint == "chat" else "prompt"
    assert {frozenset(body) for body in asked} == {
        frozenset({"model", prompt, "max_tokens", "temperature", "stream", "stream_options"})
    }
    assert (asked[-1]["model"], asked[-1]["max_tokens"], asked[-1]["temperature"]) == ("their-model", 7, 0.5)
    if endpoint == "chat":
        assert [message["role"] for message in asked[-1]["messages"]] == ["user"]
    assert value["api"] == "OpenAI"
    assert value["server"]["model"] == "their-model"


def test_tokens_are_those_of_the_usage(tmp_path: Path) -> None:
    result, value = measured(FakeOpenAI(chunks=("a", "b", "cdef"), tokens=7, gap_s=0.01), tmp_path)
    (found,) = value["results"]
    assert (found["requests"], found["output_tokens"], found["prompt_tokens"], found["cached_tokens"]) == (
        6,
        42,
        54,
        18,
    )
    assert (found["speed_up"], found["rounds"], found["median_round"]) == (None, 0, None)
    assert found["first_token"]["median"] >= 10
    assert found["pause"]["median"] >= 10
    assert found["inter_token"]["median"] < found["pause"]["median"]  # most came several at a time
    assert value["notes"] == []
    assert [line.strip() for line in result.stdout.splitlines() if line.strip() in ("Speed", "Latency, ms")]
    assert "Speculation" not in result.stdout
    assert "33% of the prompt tokens were found in the server's prefix cache" in " ".join(result.stdout.split())
    assert "their-model at http://127.0.0.1" in (tmp_path / "r.html").read_text()


def test_without_usage_chunks_are_counted_and_it_says_so(tmp_path: Path) -> None:
    fake = FakeOpenAI(tokens=None)
    result, value = measured(fake, tmp_path)
    assert result.exit_code == 0, result.output
    (found,) = value["results"]
    assert found["output_tokens"] == 6 * 3
    assert "what is counted are chunks" in " ".join(result.stdout.split())
    assert "stream_options" not in fake.bodies[-1]  # asked for once, and refused


def test_loads_are_kept(tmp_path: Path) -> None:
    fake = FakeOpenAI(gap_s=0.02)
    result, value = measured(fake, tmp_path, "--concurrency", "1,3")
    assert fake.most == 3
    assert [each["setting"]["load"]["concurrency"] for each in value["results"]] == [1, 3]
    slow, fast = (each["tokens_per_s"] for each in value["results"])
    assert fast > slow
    assert "1 at once, pass 1 of 2" in result.stderr
    assert ", K" not in result.stderr


@pytest.mark.parametrize("path", ["", "/", "/v1/"])
def test_the_path_may_be_left_out(tmp_path: Path, path: str) -> None:
    assert measured(FakeOpenAI(), tmp_path, path=path)[0].exit_code == 0


# What goes wrong


@pytest.mark.parametrize(
    ("breaks", "message"),
    [("end", "the connection ended before the answer did"), ("error", "the server failed on the way: out of memory")],
)
def test_a_stream_that_breaks_is_a_failure(tmp_path: Path, breaks: str, message: str) -> None:
    result, value = measured(FakeOpenAI(breaks=breaks), tmp_path)
    assert result.exit_code == 1
    assert value["results"][0]["failures"] == {message: 6}
    assert value["results"][0]["tokens_per_s"] is None


def test_a_key_is_sent_and_missed() -> None:
    with serving(FakeOpenAI(key="sesame")) as url:
        refused = bench(url, "--requests", "1", "--repeats", "1")
        assert refused.exit_code == 1
        assert "answers 401: Incorrect API key provided; give --api-key" in " ".join(refused.stderr.split())
        assert bench(url, "--requests", "1", "--repeats", "1", "--api-key", "sesame").exit_code == 0


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (("a", "b"), "has 2 models; name one with --model: a, b"),
        ((), "has 0 models"),
        (None, "/v1/models is not served; name the model with --model"),
    ],
)
def test_a_model_that_is_not_clear_is_asked_for(models: tuple[str, ...] | None, message: str) -> None:
    with serving(FakeOpenAI(models=models)) as url:
        result = bench(url, "--requests", "1", "--repeats", "1")
        assert result.exit_code == 1
        assert message in " ".join(result.stderr.split())
        if models != ():
            assert bench(url, "--requests", "1", "--repeats", "1", "--model", "a").exit_code == 0


def test_a_request_that_is_refused_says_why() -> None:
    with serving(FakeOpenAI()) as url:
        result = bench(url, "--requests", "1", "--repeats", "1", "--model", "other")
    assert result.exit_code == 1
    assert "answers 404: The model `other` does not exist." in " ".join(result.stdout.split())


def test_a_server_that_is_slow_is_given_up() -> None:
    with serving(FakeOpenAI(gap_s=0.5)) as url:
        result = bench(url, "--requests", "1", "--repeats", "1", "--timeout", "0.2")
    assert result.exit_code == 1
    assert "did not answer in time" in " ".join(result.stdout.split())


def test_nobody_there_is_told_at_once() -> None:
    result = bench(f"http://{unused_address()}/v1")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: nobody answers at http://")


def test_a_port_of_grpc_is_no_http() -> None:
    with serving_grpc(FakeGeneration()) as address:
        result = bench(f"http://{address}")
    assert result.exit_code == 1
    assert "is no HTTP server: the port of gRPC, say?" in " ".join(result.stderr.split())


def test_no_report_has_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["bench", "--api-key", "sesame", "--out", "x", "--api-key=sesame", "--up", "--api-key 'sesame' --pages 9"]
    monkeypatch.setattr(sys, "argv", ["pilotfish", *argv])
    measured(FakeOpenAI(key="sesame"), tmp_path, "--api-key", "sesame")
    for file in (tmp_path / "r.json", tmp_path / "r.html"):
        text = file.read_text()
        assert "sesame" not in text
        assert "--out x" in text
        assert "--pages 9" in text
    result = bench("http://me:sesame@h/v1")
    assert (result.exit_code, "sesame" in result.output) == (1, False)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://h/v1", "http://", "http://[::1/v1", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    result = bench(url)
    assert result.exit_code == 1
    assert "--base-url is" in result.stderr


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--draft-length", "2"], "--draft-length"),
        (["--up", ""], "--up"),
        (["--server", "h:1"], "--server"),
        (["--synthetic", "8,8"], "--synthetic"),
    ],
)
def test_what_needs_our_own_protocol_is_refused_by_name(flags: list[str], named: str) -> None:
    fake = FakeOpenAI()
    with serving(fake) as url:
        result = bench(url, *flags)
    assert result.exit_code == 2
    assert named in result.stderr
    assert fake.bodies == []


@pytest.mark.parametrize("flags", [["--api-key", "k"], ["--model", "m"], ["--endpoint", "chat"]])
def test_what_is_for_a_base_url_is_refused_without_one(flags: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", *flags])
    assert result.exit_code == 2
    assert f"{flags[0]} is for --base-url" in result.stderr


def test_without_httpx2_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx2", None)
    monkeypatch.delitem(sys.modules, "pilotfish.bench.openai_client")
    result = bench("http://127.0.0.1:1/v1")
    assert result.exit_code == 1
    assert "pip install 'pilotfish[bench]'" in result.stderr


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(0, 200))
def test_tokens_are_shared_out_over_chunks(lengths: list[int], total: int) -> None:
    counts = shared_out(total, lengths)
    assert len(counts) == len(lengths)
    assert sum(counts) == (total if lengths else 0)
    assert min(counts, default=0) >= 0
    if total >= len(lengths):
        assert min(counts, default=1) >= 1
