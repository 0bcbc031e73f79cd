"""Capture: the target's own text and states, the same whether or not it was interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import EOS_ID, load_reference

from draft_svc.training.capture import CaptureConfig, Progress, capture
from draft_svc.training.conversation import Conversations, Message
from draft_svc.training.documents import Plan, read_conversations
from draft_svc.training.shards import CapturedDocument, Manifest, Shard, shard_path, shard_paths
from orchestrator.tokenizer import Tokenizer
from pilotfish.errors import InternalError, InvalidArgumentError, NotFoundError
from pilotfish.runtime.kv_cache import KVCache

ModelFolder = Callable[..., Path]

FEATURES = ("hidden.1", "final")


def asked(*texts: str) -> tuple[tuple[Message, ...], ...]:
    return tuple(({"role": "user", "content": text},) for text in texts)


PROMPTS = asked(*(f"Tell me about number {i}." * (1 + i % 4) for i in range(9)))


def config(prompts: Sequence[tuple[Message, ...]] = PROMPTS, **settings: object) -> CaptureConfig:
    plan = {"temperatures": (0.0, 1.0), "ask_itself": 0.0, "seed": 3}
    own = {name: settings.pop(name) for name in list(settings) if name in plan}
    defaults = {
        "features": FEATURES,
        "max_tokens": 20,
        "rows": 3,
        "documents_per_shard": 4,
        "max_len": 256,
        "question_tokens": 20,
    }
    return CaptureConfig(Plan(tuple(prompts), **(plan | own)), **(defaults | settings))  # type: ignore[arg-type]


def documents(folder: Path) -> list[CapturedDocument]:
    width = Manifest.read(folder).feature_width
    return [document for path in shard_paths(folder) for document in Shard.read(path, width).split()]


@pytest.fixture
def model(model_folder: ModelFolder) -> Path:
    return model_folder("llama")


def test_greedy_answers_and_states_are_those_of_hugging_face(model: Path, tmp_path: Path) -> None:
    reference = load_reference(model)
    capture(model, tmp_path, config(temperatures=(0.0,)), answer_tokens=10**6)
    found = documents(tmp_path)
    assert len(found) == len(PROMPTS)
    for document in found:
        ids = document.token_ids.long()
        states = reference(ids[None], output_hidden_states=True)
        answer = states.logits[0, document.prompt_length - 1 : -1].argmax(-1)
        assert answer.tolist() == ids[document.prompt_length :].tolist()
        wanted = torch.cat([states.hidden_states[1][0], states.hidden_states[-1][0]], -1)
        torch.testing.assert_close(document.features.float(), wanted, rtol=2**-7, atol=1e-3)  # bfloat16's rounding


def test_prompts_are_encoded_as_the_orchestrator_encodes_them(model: Path, tmp_path: Path) -> None:
    capture(model, tmp_path, config(), answer_tokens=10**6)
    served = Tokenizer(model)
    wanted = {tuple(served.encode_chat(messages)) for messages in PROMPTS}
    assert {tuple(each.token_ids[: each.prompt_length].tolist()) for each in documents(tmp_path)} == wanted


def test_an_interrupted_capture_goes_on_with_the_same_text(model: Path, tmp_path: Path) -> None:
    settings = config(ask_itself=0.3)
    capture(model, tmp_path / "whole", settings, answer_tokens=150)

    class Killed(Exception):
        pass

    def kill(progress: Progress) -> None:
        if progress.shards and progress.documents % 4 == 2:
            raise Killed

    with pytest.raises(Killed):
        capture(model, tmp_path / "parts", settings, answer_tokens=10**6, on_progress=kill)
    assert Manifest.read(tmp_path / "parts").shards >= 1
    shard_path(tmp_path / "parts", 7).write_bytes(b"left by a kill")
    capture(model, tmp_path / "parts", settings, answer_tokens=300)
    whole, parts = documents(tmp_path / "whole"), documents(tmp_path / "parts")
    count = 4 * Manifest.read(tmp_path / "whole").whole_shards
    assert count >= 4
    for one, other in zip(whole[:count], parts[:count], strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.temperature == other.temperature
        torch.testing.assert_close(one.features, other.features, rtol=2**-6, atol=1e-3)


def test_enough_is_enough_and_more_can_be_had(model: Path, tmp_path: Path) -> None:
    first = capture(model, tmp_path, config(), answer_tokens=50)
    assert first.answer_tokens >= 50
    assert first.documents < len(PROMPTS)
    assert capture(model, tmp_path, config(), answer_tokens=50) == first
    last = capture(model, tmp_path, config(), answer_tokens=10**6)
    assert (last.documents, last.shards) == (len(PROMPTS), last.whole_shards)
    assert last.tokens == sum(len(document.token_ids) for document in documents(tmp_path))
    assert last.answer_tokens == sum(document.answer_tokens for document in documents(tmp_path))
    assert capture(model, tmp_path, config(), answer_tokens=10**6) == last


def test_answers_end_at_the_end_token_or_the_limit(model: Path, tmp_path: Path) -> None:
    capture(model, tmp_path, config(max_tokens=40, temperatures=(1.0,), ask_itself=1.0), answer_tokens=600)
    for document in documents(tmp_path):
        answer = document.token_ids[document.prompt_length :].tolist()
        assert EOS_ID not in answer[:-1]
        assert answer[-1] == EOS_ID or len(answer) == 40 or len(document.token_ids) == 256


def test_the_target_can_ask_itself(model: Path, tmp_path: Path) -> None:
    capture(model, tmp_path, config((), ask_itself=1.0), answer_tokens=80)
    served = Tokenizer(model)
    prompts = [document.token_ids[: document.prompt_length].tolist() for document in documents(tmp_path)]
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts) > 2
    opening, end = Conversations(model).question_opening()
    assert end == EOS_ID
    for prompt in prompts:
        assert prompt[: len(opening)] == opening
        question = served.decode(prompt).removeprefix("user\n").removesuffix("\nassistant\n")
        assert prompt == served.encode_chat([{"role": "user", "content": question}])


def test_given_answers_are_only_read(model: Path, tmp_path: Path) -> None:
    (question,) = asked("What is two and two?")
    given = (*question, {"role": "assistant", "content": "It is four."})
    capture(model, tmp_path, config([given]), answer_tokens=10**6)
    (document,) = documents(tmp_path)
    served = Tokenizer(model)
    assert served.decode(document.token_ids[document.prompt_length :].tolist()) == "It is four."
    assert document.token_ids[: document.prompt_length].tolist() == served.encode_chat(question)
    assert document.token_ids[-1] == EOS_ID
    assert bool((document.features != 0).any(-1).all())


def test_prompts_without_room_are_left_out(model: Path, tmp_path: Path) -> None:
    prompts = asked("short", "long " * 80, "also short")
    manifest = capture(model, tmp_path, config(prompts, max_len=128), answer_tokens=10**6)
    assert (manifest.documents, manifest.recipe["prompts"]) == (2, 2)


def test_another_recipe_or_target_does_not_go_on(model: Path, model_folder: ModelFolder, tmp_path: Path) -> None:
    capture(model, tmp_path, config(), answer_tokens=30)
    with pytest.raises(InvalidArgumentError, match=r"recipe .*another folder for --out"):
        capture(model, tmp_path, config(seed=4), answer_tokens=30)
    with pytest.raises(InvalidArgumentError, match="features is"):
        capture(model, tmp_path, replace(config(), features=("final",)), answer_tokens=30)
    with pytest.raises(InvalidArgumentError, match="weights_hash is"):
        capture(model_folder("llama", seed=5), tmp_path, config(), answer_tokens=30)


def test_states_that_are_not_finite_stop_it(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features = KVCache.read_features
    monkeypatch.setattr(KVCache, "read_features", lambda self, slots: features(self, slots) * float("nan"))
    with pytest.raises(InternalError, match="not finite"):
        capture(model, tmp_path, config(), answer_tokens=30)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"features": ("hidden.9",)}, "features names 'hidden.9'"),
        ({"features": ()}, "features is empty"),
        ({"rows": 0}, "rows is 0"),
        ({"temperatures": (-1.0,)}, "temperatures is"),
        ({"ask_itself": 1.5}, "ask_itself is 1.5"),
        ({"prompts": ()}, "nothing to answer"),
    ],
)
def test_bad_settings_are_refused(model: Path, tmp_path: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        capture(model, tmp_path, config(**settings), answer_tokens=30)  # type: ignore[arg-type]


def test_conversations_come_in_both_forms(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [{"category": "x", "turns": ["one", "two"]}, {"messages": [{"role": "user", "content": "three"}]}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read_conversations(path) == list(asked("one", "three"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: no JSON"),
        ("[]", "must be an object"),
        ('{"messages": []}', "must be a list of roles"),
        ('{"messages": [{"role": "user"}]}', "must be a list of roles"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "must have a user's"),
        ('{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]}', "end with"),
        ("", "has no conversations"),
    ],
)
def test_what_is_no_conversation_is_refused_by_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    with pytest.raises(InvalidArgumentError, match=message):
        read_conversations(path)


def test_a_missing_prompt_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"prompts\.jsonl cannot be read"):
        read_conversations(tmp_path / "prompts.jsonl")
