"""Training: the unrolled head against a twin that runs one slot at a time, losses, data, whole runs on tiny models."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from captured import write_captured
from safetensors.torch import load_file
from tiny_models import make_tiny_llama
from torch import Tensor

from draft_svc.training import checkpoint, fit
from draft_svc.training.config import FitConfig
from draft_svc.training.data import Batch, Corpus, epoch_batches
from draft_svc.training.drafting import measure_chains
from draft_svc.training.export import export_sizes
from draft_svc.training.fit import Fit, create_head, learning_rate
from draft_svc.training.heads import DraftModel, Eagle3Head, MedusaHeads, MTPHead, RecurrentHead, layer_sizes
from draft_svc.training.losses import Candidates, judge
from draft_svc.training.shards import Manifest
from draft_svc.training.target import Target
from draft_svc.training.teacher import Teacher
from draft_svc.training.trainee import Objective, Trainee
from draft_svc.training.unroll import unroll
from draft_svc.training.vocabulary import choose_vocabulary, to_mask, to_offsets
from pilotfish.errors import FailedPreconditionError, InvalidArgumentError
from pilotfish.runtime.config import ModelConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("target"), layers=7, words=64, sharpness=8.0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return write_captured(tmp_path_factory.mktemp("captured"), model, documents=40)


@pytest.fixture
def config(model: Path, data: Path, tmp_path: Path) -> FitConfig:
    return FitConfig(
        scheme="mtp",
        data=data,
        target_model=model,
        out=tmp_path / "out",
        draft_layers=(0, 6),
        draft_vocab=40,
        batch_tokens=128,
        visits=400,
        warmup_steps=2,
        measure_every=2,
        dtype="float32",
        objective=Objective(steps=3, other_candidates=0),
    )


def heads(sizes: ModelConfig) -> dict[str, RecurrentHead]:
    return {
        "mtp": MTPHead(sizes, layers=2),
        "eagle": MTPHead(sizes, norms="none"),
        "eagle3": Eagle3Head(sizes, layers=2),
        "distill": DraftModel(sizes, (0, 3)),
    }


def attend_slowly(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One query [heads, d] over keys [kv_heads, n, d]."""
    group = q.shape[0] // keys.shape[0]
    out = []
    for head, query in enumerate(q):
        scores = keys[head // group] @ query / query.shape[0] ** 0.5
        out.append(torch.softmax(scores, 0) @ values[head // group])
    return torch.stack(out)


def chain_slowly(
    head: RecurrentHead, embeddings: Tensor, tokens: Tensor, features: Tensor, slot: int, steps: int
) -> list[Tensor]:
    """Outputs of one slot's steps: true pairs one at a time up to the slot, then the head's own outputs behind it."""
    states = head.read(features)
    kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in head.layers]

    def run(token: Tensor, state: Tensor, position: int) -> Tensor:
        x, beside = head.enter(embeddings[token][None, None], state[None, None])
        cos, sin = (a[0, 0] for a in head.positions(torch.tensor([[position]])))
        x = x[0, 0]
        for i, layer in enumerate(head.layers):
            attention = layer.self_attn
            if layer.hidden_norm is not None:
                read = torch.cat((layer.input_layernorm(beside[0, 0]), layer.hidden_norm(x)))
            else:
                read = x if layer.input_layernorm is None else layer.input_layernorm(x)

            def turn(y: Tensor) -> Tensor:
                y = y.view(-1, head.config.head_dim)
                left, right = y.chunk(2, -1)
                return y * cos + torch.cat((-right, left), -1) * sin

            key, value = turn(attention.k_proj(read)), attention.v_proj(read).view(-1, head.config.head_dim)
            kept[i].append((key, value))
            keys, values = (torch.stack(t, dim=1) for t in zip(*kept[i], strict=True))
            x = x + attention.o_proj(attend_slowly(turn(attention.q_proj(read)), keys, values).flatten())
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x

    for i in range(slot):
        run(tokens[i + head.lead], states[i], i)
    outputs, state = [], states[slot]
    for k in range(steps):
        output, state = head.leave(run(tokens[slot + head.lead + k], state, slot + k))
        outputs.append(output)
    return outputs


@pytest.mark.parametrize("scheme", ["mtp", "eagle", "eagle3", "distill"])
@torch.no_grad()
def test_the_unrolled_head_equals_a_chain_from_every_slot(scheme: str, model: Path, data: Path) -> None:
    torch.manual_seed(0)
    manifest = Manifest.read(data)
    target = Target.load(model, manifest, torch.float32)
    head = heads(layer_sizes(target.config))[scheme]
    head.initialise(target.weights)
    teacher = Teacher(target.output(torch.arange(64)).bfloat16(), manifest, data)
    documents = Corpus(data, head.features, teacher).train[:3]
    batch = Batch.of(documents, ahead=head.lead + 3)
    steps = list(unroll(head, target.embeddings, batch, 3))
    for row, document in enumerate(documents):
        tokens = document.captured.token_ids.long()
        for at, slot in enumerate(batch.slots[row].tolist()):
            depth = sum(bool(step.has_teacher[row, at]) for step in steps)
            features = batch.features[row].float()
            slow = chain_slowly(head, target.embeddings, tokens, features, slot, depth)
            for step, expected in zip(steps, slow, strict=False):
                close = 1e-4 * float(expected.abs().max())  # un-normed outputs may be large
                torch.testing.assert_close(step.outputs[row, at], expected, rtol=0.0, atol=close)
                assert int(step.behind[row, at]) == slot + head.lead + step.number
    assert any(step.has_teacher.any() for step in steps)


@pytest.mark.parametrize("scheme", ["mtp", "eagle3", "distill"])
@torch.no_grad()
def test_chains_are_measured_as_drafted_one_by_one(scheme: str, model: Path, data: Path) -> None:
    torch.manual_seed(0)
    manifest = Manifest.read(data)
    target = Target.load(model, manifest, torch.float32)
    head = heads(layer_sizes(target.config))[scheme]
    head.initialise(target.weights)
    vocabulary = torch.arange(4, 64)
    output = target.output(vocabulary)
    documents = Corpus(data, head.features, Teacher(output.bfloat16(), manifest, data)).train[:6]
    reached, rounds, text = [0] * 4, 0, 0
    for document in documents:
        true = document.captured.token_ids.long()
        features = Batch.of([document], ahead=4).features[0].float()
        accepted = []
        for slot in range(document.captured.prompt_length - 1, document.length - 1 - head.lead):
            tokens, right = true[: slot + head.lead + 1], 0
            while right < 3 and len(tokens) < len(true):
                last = chain_slowly(head, target.embeddings, tokens, features, slot, right + 1)[-1]
                tokens = torch.cat((tokens, vocabulary[(output @ last).argmax()][None]))
                if tokens[-1] != true[len(tokens) - 1]:
                    break
                right += 1
            accepted.append(right)
            for depth in range(right + 1):
                reached[depth] += 1
        at = 0
        while at < len(accepted):
            rounds, at = rounds + 1, at + accepted[at] + 1
        text += at
    trainee = Trainee(head, target.embeddings, output, Objective())
    quality = measure_chains(trainee, documents, vocabulary, length=3)
    assert quality is not None
    assert reached[1]
    rates = [later / max(earlier, 1) for earlier, later in pairwise(reached)]
    assert quality.conditional == pytest.approx(rates, abs=1e-4)
    assert quality.tokens_per_round == text / rounds
    assert quality.rounds == rounds


@torch.no_grad()
def test_medusa_heads_read_the_state_of_their_slot_alone(model: Path, data: Path) -> None:
    torch.manual_seed(0)
    manifest = Manifest.read(data)
    target = Target.load(model, manifest, torch.float32)
    head = MedusaHeads(target.config, heads=2, blocks=2)
    teacher = Teacher(target.output(torch.arange(64)).bfloat16(), manifest, data)
    document = Corpus(data, head.features, teacher).train[0]
    batch = Batch.of([document], ahead=3)
    for step in unroll(head, target.embeddings, batch, 2):
        for at, slot in enumerate(batch.slots[0].tolist()):
            x = document.captured.features[slot, document.final].float()
            for block in head.blocks[step.number]:
                x = x + torch.nn.functional.silu(block.weight @ x + block.bias)
            torch.testing.assert_close(step.outputs[0, at], x)
            assert int(step.behind[0, at]) == slot + 1 + step.number


@torch.no_grad()
def test_chosen_slots_go_on_as_they_would_among_all(model: Path, data: Path) -> None:
    manifest = Manifest.read(data)
    target = Target.load(model, manifest, torch.float32)
    head = MTPHead(layer_sizes(target.config))
    teacher = Teacher(target.output(torch.arange(64)).bfloat16(), manifest, data)
    batch = Batch.of(Corpus(data, head.features, teacher).train[:2], ahead=4)
    chosen = torch.tensor([[2, 0], [1, 3]])
    every = list(unroll(head, target.embeddings, batch, 3))
    some = list(unroll(head, target.embeddings, batch, 3, chosen=chosen))
    torch.testing.assert_close(some[0].outputs, every[0].outputs)
    for one, whole in zip(some[1:], every[1:], strict=True):
        index = chosen.unsqueeze(-1).expand(-1, -1, whole.outputs.shape[-1])
        torch.testing.assert_close(one.outputs, whole.outputs.gather(1, index))
        assert torch.equal(one.behind, whole.behind.gather(1, chosen))


@pytest.mark.parametrize("train_output", [False, True])
def test_soft_cross_entropy_equals_autograd(train_output: bool) -> None:
    torch.manual_seed(0)
    outputs = torch.randn(600, 16, requires_grad=True)
    head = torch.randn(50, 16, requires_grad=train_output)
    ids = torch.stack([torch.randperm(50)[:8] for _ in range(600)]).int()
    probs = torch.softmax(torch.randn(600, 8), -1)
    judged = judge(outputs, head, ids, probs)
    judged.losses.sum().mul(0.5).backward()
    got = [outputs.grad, head.grad]
    outputs.grad = head.grad = None
    logits = outputs @ head.T
    q = torch.softmax(logits, -1)
    slow = -(probs * torch.log_softmax(logits, -1).gather(1, ids.long())).sum(-1)
    slow.sum().mul(0.5).backward()
    torch.testing.assert_close(judged.losses, slow)
    torch.testing.assert_close(judged.overlaps, torch.minimum(q.gather(1, ids.long()), probs).sum(-1))
    assert torch.equal(judged.hits, logits.argmax(-1) == ids[:, 0])
    torch.testing.assert_close(got[0], outputs.grad)
    if train_output:
        torch.testing.assert_close(got[1], head.grad)


def test_candidates_keep_the_teacher_and_stand_for_the_rest() -> None:
    torch.manual_seed(0)
    outputs, head = torch.randn(20, 16), 0.25 * torch.randn(400, 16)
    ids = torch.stack([torch.randperm(400)[:8] for _ in range(20)]).int()
    probs = torch.softmax(torch.randn(20, 8), -1)
    exact = judge(outputs, head, ids, probs).losses.mean()
    random = torch.Generator().manual_seed(1)
    estimates = []
    for _ in range(200):
        candidates = Candidates.choose(ids, 400, 64, random)
        assert set(ids.flatten().tolist()) <= set(candidates.ids.tolist())
        estimates.append(judge(outputs, head, ids, probs, candidates).losses.mean())
    torch.testing.assert_close(torch.stack(estimates).mean(), exact, rtol=0.02, atol=0.0)
    every = Candidates.choose(ids, 400, 400, random)
    torch.testing.assert_close(judge(outputs, head, ids, probs, every).losses.mean(), exact)


def test_vocabulary_takes_the_most_frequent_and_ties_by_id() -> None:
    counts = torch.tensor([0, 5, 2, 2, 9, 0, 2, 0])
    assert choose_vocabulary(counts, 4).tolist() == [1, 2, 3, 4]
    assert choose_vocabulary(counts, 4, always=[7]).tolist() == [1, 2, 4, 7]
    assert choose_vocabulary(counts, 7).tolist() == [0, 1, 2, 3, 4, 5, 6]
    vocabulary = choose_vocabulary(counts, 3, always=[7])
    assert (to_offsets(vocabulary) + torch.arange(3)).tolist() == vocabulary.tolist()
    assert to_mask(vocabulary, 8).nonzero().flatten().tolist() == vocabulary.tolist()
    with pytest.raises(InvalidArgumentError, match="draft_vocab is 9; must be above 0 special tokens and at most 8"):
        choose_vocabulary(counts, 9)


def test_whole_text_takes_the_slots_of_prompts_too(model: Path, data: Path) -> None:
    manifest = Manifest.read(data)
    teacher = Teacher(Target.load(model, manifest, torch.bfloat16).output(torch.arange(64)), manifest, data)
    document = Corpus(data, ("final",), teacher).train[0]
    answer, whole = (Batch.of([document], ahead=3, whole_text=choice) for choice in (False, True))
    first = document.captured.prompt_length - 1
    assert answer.slots[0].tolist() == list(range(first, document.length - 1))
    assert whole.slots[0].tolist() == list(range(document.length - 1))


def test_an_epoch_visits_every_document_once(model: Path, data: Path) -> None:
    manifest = Manifest.read(data)
    teacher = Teacher(Target.load(model, manifest, torch.bfloat16).output(torch.arange(64)), manifest, data)
    corpus = Corpus(data, ("final",), teacher)
    assert len(corpus.held_out) == 2
    batches = epoch_batches(corpus.train, 100, seed=1, epoch=0)
    assert sorted(i for batch in batches for i in batch) == list(range(len(corpus.train)))
    assert all(max(corpus.train[i].length for i in b) * len(b) <= 100 for b in batches)
    assert batches == epoch_batches(corpus.train, 100, seed=1, epoch=0)
    assert batches != epoch_batches(corpus.train, 100, seed=1, epoch=1)


def test_shards_that_are_written_anew_are_taught_anew(model: Path, tmp_path: Path) -> None:
    output = Target.load(model, Manifest.read(write_captured(tmp_path, model)), torch.bfloat16).output(torch.arange(64))
    manifest = Manifest.read(tmp_path)
    Corpus(tmp_path, ("final",), Teacher(output, manifest, tmp_path))
    write_captured(tmp_path, model, seed=1)
    again = Corpus(tmp_path, ("final",), Teacher(output, manifest, tmp_path)).train[0]
    logits = again.captured.features[:, again.final] @ output.T
    assert torch.equal(again.teacher.ids[:, 0].long(), logits.argmax(-1))


@pytest.mark.parametrize("scheme", ["mtp", "eagle", "eagle3", "medusa", "distill"])
def test_a_head_learns_what_it_is_shown(scheme: str, config: FitConfig) -> None:
    config = replace(
        config, scheme=scheme, visits=4000, lr=1e-2, measure_every=1000, layers=2 if scheme == "mtp" else 1
    )
    Fit(config).run()
    lines = [json.loads(line) for line in (config.out / "log.jsonl").read_text().splitlines()]
    assert lines[-1]["logits"][0] < 0.75 * lines[0]["logits"][0]
    assert lines[-1]["hits"][0] > lines[0]["hits"][0]
    assert lines[-1]["quality"]["rounds"] > 0
    assert (config.out / "head" / "model.safetensors").is_file()


@pytest.mark.parametrize("scheme", ["mtp", "eagle3"])
def test_a_resumed_run_equals_one_that_was_not_stopped(scheme: str, config: FitConfig) -> None:
    objective = Objective(steps=2, later_slots=0.5, other_candidates=8)
    whole = replace(config, scheme=scheme, objective=objective, cooldown=0.0, train_output=scheme == "eagle3")
    Fit(whole).run()
    stopped = replace(whole, out=config.out.with_name("stopped"))

    class Stopped(Exception):
        pass

    def stop(progress: object) -> None:
        if json.loads((stopped.out / "log.jsonl").read_text().splitlines()[-1])["step"] == 5:
            raise Stopped  # behind the checkpoint of step 4

    with pytest.raises(Stopped):
        Fit(stopped).run(stop)
    Fit(stopped).run()
    one, other = (torch.load(run.out / checkpoint.FILE) for run in (whole, stopped))
    assert one["position"] | {"seconds": 0} == other["position"] | {"seconds": 0}
    assert one["position"]["step"] > 5
    for name, tensor in one["trainee"].items():
        assert torch.equal(tensor, other["trainee"][name]), name


def test_a_run_is_saved_between_measurements(config: FitConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "_SAVE_SECONDS", 0.0)
    config = replace(config, measure_every=1000)
    saved: list[int] = []

    def watch(progress: fit.Progress) -> None:
        saved.append(torch.load(config.out / checkpoint.FILE)["position"]["step"])
        assert (progress.quality is None) == (progress.position.visits < config.visits)

    Fit(config).run(watch)
    assert saved == list(range(1, len(saved) + 1))
    assert len(saved) > 2


def test_a_run_goes_on_only_as_it_was_begun(config: FitConfig) -> None:
    Fit(config).run()
    Fit(replace(config, visits=500)).run()
    with pytest.raises(FailedPreconditionError, match=r"lr 0.002 there and 0.001 here"):
        Fit(replace(config, visits=500, lr=0.001)).run()


@pytest.mark.parametrize("scheme", ["mtp", "eagle", "eagle3", "medusa", "distill"])
def test_a_run_begins_from_a_head_that_was_trained_before(scheme: str, config: FitConfig, tmp_path: Path) -> None:
    first = replace(config, scheme=scheme, visits=1000, lr=1e-2, measure_every=1000)
    head = Fit(first).run()
    Fit(replace(first, out=tmp_path / "second", init=head, visits=1)).run()
    before, after = ((run / "log.jsonl").read_text().splitlines() for run in (config.out, tmp_path / "second"))
    assert json.loads(after[0])["logits"][0] < 0.9 * json.loads(before[0])["logits"][0]
    exported = [load_file(each / "model.safetensors") for each in (head, tmp_path / "second" / "head")]
    for name, tensor in exported[0].items():  # a first step of the warm-up is small
        torch.testing.assert_close(exported[1][name].float(), tensor.float(), rtol=0.0, atol=0.02, msg=name)


def test_an_output_layer_is_trained_further_token_by_token(config: FitConfig, tmp_path: Path) -> None:
    first = replace(config, scheme="eagle3", train_output=True, lr=1e-2)
    head = Fit(first).run()
    second = replace(first, out=tmp_path / "second", init=head, draft_vocab=50)
    trainee, vocabulary = Fit(second)._trainee, Fit(second)._vocabulary
    stored = load_file(head / "model.safetensors")
    drafted = (torch.arange(40) + stored["d2t"]).tolist()
    assert len(set(vocabulary.tolist()).intersection(drafted)) == 40
    for row, token in zip(trainee.output, vocabulary.tolist(), strict=True):
        if token in drafted:
            assert torch.equal(row, stored["lm_head.weight"][drafted.index(token)].float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scheme": "eagle3"}, r"architectures is \['PilotfishMTP'\] in .*; this run begins from \['LlamaForC"),
        ({"layers": 2}, r"lacks model.layers.0.layers.1.input_layernorm.weight"),
    ],
)
def test_a_run_begins_from_no_other_kind_of_head(
    change: dict[str, object], message: str, config: FitConfig, tmp_path: Path
) -> None:
    head = Fit(config).run()
    with pytest.raises(InvalidArgumentError, match=message):
        Fit(replace(config, out=tmp_path / "second", init=head, **change))  # type: ignore[arg-type]


def test_a_run_goes_on_only_from_the_head_it_began_from(config: FitConfig, tmp_path: Path) -> None:
    head = Fit(config).run()
    second = replace(config, out=tmp_path / "second", init=head)
    Fit(second).run()
    Fit(replace(second, visits=500)).run()
    with pytest.raises(FailedPreconditionError, match=r"init '.*head' there and None here"):
        Fit(replace(second, init=None, visits=600)).run()


def test_text_of_another_model_is_refused(config: FitConfig, tmp_path: Path) -> None:
    other = make_tiny_llama(tmp_path / "other", layers=7, words=64, seed=1)
    with pytest.raises(FailedPreconditionError, match="the captured text is of tiny, whose weights are not those of"):
        Fit(replace(config, target_model=other))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scheme": "rest"}, "scheme is 'rest'; must be one of mtp"),
        ({"lr": 0.0}, "lr is 0.0; must be above 0"),
        ({"visits": 0}, "visits is 0; must be at least 1"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0; must be at least 0"),
        ({"cooldown": 2.0}, r"cooldown is 2.0; must be in \[0, 1\]"),
        ({"train_output": True}, "train_output is true; only eagle3"),
        ({"scheme": "eagle3", "norms": "none"}, "norms is 'none'; only mtp"),
    ],
)
def test_bad_settings_are_refused(change: dict[str, object], message: str, config: FitConfig) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        replace(config, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps is 0; must be at least 1"),
        ({"decay": -0.5}, "decay is -0.5; must be at least 0"),
        ({"hidden_weight": float("nan")}, "hidden_weight is nan; must be at least 0"),
        ({"teacher_temperature": 0.0}, "teacher_temperature is 0.0; must be above 0"),
        ({"later_slots": 0.0}, "later_slots is 0.0; must be above 0 and at most 1"),
    ],
)
def test_bad_objectives_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        replace(Objective(), **change)


