"""Measuring beside peers: numbers and tables from made-up answers, turns with fake peers, engines on a tiny model."""

from __future__ import annotations

import io
import json
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peer_worker
import peers
import pytest
import torch
from peer_process import Peer, PeerError, in_turns, measure
from peer_results import Answer, Row, Turn, against_table, as_json, differences, first_difference, ratio, result_table
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from tiny_models import load_reference
from write_gguf import write_gguf

from orchestrator.tokenizer import Tokenizer
from pilotfish.checkpoints import gguf_llama
from pilotfish.errors import InvalidArgumentError

FAKE = Path(__file__).parent.parent / "fake_peer.py"
PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8], [9]]


def fake(name: str, diary: Path, *fault: str, seconds: float = 0.5, max_batch: int | None = None) -> Row:
    return Row(name, "bfloat16", (sys.executable, str(FAKE), name, str(seconds), str(diary), *fault), max_batch)


def even(seconds: float, *token_ids: int, first: float = 1.0) -> Answer:
    """The first token after ``first`` seconds, the others ``seconds`` apart."""
    return Answer(token_ids, tuple(first + seconds * index for index in range(len(token_ids))))


def printed(table: Table) -> list[list[str]]:
    """The cells of a table in Markdown, the header first."""
    console = Console(file=io.StringIO(), width=300)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    lines = [line for line in console.file.getvalue().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("|-")]


def test_speeds_of_one_answer() -> None:
    turn = Turn((even(0.25, 1, 2, 3, 4, 5, first=3.0),))
    assert turn.decode_speed == pytest.approx(4.0)  # 4 tokens in the second after the first token
    assert turn.total_speed == pytest.approx(5 / 4)


def test_decoding_of_several_begins_when_each_has_its_first_token() -> None:
    early, late = even(0.5, 1, 2, 3, 4, first=1.0), even(0.5, 5, 6, 7, 8, first=2.0)
    turn = Turn((early, late))
    # From 2.0 to 3.5: one token of the early answer, at 2.5 (the one at 2.0 is not after), and three of the late one.
    assert turn.decode_speed == pytest.approx(4 / 1.5)
    assert turn.total_speed == pytest.approx(8 / 3.5)


def test_a_burst_counts_with_all_its_tokens() -> None:
    turn = Turn((Answer((1, 2, 3, 4, 5), (1.0, 2.0, 2.0, 2.0, 3.0)),))
    assert turn.decode_speed == pytest.approx(2.0)


def test_the_ratio_is_the_median_of_the_repeats_own() -> None:
    ours = [Turn((even(seconds, 1, 2, 3),)) for seconds in (0.1, 0.2, 0.3)]
    theirs = [Turn((even(seconds, 1, 2, 3),)) for seconds in (0.1, 0.8, 0.6)]
    assert ratio(ours, theirs) == pytest.approx(2.0)  # of 1, 4 and 2; of the medians it would be 3
    assert ratio(ours, theirs[:1]) == pytest.approx(1.0)  # the other failed after one repeat
    assert ratio(ours, []) is None


@pytest.mark.parametrize(
    ("one", "other", "position"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 2), ([1, 2], [1], 2), ([], [1], 1), ([], [], None)],
)
def test_where_two_sequences_part(one: list[int], other: list[int], position: int | None) -> None:
    assert first_difference(one, other) == position


def test_answers_are_compared_prompt_by_prompt() -> None:
    ours = [Turn((even(1, 1, 2), even(1, 3, 4))), Turn((even(1, 5, 6), even(1, 7, 8)))]
    theirs = [Turn((even(1, 1, 2), even(1, 3, 9))), Turn((even(1, 9, 6), even(1, 7, 8)))]
    assert differences(ours, theirs) == [None, 2, 1, None]


