"""Models, tokens and metrics."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import pytest
from deployment import Deployment
from http_api import CHAT, GREEDY, MODEL, PROMPT, error, extra_field, metric


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.owned_by) == (MODEL, "pilotfish")
    assert extra_field(model, "max_model_len") == 512
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_tokens_there_and_back(http: httpx2.Client) -> None:
    found = http.post("/tokenize", json={"prompt": "the cat é<|im_end|>", "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["token_strs"][-3:] == ["bytes:\\xc3", "bytes:\\xa9", "<|im_end|>"]
    assert found["max_model_len"] == 512
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "the cat é<|im_end|>"}
    chat = http.post("/tokenize", json={"messages": CHAT}).json()
    text = http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert text.endswith("<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n")
    open_end = http.post("/tokenize", json={"messages": CHAT, "add_generation_prompt": False}).json()
    assert open_end["tokens"] == chat["tokens"][: open_end["count"]]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("/detokenize", {"tokens": [1, 280]}, "tokens[1]"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ],
)
def test_tokens_that_are_none_are_named(http: httpx2.Client, path: str, body: dict[str, Any], param: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert error(answer)["param"] == param


def test_metrics_count_what_was_served(deployment: Deployment, client: openai.OpenAI, http: httpx2.Client) -> None:
    names = {
        "prompt": "vllm:prompt_tokens_total",
        "completion": "vllm:generation_tokens_total",
        "drafts": "vllm:spec_decode_num_drafts_total",
        "drafted": "vllm:spec_decode_num_draft_tokens_total",
        "accepted": "vllm:spec_decode_num_accepted_tokens_total",
        "per position": "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "ended": "vllm:request_success_total",
        "hits": "vllm:prefix_cache_hits_total",
        "first": "vllm:time_to_first_token_seconds_count",
        "between": "vllm:inter_token_latency_seconds_count",
        "all": "vllm:e2e_request_latency_seconds_count",
    }
    before = {key: metric(http, name) for key, name in names.items()}
    usage = client.completions.create(prompt="a new prompt of some length", max_tokens=24, **GREEDY).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    with deployment.client() as sdk:  # whichever protocol
        other = sdk.generate("a new prompt of some length").usage
    grown = {key: metric(http, name) - before[key] for key, name in names.items()}
    speculation = extra_field(usage, "speculation")
    assert grown["prompt"] == usage.prompt_tokens + other.prompt_tokens
    assert grown["completion"] == usage.completion_tokens + other.completion_tokens
    assert grown["drafted"] == speculation["drafted"] + other.drafted
    assert grown["accepted"] == grown["per position"] == speculation["accepted"] + other.accepted
    assert 0 < grown["drafts"] <= speculation["rounds"] + other.rounds
    assert grown["ended"] == grown["first"] == grown["all"] == 2
    assert grown["hits"] == other.cached_tokens + (usage.prompt_tokens_details.cached_tokens or 0)
    assert grown["between"] > 0
    assert metric(http, "vllm:num_requests_running") == metric(http, "vllm:kv_cache_usage_perc") == 0
    assert metric(http, "pilotfish:draft_replicas") == 1


def test_metrics_do_not_count_what_was_refused(http: httpx2.Client) -> None:
    names = ("vllm:request_params_n_count", "vllm:request_success_total")
    before = [metric(http, name) for name in names]
    body: dict[str, Any] = {"model": MODEL, "prompt": PROMPT}
    for refused in ({"temperature": -1}, {"structured_outputs": {"regex": "("}}):  # the latter by the target
        assert http.post("/v1/completions", json=body | refused).status_code == 400
    assert [metric(http, name) for name in names] == before
