"""The real thing: ``pilotfish up`` and its services as processes, asked by the commands and the SDK.

What ``up`` does with processes in general is tested with stand-ins in tests/unit/test_cli_up.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import grpc
import httpx2
import openai
import pytest
import torch
from processes import runs
from simulated import greedy
from tiny_models import load_reference, make_tiny_llama
from waiting import eventually

from pilotfish import Client, NotFoundError, PilotfishError, SamplingParams
from pilotfish.v1 import target_pb2, target_pb2_grpc, types_pb2

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds children in /proc")

PYTHON = [sys.executable, "-P", "-m"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
API_KEY = "a-key-of-the-tests"
PATIENCE_S = 60.0
GIVEN_UP_S = 40.0  # most seconds that a worker which hangs may count as one that answers; ten on a quiet machine
PROMPT = "It is a truth"
TOKENS = 24


class Process:
    """A running command; a context manager. Keeps what it says on stderr, and stops it if the test does not."""

    def __init__(self, *argv: str) -> None:
        pipe = subprocess.PIPE
        self._popen = subprocess.Popen([*PYTHON, *argv], env=ENV, stdout=pipe, stderr=pipe, text=True)
        self.pid = self._popen.pid
        self._stderr: list[str] = []
        self._reader = threading.Thread(target=self._read_stderr)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._popen.poll() is None:
            self._popen.terminate()
        self.wait()
        assert self._popen.stdout is not None
        self._popen.stdout.close()

    @property
    def stderr(self) -> str:
        return "".join(self._stderr)

    def line(self) -> str:
        """The next line on stdout; empty at its end."""
        assert self._popen.stdout is not None
        return self._popen.stdout.readline()

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def wait(self) -> int:
        """Its exit code; all that it said is then in ``stderr``."""
        code = self._popen.wait(PATIENCE_S)
        self._reader.join()
        return code

    def _read_stderr(self) -> None:
        assert self._popen.stderr is not None
        with self._popen.stderr as stream:
            self._stderr.extend(stream)


class Up(Process):
    """``pilotfish up`` on a free port."""

    def __init__(self, *flags: str) -> None:
        http = [] if "--http" in flags else ["--http", "off"]
        super().__init__("pilotfish", "up", "--listen", "127.0.0.1:0", *http, *flags)
        self.ready = self.line()
        self.address = self.ready.split()[1] if self.ready else ""
        self.http = self.ready.partition(" http=")[2].strip()

    def children(self, module: str = "") -> list[int]:
        """Processes that it has started, of one module or all."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(stat.read_text().rpartition(")")[2].split()[1])
                argv = (stat.parent / "cmdline").read_text().split("\0")
            except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                continue
            if parent == self.pid and (not module or module in argv):
                found.append(int(stat.parent.name))
        return found


def command(*argv: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*PYTHON, *argv], env=ENV | env, input=stdin, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert "Traceback" not in done.stderr
    return done


def start_fails(*flags: str) -> str:
    """What an ``up`` says that does not start."""
    with Up(*flags) as up:
        assert up.ready == ""
        assert up.wait() == 1
        assert up.children() == []
    assert "Traceback" not in up.stderr
    return up.stderr


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("target"), layers=3, seed=3)


@pytest.fixture(scope="module")
def up(target: Path) -> Iterator[Up]:
    """Two drafts of the target's first two layers; ended by SIGINT, which must leave nothing behind."""
    flags = ["--draft", str(target), "--draft-layers", "2", "--draft-length", "3", "--replicas", "2"]
    flags += ["--http", "127.0.0.1:0", "--api-key", API_KEY]
    with Up("--target", str(target), *flags) as up:
        yield up
        pids = up.children()
        up.signal(signal.SIGINT)
        assert up.wait() == 0, up.stderr
    assert len(pids) == 4
    assert not any(map(runs, pids))
    assert "Traceback" not in up.stderr