ROWS = [Row(name, "bfloat16", ("x",)) for name in ("hf bf16", "llama.cpp bf16", "gone", "pilotfish --draft none")]
RESULTS = {
    "hf bf16": {1: [Turn((even(1.0, 1, 2, 3),))], 8: [Turn((even(1.0, 1, 2, 3), even(1.0, 4, 5, 6)))]},
    "llama.cpp bf16": {1: [Turn((even(0.4, 1, 2, 9),))], 8: []},
    "pilotfish --draft none": {1: [Turn((even(0.2, 1, 2, 3),))], 8: [Turn((even(0.5, 1, 2, 3), even(0.5, 4, 5, 6)))]},
}


def test_the_table_has_speeds_ratios_and_whether_the_text_is_the_same() -> None:
    header, *lines = printed(result_table(ROWS, RESULTS, [1, 8], markdown=True))
    assert header == ["", "batch 1", "end to end", "× hf", "batch 8", "end to end", "× hf", "same as hf"]
    assert lines == [
        ["hf bf16", "1.0", "1.0", "1.00", "2.0", "2.0", "1.00", "–"],
        ["llama.cpp bf16", "2.5", "1.7", "2.50", "–", "–", "–", "0 of 1, from 3"],
        ["pilotfish --draft none", "5.0", "2.1", "5.00", "4.0", "3.0", "2.00", "3 of 3"],
    ]


def test_without_hugging_face_there_is_nothing_to_compare_with() -> None:
    results = {name: RESULTS[name] for name in ("llama.cpp bf16", "pilotfish --draft none")}
    _, *lines = printed(result_table(ROWS, results, [1], markdown=True))
    assert [line[3:] for line in lines] == [["–", "–"], ["–", "–"]]


def test_texts_are_compared_within_a_dtype_and_speeds_with_the_first_row() -> None:
    rows = [*ROWS, Row("hf fp32", "float32", ("x",)), Row("pilotfish fp32", "float32", ("x",))]
    other = [Turn((even(0.5, 7, 8, 9),))]
    _, *lines = printed(result_table(rows, {**RESULTS, "hf fp32": {1: other}, "pilotfish fp32": {1: other}}, [1], True))
    assert lines[-2:] == [
        ["hf fp32", "2.0", "1.5", "2.00", "–"],
        ["pilotfish fp32", "2.0", "1.5", "2.00", "1 of 1"],
    ]


def test_ours_against_each_other_peer() -> None:
    assert printed(against_table(ROWS, RESULTS, 1, markdown=True)) == [
        ["batch 1, × …", "pilotfish --draft none"],
        ["hf bf16", "5.00"],
        ["llama.cpp bf16", "2.00"],
    ]
    assert [line[0] for line in printed(against_table(ROWS, RESULTS, 8, markdown=True))] == ["batch 8, × …", "hf bf16"]


def test_what_was_measured_is_written_whole() -> None:
    written = json.loads(as_json(ROWS, RESULTS, dict.fromkeys(RESULTS, "1.0"), {"threads": 2}))
    assert written["threads"] == 2
    assert [row["name"] for row in written["rows"]] == list(RESULTS)
    assert written["rows"][0]["turns"]["8"][0][1] == {"token_ids": [4, 5, 6], "times": [1.0, 2.0, 3.0]}


