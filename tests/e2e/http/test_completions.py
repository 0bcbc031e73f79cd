"""/v1/completions, by OpenAI's own client."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
from deployment import Deployment
from http_api import GREEDY, MODEL, PROMPT, extra_field
from openai.types import Completion

from pilotfish import SamplingParams


def test_a_completion_is_what_the_sdk_gets(deployment: Deployment, client: openai.OpenAI) -> None:
    found = client.completions.create(prompt=PROMPT, max_tokens=24, **GREEDY)
    with deployment.client() as sdk:
        expected = sdk.generate(PROMPT, SamplingParams(max_tokens=24))
    assert found.choices[0].text == expected.text
    assert found.choices[0].finish_reason == expected.finish_reason
    Completion.model_validate(found.model_dump())
    usage = found.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.usage.prompt_tokens, len(expected.token_ids))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    details = usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens == expected.usage.accepted > 0
    assert details.rejected_prediction_tokens == expected.usage.drafted - expected.usage.accepted
    speculation = extra_field(usage, "speculation")
    assert speculation["rounds"] == expected.usage.rounds
    assert speculation["accepted_per_position"] == list(expected.usage.accepted_per_position)


def test_every_form_of_a_prompt_gives_the_same_text(client: openai.OpenAI, http: httpx2.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    forms: list[Any] = [PROMPT, ids, [PROMPT], [ids], [PROMPT, PROMPT], [ids, ids, ids]]
    texts = [
        [choice.text for choice in client.completions.create(prompt=form, max_tokens=8, **GREEDY).choices]
        for form in forms
    ]
    assert [len(each) for each in texts] == [1, 1, 1, 1, 2, 3]
    assert len({text for each in texts for text in each}) == 1


def test_prompts_and_samples_are_choices_in_order(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "seed": 5, "extra_body": {"ignore_eos": True}}
    both = client.completions.create(prompt=["the cat", "a hat"], n=3, **settings)
    assert [choice.index for choice in both.choices] == list(range(6))
    one = client.completions.create(prompt="a hat", n=3, **settings)
    assert [choice.text for choice in both.choices[3:]] == [choice.text for choice in one.choices]
    assert len({choice.text for choice in one.choices}) == 3
    assert both.usage is not None
    assert one.usage is not None
    assert both.usage.completion_tokens == 36
    assert both.usage.prompt_tokens < 2 * one.usage.prompt_tokens + 6  # each prompt once


def test_echo_begins_with_the_prompt(client: openai.OpenAI) -> None:
    plain = client.completions.create(prompt=PROMPT, max_tokens=6, **GREEDY).choices[0].text
    assert client.completions.create(prompt=PROMPT, max_tokens=6, echo=True, **GREEDY).choices[0].text == PROMPT + plain
    stream = client.completions.create(prompt=PROMPT, max_tokens=6, echo=True, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream) == PROMPT + plain


def test_an_echo_without_tokens_scores_the_prompt(client: openai.OpenAI, http: httpx2.Client) -> None:
    """As evaluation harnesses ask: several prompts at once, nothing generated."""
    prompts = [PROMPT, "<|im_start|>a hat<|im_end|>"]
    for n in (1, 2):
        found = client.completions.create(prompt=prompts, max_tokens=0, logprobs=2, echo=True, n=n, **GREEDY)
        written = client.completions.create(prompt=prompts, max_tokens=1, logprobs=2, echo=True, n=n, **GREEDY)
        assert [choice.text for choice in found.choices] == [prompt for prompt in prompts for _ in range(n)]
        assert {choice.finish_reason for choice in found.choices} == {"length"}
        for scored, whole in zip(found.choices, written.choices, strict=True):
            assert scored.logprobs is not None
            assert whole.logprobs is not None
            assert scored.logprobs.tokens is not None
            assert whole.logprobs.tokens is not None
            assert "".join(scored.logprobs.tokens) == scored.text
            assert scored.logprobs.tokens == whole.logprobs.tokens[:-1]
            assert scored.logprobs.token_logprobs == (whole.logprobs.token_logprobs or [])[:-1]
        assert found.usage is not None
        assert found.usage.completion_tokens == 0
        counts = [http.post("/tokenize", json={"prompt": prompt}).json()["count"] for prompt in prompts]
        assert found.usage.prompt_tokens == found.usage.total_tokens == sum(counts)
    stream = list(client.completions.create(prompt=PROMPT, max_tokens=0, logprobs=1, echo=True, stream=True, **GREEDY))
    assert [chunk.choices[0].text for chunk in stream] == [PROMPT, ""]
    assert stream[-1].choices[0].finish_reason == "length"


def test_sixteen_tokens_are_the_default(client: openai.OpenAI) -> None:
    found = client.completions.create(prompt=PROMPT, model=MODEL, extra_body={"ignore_eos": True})
    assert found.usage is not None
    assert found.usage.completion_tokens == 16
    assert found.choices[0].finish_reason == "length"


def test_every_field_that_shapes_the_text_does_what_it_does_over_grpc(
    deployment: Deployment, client: openai.OpenAI
) -> None:
    plain = client.completions.create(prompt=PROMPT, max_tokens=24, seed=1, model=MODEL).choices[0].text
    openais: list[dict[str, Any]] = [{"presence_penalty": 1.5}, {"frequency_penalty": 2.0}, {"logit_bias": {"70": 9.5}}]
    ours: list[dict[str, Any]] = [{"repetition_penalty": 3.0}, {"min_tokens": 24}, {"banned_token_ids": [70, 71]}]
    ours += [{"allowed_token_ids": [70, 71, 72]}, {"top_k": 2}, {"min_p": 0.5}]
    texts = []
    for fields, extra in [*((each, {}) for each in openais), *(({}, each) for each in ours)]:
        found = client.completions.create(prompt=PROMPT, max_tokens=24, seed=1, model=MODEL, extra_body=extra, **fields)
        params = {name: value for name, value in (fields | extra).items() if name != "logit_bias"}
        if "logit_bias" in fields:
            params["logit_bias"] = {70: 9.5}
        with deployment.client() as sdk:
            expected = sdk.generate(PROMPT, SamplingParams(max_tokens=24, temperature=1.0, seed=1, **params))
        assert found.choices[0].text == expected.text, params
        texts.append(found.choices[0].text)
    assert sum(text != plain for text in texts) > 5


def test_a_seed_below_0_is_its_twos_complement_here_and_in_the_sdk(
    deployment: Deployment, client: openai.OpenAI
) -> None:
    def text(seed: int) -> str:
        return client.completions.create(prompt=PROMPT, max_tokens=24, seed=seed, model=MODEL).choices[0].text

    with deployment.client() as sdk:
        params = SamplingParams(max_tokens=24, temperature=1.0, seed=-3)
        assert sdk.generate(PROMPT, params).text == text(-3) == text(2**64 - 3) != text(3)


def test_a_streamed_completion_adds_up(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPT, max_tokens=20, n=2, model=MODEL, seed=3)
    texts = {0: "", 1: ""}
    reasons: dict[int, str] = {}
    for chunk in client.completions.create(prompt=PROMPT, max_tokens=20, n=2, model=MODEL, seed=3, stream=True):
        Completion.model_validate(chunk.model_dump() | {"usage": None}) if chunk.choices[0].finish_reason else None
        assert chunk.usage is None
        [choice] = chunk.choices
        assert choice.index not in reasons
        texts[choice.index] += choice.text
        if choice.finish_reason is not None:
            reasons[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}


def test_a_stop_text_ends_the_text_before_it(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPT, max_tokens=40, **GREEDY).choices[0].text
    stop = whole[5:8]
    expected = whole[: whole.index(stop)]
    for stops in (stop, ["never there", stop]):
        found = client.completions.create(prompt=PROMPT, max_tokens=40, stop=stops, **GREEDY).choices[0]
        assert (found.text, found.finish_reason) == (expected, "stop")
    stream = client.completions.create(prompt=PROMPT, max_tokens=40, stop=stop, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected


def test_extensions_go_by_vllms_names(client: openai.OpenAI) -> None:
    extra = {"top_k": 3, "min_p": 0.01, "ignore_eos": True, "draft_length": 2, "acceptance": "block", "priority": -1}
    found = client.completions.create(prompt=PROMPT, max_tokens=12, model=MODEL, extra_body=extra)
    assert found.usage is not None
    speculation = extra_field(found.usage, "speculation")
    assert speculation["drafted"] > 0
    assert len(speculation["drafted_per_position"]) <= 2
    without = client.completions.create(prompt=PROMPT, model=MODEL, extra_body={"draft_length": 0})
    assert without.usage is not None
    assert extra_field(without.usage, "speculation")["drafted"] == 0
    for other in ({"draft_length": "auto"}, {"draft_model": "tiny-draft"}, {"draft_model": "model"}):
        assert client.completions.create(prompt=PROMPT, model=MODEL, extra_body=other).choices