@pytest.fixture(scope="module")
def reference(target: Path) -> list[int]:
    """The greedy continuation of PROMPT that transformers generates."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(target)(PROMPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = load_reference(target).generate(ids, max_new_tokens=TOKENS, do_sample=False)
    return [int(i) for i in out[0, ids.shape[1] :]]


@pytest.fixture(scope="module")
def answer(up: Up) -> dict[str, Any]:
    """What ``pilotfish generate --json`` prints for PROMPT."""
    done = command("pilotfish", "generate", PROMPT, "--max-tokens", str(TOKENS), "--server", up.address, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return dict(json.loads(done.stdout))


# answers


def test_openais_client_gets_the_same_text(up: Up, target: Path, answer: dict[str, Any]) -> None:
    with openai.OpenAI(base_url=f"http://{up.http}/v1", api_key=API_KEY, max_retries=0) as client:
        found = client.completions.create(model=str(target), prompt=PROMPT, max_tokens=TOKENS, temperature=0)
    assert found.choices[0].text == answer["text"]
    with (
        openai.OpenAI(base_url=f"http://{up.http}/v1", api_key="other", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    [orchestrator] = up.children("orchestrator")
    assert API_KEY not in Path(f"/proc/{orchestrator}/cmdline").read_text()
    assert API_KEY not in up.stderr


def test_ready_says_what_is_served(up: Up, target: Path) -> None:
    host, _, port = up.address.partition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0
    served = f"target={target} draft={target}:first-2-layers draft_length=3 http={up.http}"
    assert up.ready == f"ready {up.address} {served}\n"
    assert (len(up.children("draft_svc")), len(up.children())) == (2, 4)


def test_generate_json_is_the_target_s_own_answer_and_what_it_cost(
    answer: dict[str, Any], reference: list[int]
) -> None:
    assert set(answer) == {"text", "token_ids", "finish_reason", "usage"}
    assert answer["token_ids"] == reference
    assert answer["finish_reason"] == "length"
    usage = answer["usage"]
    assert usage["completion_tokens"] == TOKENS
    assert usage["rounds"] + usage["accepted"] + 1 == TOKENS
    assert usage["drafted"] > usage["accepted"] > 0
    assert sum(usage["accepted_per_position"]) == usage["accepted"]
    for times in (usage["round_total"], usage["round_median"]):
        assert set(times) == {
            "target_us", "draft_us", "hops_us", "orchestrator_us", "feature_read_us", "feature_bytes"
        }  # fmt: skip
        assert times["target_us"] > 0
        assert times["draft_us"] > 0


def test_generate_streams_the_text_alone_to_stdout(up: Up, answer: dict[str, Any]) -> None:
    flags = ["--max-tokens", str(TOKENS), "--server", up.address]
    done = command("pilotfish", "generate", "-", *flags, stdin=PROMPT)
    assert done.returncode == 0
    assert done.stdout == answer["text"] + "\n"
    assert done.stderr.startswith(f"{TOKENS} tokens · {answer['usage']['rounds']} rounds · ")


def test_the_sdk_gets_the_same_in_pieces(up: Up, answer: dict[str, Any]) -> None:
    with Client(up.address) as client:
        assert client.server_info().draft_replica_count == 2
        with client.stream(PROMPT, SamplingParams(max_tokens=TOKENS)) as stream:
            pieces = list(stream)
        plain = client.generate(PROMPT, SamplingParams(max_tokens=TOKENS, draft_length=0))
    tokens = [token for piece in pieces for token in piece.tokens]
    assert [token.id for token in tokens] == answer["token_ids"] == list(plain.token_ids)
    assert "".join(piece.text for piece in pieces) == answer["text"] == plain.text
    assert sum(token.kind == "accepted" for token in tokens) == answer["usage"]["accepted"]
    assert plain.usage.drafted == 0


def test_chat_answers_every_line_of_a_pipe(up: Up) -> None:
    done = command("pilotfish", "chat", "--max-tokens", "6", stdin="one\ntwo\n", PILOTFISH_SERVER=up.address)
    assert done.returncode == 0
    with Client(up.address) as client:
        first = client.chat([{"role": "user", "content": "one"}], SamplingParams(max_tokens=6))
        turns = [("user", "one"), ("assistant", first.text), ("user", "two")]
        second = client.chat([{"role": r, "content": c} for r, c in turns], SamplingParams(max_tokens=6))
    assert done.stdout == f"{first.text}\n{second.text}\n"


def test_bench_measures_a_running_server(up: Up, tmp_path: Path) -> None:
    flags = ["--requests", "6", "--repeats", "2", "--max-tokens", "8", "--concurrency", "1,3", "--draft-length", "2"]
    done = command("pilotfish", "bench", *flags, "--server", up.address, "--out", str(tmp_path / "b"))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "b.json").read_text())
    assert report["server"]["draft_replica_count"] == 2
    results = report["results"]
    assert [(r["setting"]["load"]["concurrency"], r["setting"]["draft_length"]) for r in results] == [
        (1, 0), (1, 2), (3, 0), (3, 2),
    ]  # fmt: skip
    for result in results:
        tokens, rounds, accepted = result["output_tokens"], result["rounds"], result["accepted"]
        assert (result["requests"], result["failures"]) == (12, {})
        assert rounds <= tokens - 12 <= rounds + accepted  # a prefill brings one; the last round may be cut
        assert result["cached_tokens"] > 0
        assert result["median_round"]["target"] > 0
    off, on = results[:2]
    assert (off["drafted"], off["acceptance_rate"]) == (0, None)
    assert on["kept_per_position"] == [on["kept_per_position"][0], on["accepted"] - on["kept_per_position"][0]]
    assert on["same_texts"] == on["compared_texts"] == 12
    assert "by position" in done.stdout


def test_bench_starts_a_server_and_stops_it(target: Path) -> None:
    flags = ["--requests", "2", "--repeats", "1", "--synthetic", "30,4", "--rate", "200"]
    done = command("pilotfish", "bench", *flags, "--up", f"--target {target} --draft none")
    assert done.returncode == 0, done.stderr
    address = next(line.split()[1] for line in done.stderr.splitlines() if line.startswith("ready "))
    assert "this server has no draft" in done.stderr
    assert "2 of 2" not in done.stdout
    assert command("pilotfish", "health", address).returncode == 1


def test_bench_tells_why_its_server_did_not_start() -> None:
    done = command("pilotfish", "bench", "--up", "--target /nowhere")
    assert done.returncode == 1
    assert "`pilotfish up` did not start" in done.stderr
    assert "/nowhere" in done.stderr


def test_health(up: Up) -> None:
    done = command("pilotfish", "health", up.address)
    assert (done.returncode, done.stdout, done.stderr) == (0, "serving\n", "")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["x", "--temperature", "-1"], "temperature is -1"),
        (["x", "--top-p", "2"], "top_p is 2"),
        (["x", "--max-tokens", "0"], "max_tokens is 0"),
        (["x", "--max-tokens", "600"], "max_tokens is 600; at most 511 fit"),
        (["", "--temperature", "1"], "prompt is empty"),
        (["x" * 600], "prompt is 600 tokens; at most 511 fit"),
    ],
)
def test_bad_input_is_one_line_and_the_server_goes_on(
    flags: list[str], words: str, up: Up, answer: dict[str, Any]
) -> None:
    done = command("pilotfish", "generate", *flags, "--server", up.address)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {words}")
    assert len(done.stderr.splitlines()) == 1
    with Client(up.address) as client:
        assert client.generate(PROMPT, SamplingParams(max_tokens=TOKENS)).text == answer["text"]


def test_an_unknown_model_is_refused_by_name(up: Up) -> None:
    with Client(up.address) as client, pytest.raises(NotFoundError, match="model is 'gpt'; this server has"):
        client.generate("x", model="gpt")


# deaths


def test_a_killed_draft_is_reported_and_the_text_goes_on(target: Path) -> None:
    """Mid-answer, of the only two replicas one after the other; then SIGTERM, with an answer still running."""
    flags = ["--draft", str(target), "--draft-layers", "2", "--replicas", "2", "--log-level", "info"]
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    with Up("--target", str(target), *flags) as up, Client(up.address) as client:
        drafts = up.children("draft_svc")
        for dead, pid in enumerate(drafts, start=1):
            with client.stream(PROMPT, params) as stream:
                next(stream)
                os.kill(pid, signal.SIGKILL)
                for _ in stream:
                    pass
            plain = client.generate(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True, draft_length=0))
            assert stream.result.token_ids == plain.token_ids
            assert eventually(lambda: up.stderr.count("going on without it") == dead)  # noqa: B023
        report = "draft-0 was killed by SIGKILL; its last lines:\n  stream of orchestrator opened"
        assert report in up.stderr
        assert report.replace("draft-0", "draft-1") in up.stderr
        assert client.server_info().draft_replica_count == 0
        pids = up.children()
        assert len(pids) == 2
        with client.stream(PROMPT, SamplingParams(max_tokens=450, ignore_eos=True)) as stream:
            next(stream)
            up.signal(signal.SIGTERM)
            with pytest.raises(PilotfishError, match="shut"):
                list(stream)
        assert up.wait() == 0, up.stderr
    assert not any(map(runs, pids))
    assert "Traceback" not in up.stderr


def test_simulated_workers_take_no_weights_and_write_what_the_prefix_says(target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(target, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    flags = ["--simulate", "llama-8b-h100", "--replicas", "2", "--target", str(folder)]
    with Up(*flags) as up, Client(up.address) as client:
        completion = client.generate([30, 40, 50], SamplingParams(max_tokens=30, ignore_eos=True))
        assert len(up.children("draft_svc")) == 2
    assert list(completion.token_ids) == greedy([30, 40, 50], 30)


def test_a_killed_target_stops_everything(target: Path) -> None:
    with Up("--target", str(target), "--draft", "none", "--log-level", "info") as up:
        pids = up.children()
        assert len(pids) == 2
        (pid,) = up.children("target_svc")
        os.kill(pid, signal.SIGKILL)
        assert up.wait() == 1
    assert not any(map(runs, pids))
    assert "error: target was killed by SIGKILL; its last lines:\n  stream of orchestrator opened" in up.stderr
    assert "Traceback" not in up.stderr


def test_http_is_on_by_default_and_pages_are_what_the_ready_server_has(target: Path) -> None:
    with Process("pilotfish", "up", "--listen", "127.0.0.1:0", "--target", str(target), "--draft", "none") as up:
        address = up.line().partition(" http=")[2].strip()
        host, _, port = address.partition(":")
        assert host == "127.0.0.1"
        assert int(port) >= 8000
        with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == [str(target)]
    assert "KV cache: 2,048 pages = 32,768 tokens, 64.0 requests of 512; " in up.stderr


# starts that fail


def test_pages_that_do_not_fit_start_nothing(target: Path) -> None:
    said = start_fails("--target", str(target), "--pages", "100000000")
    assert re.search(r"^error: --pages is 100,000,000, which takes .*; at most [\d,]+ pages fit$", said, re.MULTILINE)
    alone = command("target_svc", "--model", str(target), "--listen", "127.0.0.1:0", "--pages", "100000000")
    assert (alone.returncode, alone.stdout) == (2, "")
    assert re.search(r"^pilotfish target: pages is 100,000,000, .* at most [\d,]+ pages fit$", alone.stderr)


def test_a_corrupt_checkpoint(target: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(target, tmp_path / "cut-short")
    os.truncate(folder / "model.safetensors", 20_000)
    said = start_fails("--target", str(folder), "--draft", "none")
    fault = f"pilotfish target: {folder / 'model.safetensors'} is corrupt or cut short"
    assert f"error: target exited with 2; its last lines:\n  {fault}" in said
    assert said.count(fault) == 1


def test_a_missing_folder(tmp_path: Path) -> None:
    said = start_fails("--target", str(tmp_path / "nothing"))
    assert said.startswith(f"error: no model '{tmp_path / 'nothing'}'; give ")
    assert len(said.splitlines()) == 1


def test_mismatched_tokenizers(target: Path, tmp_path: Path) -> None:
    words = make_tiny_llama(tmp_path / "words", layers=1, words=20)
    said = start_fails("--target", str(target), "--draft", str(words))
    assert "error: orchestrator exited with 2; its last lines:\n" in said
    last = said.splitlines()[-1]
    assert last.startswith("  pilotfish orchestrator: draft at ")
    assert "has another tokenizer" in last
    assert "Use a draft of the same family" in last


def test_a_taken_port(target: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        listen = f"127.0.0.1:{server.getsockname()[1]}"
        done = command("pilotfish", "up", "--target", str(target), "--listen", listen)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: --listen is '{listen}', which cannot be bound")
    assert len(done.stderr.splitlines()) == 1


# one service alone


def test_a_service_says_in_one_line_that_its_port_is_taken(target: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        listen = f"127.0.0.1:{server.getsockname()[1]}"
        done = command("pilotfish", "orchestrator", "--model", str(target), "--listen", listen)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"pilotfish orchestrator: listen is '{listen}', which cannot be bound")
    assert len(done.stderr.splitlines()) == 1  # and nothing of gRPC's own


def test_a_worker_s_help() -> None:
    done = command("target_svc", "--help", COLUMNS="100")
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: pilotfish target" in done.stdout
    assert "Hugging Face model folder" in done.stdout
    assert "PILOTFISH_TARGET_LOG_LEVEL" in done.stdout


@pytest.mark.parametrize(
    ("flags", "env", "line"),
    [
        (["--page", "3"], {}, "pilotfish target: --page is no flag; did you mean --pages?"),
        ([], {"PILOTFISH_TARGET_PAGES": "many"}, "pilotfish target: PILOTFISH_TARGET_PAGES: "),
        (
            [],
            {"PILOTFISH_TARGET_PAGE": "3"},
            "pilotfish target: PILOTFISH_TARGET_PAGE in the environment is no setting; did you mean PILOTFISH_TARGET_",
        ),
    ],
)
def test_a_worker_refuses_bad_settings(flags: list[str], env: dict[str, str], line: str, target: Path) -> None:
    done = command("target_svc", "--model", str(target), *flags, **env)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(line)
    assert done.stderr.splitlines()[1:] == ["See `pilotfish target --help`."]


def test_a_worker_with_an_open_stream_ends_at_sigterm(target: Path) -> None:
    with Process("target_svc", "--model", str(target), "--listen", "127.0.0.1:0", "--threads", "1") as worker:
        address = worker.line().split()[2]
        assert command("pilotfish", "health", address).stdout == "serving\n"
        wrong = command("pilotfish", "generate", "x", "--server", address)
        assert wrong.stderr.startswith(f"error: {address} answers, but not this call; is it the address")
        hold = threading.Event()

        def requests() -> Iterator[target_pb2.ExecuteTargetRequest]:
            yield target_pb2.ExecuteTargetRequest(open=types_pb2.StreamOpen(peer="test"))
            hold.wait(PATIENCE_S)

        with grpc.insecure_channel(address) as channel:
            call = target_pb2_grpc.TargetServiceStub(channel).Execute(requests())
            assert next(call).opened.page_count > 0
            worker.signal(signal.SIGTERM)
            with pytest.raises(grpc.RpcError) as ended:
                next(call)
            hold.set()
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert worker.wait() == 0
    assert "target stops" in worker.stderr
    assert "Traceback" not in worker.stderr


def test_workers_that_hang_are_given_up_within_seconds_and_taken_back(target: Path, answer: dict[str, Any]) -> None:
    """Stopped by SIGSTOP: their connections stay open, and nobody answers."""
    flags = ["--draft", str(target), "--draft-layers", "2", "--draft-length", "3", "--http", "127.0.0.1:0"]
    with Up("--target", str(target), *flags) as up, Client(up.address) as client:
        params = SamplingParams(max_tokens=TOKENS)

        def is_ready() -> bool:
            return httpx2.get(f"http://{up.http}/health").status_code == 200

        [draft], [worker] = up.children("draft_svc"), up.children("target_svc")
        os.kill(draft, signal.SIGSTOP)
        assert client.generate(PROMPT, params).text == answer["text"]
        assert eventually(lambda: client.server_info().draft_replica_count == 0, seconds=GIVEN_UP_S)
        os.kill(draft, signal.SIGCONT)
        assert eventually(lambda: client.server_info().draft_replica_count == 1)

        os.kill(worker, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.generate, PROMPT, params)
            assert eventually(lambda: not is_ready(), seconds=GIVEN_UP_S)
            os.kill(worker, signal.SIGCONT)
            assert waiting.result(PATIENCE_S).text == answer["text"]
        assert is_ready()
        up.signal(signal.SIGINT)
        assert up.wait() == 0


def test_check_stops_its_server_and_its_laboratory_and_calls_itself_incomplete(target: Path, tmp_path: Path) -> None:
    """SIGTERM comes when one of its two checks has ended."""
    flags = ["--only", "unseeded", "--only", "laboratory", "--budget", "1", "--report", str(tmp_path / "r.html")]
    argv = [*PYTHON, "pilotfish", "check", *flags, "--up", f"--target {target} --draft none"]
    with subprocess.Popen(argv, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "] laboratory: " in line:
                process.terminate()
                break
        said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM
    wanted = "incomplete (stopped by SIGTERM): 1 of 2 checks did not come to their end (laboratory)"
    assert wanted in said
    assert wanted in (tmp_path / "r.html").read_text()
    addresses = [line.split()[1] for line in lines if line.startswith("ready ")]
    assert len(addresses) == 2
    for address in addresses:
        assert command("pilotfish", "health", address).returncode == 1