def test_peers_take_turns_on_the_same_prompts(tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    rows = [fake("a", diary), fake("b", diary, max_batch=1), fake("c", diary)]
    with Peer(rows[0], tmp_path / "a") as a, Peer(rows[1], tmp_path / "b") as b, Peer(rows[2], tmp_path / "c") as c:
        assert a.version == "fake a"
        outcomes = [(peer.row.name, batch, turn) for peer, batch, turn in measure([a, b, c], PROMPTS, [1, 2], 2, 3)]
    assert diary.read_text().splitlines() == [
        *(f"{name} [[1, 2, 3]] 3" for name in "abc"),
        *(f"{name} [[4, 5], [6]] 3" for name in "ac"),
        *(f"{name} [[7, 8]] 3" for name in "cba"),
        *(f"{name} [[9], [1, 2, 3]] 3" for name in "ca"),  # from the start again
    ]
    assert outcomes[3] == ("a", 2, Turn((Answer((6, 7, 8), (0.5, 1.0, 1.5)), Answer((7, 8, 9), (0.5, 1.0, 1.5)))))
    assert [name for name, *_ in outcomes] == list("abcaccbaca")


def test_who_cannot_answer_so_many_at_once_is_passed_over(tmp_path: Path) -> None:
    with Peer(fake("a", tmp_path, max_batch=4), tmp_path / "log") as peer:
        assert in_turns([peer], 4, 0) == [peer]
        assert in_turns([peer], 5, 1) == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [("dies", r"b has died; its last lines:\n  out of fish"), ("short", r"b answered with 2 tokens; 3 were asked for")],
)
def test_a_peer_that_fails_is_not_asked_again(tmp_path: Path, fault: str, message: str) -> None:
    diary = tmp_path / "diary"
    with Peer(fake("a", diary), tmp_path / "a") as a, Peer(fake("b", diary, fault), tmp_path / "b") as b:
        outcomes = list(measure([a, b], PROMPTS, [1], 3, 3))
    assert [peer.row.name for peer, *_ in outcomes] == ["a", "b", "a", "a"]
    error = outcomes[1][2]
    assert isinstance(error, PeerError)
    with pytest.raises(PeerError, match=message):
        raise error


def test_a_peer_that_has_died_unasked_says_so(tmp_path: Path) -> None:
    with Peer(fake("b", tmp_path / "diary", "dies"), tmp_path / "log") as peer:
        for _ in range(2):  # the second question finds a broken pipe, or no reply
            with pytest.raises(PeerError, match="b has died"):
                peer.ask(PROMPTS, 3)


def test_a_peer_that_is_not_installed_is_left_out_with_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = io.StringIO()
    monkeypatch.setattr(peers, "stderr", Console(file=heard, width=200))
    run = peers.Run([fake("a", tmp_path / "diary", "broken"), fake("b", tmp_path / "diary")], [1, 2], 2, 32)
    run(PROMPTS)
    assert "left out: a did not start: ModuleNotFoundError: No module named 'fake'" in heard.getvalue()
    assert {name: {batch: len(turns) for batch, turns in by.items()} for name, by in run.results.items()} == {
        "b": {1: 2, 2: 2}
    }
    assert run.versions == {"b": "fake b"}


def test_a_peer_without_an_interpreter_says_so(tmp_path: Path) -> None:
    row = Row("vllm bf16", "bfloat16", (str(tmp_path / "nowhere" / "python"),))
    with pytest.raises(PeerError, match=r"vllm bf16 did not start: .*No such file or directory: .*nowhere/python"):
        Peer(row, tmp_path / "log")


def make_rows(kinds: list[str], ups: list[str]) -> list[Row]:
    settings: dict[str, Any] = {"model": Path("m"), "gguf_folder": Path("g"), "threads": 2, "assistant_layers": 7}
    return peers.make_rows(kinds, ["bfloat16", "float32"], ups, pythons={"vllm": "other"}, **settings)


def test_rows_of_every_peer_in_every_dtype() -> None:
    rows = {row.name: row for row in make_rows(["hf-assistant", "llama.cpp", "vllm", "pilotfish"], ["--dtype float32"])}
    assert list(rows) == [
        *("hf bf16 assistant", "llama.cpp bf16", "vllm bf16"),
        *("hf fp32 assistant", "llama.cpp fp32", "vllm fp32"),
        "pilotfish --dtype float32",
    ]
    worker = str(peers.WORKER)
    tail = ("--threads", "2")
    assert rows["vllm bf16"].command == ("other", worker, "vllm", "--model", "m", "--dtype", "bfloat16", *tail)
    assert rows["llama.cpp fp32"].command[3:5] == ("--model", "g/float32.gguf")
    assert rows["llama.cpp fp32"].max_batch == 1
    assert rows["hf bf16 assistant"].command[-1] == "--assistant-layers=7"
    assert rows["pilotfish --dtype float32"].command[-1] == "--up=--dtype float32"