def test_bad_layers_of_a_draft_model_are_refused(config: FitConfig, model: Path) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"draft_layers is \[0, 7\]; must be ascending numbers of .* 7 layers"
    ):
        create_head(replace(config, scheme="distill", draft_layers=(0, 7)), ModelConfig.from_folder(model))


def test_a_target_too_shallow_for_eagle3_is_refused(config: FitConfig, model: Path) -> None:
    shallow = replace(ModelConfig.from_folder(model), layers=6)
    with pytest.raises(InvalidArgumentError, match="a target of 6 layers has no three states apart"):
        create_head(replace(config, scheme="eagle3"), shallow)


def test_the_learning_rate_rises_stays_and_falls(config: FitConfig) -> None:
    config = replace(config, lr=1.0, warmup_steps=4, visits=100, cooldown=0.5)
    rates = [
        learning_rate(config, checkpoint.Position(step=s, visits=v)) for s, v in ((0, 0), (9, 50), (9, 75), (9, 100))
    ]
    assert rates == [0.25, 1.0, 0.5, 0.0]


def test_exports_have_the_names_of_the_public_formats(config: FitConfig) -> None:
    Fit(replace(config, visits=50)).run()
    tensors = load_file(config.out / "head" / "model.safetensors")
    settings = json.loads((config.out / "head" / "config.json").read_text())
    assert settings["architectures"] == ["PilotfishMTP"]
    sizes = ModelConfig.from_dict(settings | {"architectures": ["LlamaForCausalLM"]})
    own = replace(sizes, layers=7, checkpoint_layers=7, prediction_layers=0)
    assert own == ModelConfig.from_folder(config.target_model)
    assert settings["draft_vocab_size"] == len(tensors["d2t"]) == 40
    assert {"model.layers.0.eh_proj.weight", "model.layers.0.self_attn.q_proj.weight"} <= tensors.keys()
    assert tensors["model.layers.0.eh_proj.weight"].dtype == torch.bfloat16

    eagle3 = replace(config, scheme="eagle3", visits=50, out=config.out.with_name("eagle3"))
    Fit(eagle3).run()
    tensors = load_file(eagle3.out / "head" / "model.safetensors")
    assert {"fc.weight", "midlayer.hidden_norm.weight", "norm.weight", "lm_head.weight", "t2d"} <= tensors.keys()
    assert int(tensors["t2d"].sum()) == 40

    medusa = replace(config, scheme="medusa", visits=50, out=config.out.with_name("medusa"))
    Fit(medusa).run()
    tensors = load_file(medusa.out / "head" / "model.safetensors")
    assert {"blocks.2.layers.0.weight", "blocks.2.layers.0.bias", "token_map"} <= tensors.keys()


def test_exports_keep_how_positions_are_stretched() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 256, "rope_theta": 5e5}
    values = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    values |= {"num_hidden_layers": 6, "intermediate_size": 96, "max_position_embeddings": 512}
    target = ModelConfig.from_dict(values | {"rope_parameters": scaling})
    again = ModelConfig.from_dict(export_sizes(target, layers=1) | {"architectures": ["LlamaForCausalLM"]})
    assert again.rope == target.rope