@pytest.mark.parametrize(
    ("flags", "dtype"), [("", "float32"), ("--draft none --dtype bfloat16", "bfloat16"), ("--dtype=float16", "float16")]
)
def test_the_dtype_of_a_row_of_ours_is_read_from_its_flags(flags: str, dtype: str) -> None:
    assert peers.dtype_of(flags) == dtype


def test_prompts_are_mixed_evenly_and_long_ones_left_out(tmp_path: Path, model_folder: Callable[..., Path]) -> None:
    tokenizer = Tokenizer(model_folder())
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    files[0].write_text("".join(json.dumps({"turns": [text, "later"]}) + "\n" for text in ("one", "two", "x" * 600)))
    files[1].write_text(json.dumps({"turns": ["three"]}))
    chats = [[{"role": "user", "content": text}] for text in ("one", "three", "two")]
    assert peers.read_prompts(files, tokenizer) == [tokenizer.encode_chat(chat) for chat in chats]
    files[1].write_text(json.dumps({"turns": ["x" * 600]}))
    with pytest.raises(InvalidArgumentError, match="all prompts are longer than 512 tokens"):
        peers.read_prompts(files[1:], tokenizer)


# The worker: what it says of a real model is what the model says.


def ask_transformers(folder: Path, prompts: list[list[int]], count: int, **settings: Any) -> list[peer_worker.Answer]:
    given = {"model": folder, "dtype": "float32", "threads": 1, "lookup": False, "assistant_layers": None} | settings
    engine = peer_worker.Transformers(Namespace(**given))
    return engine.answer(prompts, count)


def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    """One token at a time, without a cache, end tokens included."""
    model, ids = load_reference(folder), list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("settings", [{}, {"lookup": True}, {"assistant_layers": 1}])
def test_transformers_answers_greedily_and_times_every_token(
    model_folder: Callable[..., Path], settings: dict[str, Any]
) -> None:
    folder = model_folder()
    prompt = [5, 6, 7, 5, 6, 7, 5, 6]
    (answer,) = ask_transformers(folder, [prompt], 12, **settings)
    assert answer.token_ids == greedy(folder, prompt, 12)
    assert len(answer.times) == 12
    assert answer.times == sorted(answer.times)


def test_transformers_answers_prompts_of_different_lengths_at_once(model_folder: Callable[..., Path]) -> None:
    folder = model_folder()
    prompts = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]
    answers = ask_transformers(folder, prompts, 8)
    assert [answer.token_ids for answer in answers] == [greedy(folder, prompt, 8) for prompt in prompts]


def test_an_engine_that_cannot_be_made_says_why() -> None:
    def make(_: Namespace) -> peer_worker.Engine:
        raise ModuleNotFoundError("No module named 'vllm'")

    replies = io.StringIO()
    with pytest.raises(ModuleNotFoundError):
        peer_worker.serve(make, Namespace(threads=1), io.StringIO(), replies)
    assert json.loads(replies.getvalue()) == {"error": "ModuleNotFoundError: No module named 'vllm'"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_written_as_gguf_read_back_the_same(
    tmp_path: Path, model_folder: Callable[..., Path], dtype: str, tied: bool
) -> None:
    # Tied models keep no output layer; bfloat16 holds bfloat16 weights exactly, norms included.
    folder = model_folder(dtype=torch.bfloat16, tie_word_embeddings=tied)
    write_gguf(folder, tmp_path / "m.gguf", dtype)
    back = tmp_path / "back"
    back.mkdir()
    gguf_llama.convert(tmp_path / "m.gguf", back)
    weights, again = load_file(folder / "model.safetensors"), load_file(back / "model.safetensors")
    assert weights.keys() == again.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, again[name]), name
    config, written = (json.loads((each / "config.json").read_text()) for each in (folder, back))
    for name in ("hidden_size", "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "vocab_size"):
        assert written[name] == config[name]


def test_other_models_are_not_written_as_a_llama(tmp_path: Path, model_folder: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="model_type 'qwen2'; only a Llama"):
        write_gguf(model_folder("qwen2"), tmp_path / "m.gguf")
