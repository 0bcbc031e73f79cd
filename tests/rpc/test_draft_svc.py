"""A draft replica over loopback: real service, real stream, tiny random model.

The slow twin runs the whole history through Hugging Face for every single token.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rows import Row, ints, sampling_rows, token_rows
from safetensors.torch import load_file, save_file
from scipy.stats import chisquare
from tiny_models import load_reference, make_tiny_llama, make_tiny_model
from torch import Tensor

from draft_svc.server import main
from pilotfish import noise
from pilotfish.errors import InvalidArgumentError, OverloadedError, UnavailableError
from pilotfish.noise import Purpose
from pilotfish.steps import Capabilities, DraftResult, DraftStep, DrawRule, ProposalKind, SamplingRows, TargetStep

PROMPT = np.random.default_rng(8).integers(4, 280, 60).tolist()
GREEDY, SAMPLED, MATCHED = ProposalKind.GREEDY, ProposalKind.SAMPLED, ProposalKind.MATCHED


def step(
    *rows: Row,
    lengths: Sequence[int],
    kinds: Sequence[int],
    sampling: SamplingRows | None = None,
    support_limit: int = 64,
    step_id: int = 1,
) -> DraftStep:
    return DraftStep(
        step_id=step_id,
        rows=token_rows(*rows),
        sampling=sampling or sampling_rows(len(rows), temperature=0.8, seed=40, round_index=3),
        draft_lengths=ints(*lengths),
        proposal_kinds=np.array(kinds, np.uint8),
        support_limit=support_limit,
    )


@dataclasses.dataclass
class Twin:
    """Proposes by a full forward per token."""

    model: Any
    temperature: float = 0.8
    limit: int = 280

    @torch.inference_mode()
    def q(self, history: list[int]) -> Tensor:
        logits: Tensor = self.model(torch.tensor([history])).logits[0, -1, : self.limit]
        return (logits / self.temperature).softmax(-1)

    def propose(
        self, history: list[int], count: int, kind: ProposalKind, seed: int, round_index: int, support_limit: int
    ) -> tuple[list[int], list[dict[int, float]]]:
        """Tokens, and the q behind each of them where the kind tells it."""
        history, tokens, supports = list(history), [], []
        for _ in range(count):
            q = self.q(history).double()
            ids, support = list(range(len(q))), {}
            if kind is SAMPLED:
                ids = sorted(range(len(q)), key=lambda v: -float(q[v]))[:support_limit]
                support = {v: float(q[v] / q[ids].sum()) for v in ids}
            purpose, number = (Purpose.DRAFT, round_index) if kind is SAMPLED else (Purpose.MATCH, 0)
            key = np.array([noise.key(seed, purpose, number, len(history))])
            token = int(q.argmax()) if kind is GREEDY else ids[noise.race(key, np.array(ids), q[ids].numpy())]
            history.append(token)
            tokens.append(token)
            supports.append(support)
        return tokens, supports


def split(result: DraftResult) -> tuple[list[list[int]], list[list[dict[int, float]]]]:
    """Tokens per row, and supports per row: one for the last token and one per node."""
    tokens, supports = iter(result.token_ids.tolist()), []
    groups = iter(result.supports.counts.tolist())
    pairs = iter(zip(result.supports.token_ids.tolist(), result.support_probs.tolist(), strict=True))
    rows = [[next(tokens) for _ in range(count)] for count in result.node_counts]
    if len(result.supports.counts):
        for count in result.node_counts:
            supports.append([dict(next(pairs) for _ in range(next(groups))) for _ in range(count + 1)])
        assert next(groups, None) is None
    assert next(tokens, None) is None
    assert next(pairs, None) is None
    return rows, supports


def run_steps(start_draft: Any, *steps: DraftStep, **settings: Any) -> list[DraftResult]:
    async def scenario() -> list[DraftResult]:
        async with start_draft(**settings) as worker:
            stream = worker.stream()
            await stream.open()
            results = [await stream.run(asked) for asked in steps]
            await stream.close()
            return results

    return asyncio.run(scenario())


@pytest.mark.parametrize("kind", list(ProposalKind))
def test_proposals_equal_the_slow_twin(kind: ProposalKind, start_draft: Any, tiny_draft_folder: Path) -> None:
    rows = [Row(PROMPT[:23], 0, [5, 1]), Row(PROMPT[30:31], 0, [9]), Row(PROMPT[40:44], 0, [2, 7])]
    asked = step(*rows, lengths=[5, 1, 3], kinds=[kind] * 3, support_limit=7)
    (result,) = run_steps(start_draft, asked)
    tokens, supports = split(result)
    twin = Twin(load_reference(tiny_draft_folder))
    for i, row in enumerate(rows):
        count = int(asked.draft_lengths[i])
        wanted, laws = twin.propose(list(row.tokens), count, kind, 40 + i, 3, 7)
        assert tokens[i] == wanted
        if kind is SAMPLED:
            assert supports[i][-1] == {}
            for mine, law, token in zip(supports[i][:-1], laws, wanted, strict=True):
                assert mine == pytest.approx(law, abs=1e-5)
                assert token in mine
                assert len(mine) == 7
    assert (kind is SAMPLED) == bool(supports)
    assert len(result.parents) == 0


def test_rows_of_all_kinds_and_lengths_share_a_step(start_draft: Any, tiny_draft_folder: Path) -> None:
    rows = [Row(PROMPT[9 * i : 9 * i + 5 + i], 0, [3 * i, 3 * i + 1]) for i in range(5)]
    kinds, lengths = [MATCHED, SAMPLED, 0, GREEDY, SAMPLED], [4, 2, 0, 6, 1]
    (result,) = run_steps(start_draft, step(*rows, lengths=lengths, kinds=kinds))
    tokens, supports = split(result)
    twin = Twin(load_reference(tiny_draft_folder))
    assert result.node_counts.tolist() == lengths
    for i, row in enumerate(rows):
        if lengths[i]:
            wanted, laws = twin.propose(list(row.tokens), lengths[i], ProposalKind(kinds[i]), 40 + i, 3, 64)
            assert tokens[i] == wanted
            assert [len(support) for support in supports[i]] == [*(len(law) for law in laws), 0]
        else:
            assert supports[i] == [{}]


def test_rounds_go_on_from_any_accepted_length(start_draft: Any, tiny_draft_folder: Path) -> None:
    """Nodes that were accepted are cached where they stand; rejected ones are overwritten."""
    twin = Twin(load_reference(tiny_draft_folder))
    pages, histories = [3, 0, 8, 6], []

    async def scenario() -> None:
        async with start_draft() as worker:
            stream = worker.stream()
            await stream.open()
            result = await stream.run(step(Row(PROMPT[:14], 0, pages), lengths=[4], kinds=[GREEDY]))
            history = list(PROMPT[:14])
            for accepted in (0, 1, 2, 3, 4, 2):
                drafted = result.token_ids.tolist()
                bonus = 17 + accepted
                cached = len(history) + min(accepted, 3)  # the leaf was never run
                history += [*drafted[:accepted], bonus]
                asked = step(Row(history[cached:], cached, pages), lengths=[4], kinds=[GREEDY])
                result = await stream.run(asked)
                histories.append((list(history), result.token_ids.tolist()))

    asyncio.run(scenario())
    assert len(histories) == 6
    for history, tokens in histories:
        assert tokens == twin.propose(history, 4, GREEDY, 0, 0, 1)[0]


def test_a_row_with_nothing_new_brings_its_last_token_again(start_draft: Any, tiny_draft_folder: Path) -> None:
    extend = step(Row(PROMPT[:20], 0, [4, 2]), lengths=[0], kinds=[0])
    again = step(Row(PROMPT[19:20], 19, [4, 2]), lengths=[3], kinds=[GREEDY])
    first, second = run_steps(start_draft, extend, again)
    assert (first.node_counts.tolist(), len(first.token_ids)) == ([0], 0)
    assert (
        second.token_ids.tolist() == Twin(load_reference(tiny_draft_folder)).propose(PROMPT[:20], 3, GREEDY, 0, 0, 1)[0]
    )


def test_the_same_step_run_twice_proposes_the_same_bits(start_draft: Any) -> None:
    rows = [Row(PROMPT[:23], 0, [5, 1]), Row(PROMPT[30:33], 0, [9])]
    asked = step(*rows, lengths=[5, 4], kinds=[SAMPLED, MATCHED])
    first, second = run_steps(start_draft, asked, asked)
    for name in ("node_counts", "token_ids", "support_probs"):
        assert getattr(first, name).tobytes() == getattr(second, name).tobytes()
    assert first.supports.token_ids.tobytes() == second.supports.token_ids.tobytes()


def test_temperature_zero_makes_every_kind_greedy(start_draft: Any) -> None:
    rows = [Row(PROMPT[:9], 0, [i]) for i in range(3)]
    asked = step(*rows, lengths=[4] * 3, kinds=[GREEDY, SAMPLED, MATCHED], sampling=sampling_rows(3, temperature=0.0))
    (result,) = run_steps(start_draft, asked)
    tokens, supports = split(result)
    assert tokens[0] == tokens[1] == tokens[2]
    assert supports[1] == [*({token: 1.0} for token in tokens[1]), {}]


@pytest.mark.parametrize("limits", [ints(), ints(9)])
def test_a_chain_drafter_needs_no_more_nodes_than_the_path(limits: Any, start_draft: Any) -> None:
    asked = dataclasses.replace(step(Row(PROMPT[:5], 0, [0]), lengths=[4], kinds=[GREEDY]), node_limits=limits)
    assert run_steps(start_draft, asked)[0].node_counts.tolist() == [4]


def test_padded_ids_are_never_proposed(start_draft: Any, tmp_path: Path) -> None:
    """The padded rows of the output layer are the likeliest everywhere, and still do not count."""
    folder = make_tiny_llama(tmp_path / "padded", padded_vocab=300)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][280:] = 50 * weights["lm_head.weight"][280:]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    twin = Twin(load_reference(folder))
    with torch.inference_mode():
        assert twin.model(torch.tensor([PROMPT[:9]])).logits[0, -1].argmax() >= 280
    rows = [Row(PROMPT[:9], 0, [i]) for i in range(3)]
    asked = step(*rows, lengths=[4] * 3, kinds=[GREEDY, SAMPLED, MATCHED], support_limit=300)
    (result,) = run_steps(start_draft, asked, model=folder)
    tokens, supports = split(result)
    assert max(result.token_ids) < 280
    assert max(result.supports.token_ids) < 280
    for i, kind in enumerate((GREEDY, SAMPLED, MATCHED)):
        assert tokens[i] == twin.propose(PROMPT[:9], 4, kind, 40 + i, 3, 280)[0]
    assert sum(supports[1][0].values()) == pytest.approx(1, abs=1e-6)


def test_the_first_layers_of_a_checkpoint_make_a_draft(start_draft: Any, tiny_folder: Path) -> None:
    asked = step(Row(PROMPT[:9], 0, [0]), lengths=[4], kinds=[GREEDY])
    (result,) = run_steps(start_draft, asked, model=tiny_folder, layers=1)
    model = load_reference(tiny_folder)
    model.model.layers = model.model.layers[:1]
    assert result.token_ids.tolist() == Twin(model).propose(PROMPT[:9], 4, GREEDY, 0, 0, 1)[0]


def test_sampled_draws_follow_q(start_draft: Any, tmp_path: Path) -> None:
    """Chi-square over 4,000 rows, of the first token and of the second given the likeliest first."""
    folder = make_tiny_model(tmp_path / "words", words=16, layers=1)
    n, batch = 4000, 500
    rows = [Row([5, 9, 4], 0, [i]) for i in range(batch)]
    steps = [
        step(
            *rows,
            lengths=[2] * batch,
            kinds=[SAMPLED] * batch,
            support_limit=8,
            sampling=sampling_rows(batch, temperature=1.3, seed=start),
        )
        for start in range(0, n, batch)
    ]
    results = run_steps(start_draft, *steps, model=folder, pages=batch)
    pairs = np.concatenate([result.token_ids.reshape(-1, 2) for result in results])
    twin = Twin(load_reference(folder), temperature=1.3)

    def check(drawn: Any, history: list[int]) -> None:
        q = twin.q(history).double().numpy()
        kept = np.argsort(-q)[:8]
        counts = np.bincount(drawn, minlength=16)
        assert counts[kept].sum() == len(drawn)
        assert chisquare(counts[kept], q[kept] / q[kept].sum() * len(drawn)).pvalue > 1e-3

    check(pairs[:, 0], [5, 9, 4])
    likeliest = int(np.bincount(pairs[:, 0]).argmax())
    check(pairs[pairs[:, 0] == likeliest, 1], [5, 9, 4, likeliest])


def test_the_target_as_its_own_drafter_accepts_every_matched_token(
    start_draft: Any, start_target: Any, tiny_folder: Path
) -> None:
    """Draft and target share the noise of MATCH, so equal models draw equal tokens."""
    sampling = sampling_rows(1, temperature=0.9, top_p=0.95, seed=77, round_index=5)

    async def scenario() -> tuple[list[int], list[int]]:
        async with start_draft(model=tiny_folder) as draft, start_target() as target:
            drafting, verifying = draft.stream(), target.stream()
            grant, capabilities = await drafting.open()
            assert capabilities == Capabilities((GREEDY, SAMPLED, MATCHED), tree_width=0, scheme="model")
            assert grant.tokenizer_hash == (await verifying.open()).tokenizer_hash
            asked = step(Row(PROMPT[:12], 0, [0, 1]), lengths=[6], kinds=[MATCHED], sampling=sampling)
            drafted = (await drafting.run(asked)).token_ids.tolist()
            verify = TargetStep(
                step_id=1,
                rows=token_rows(Row([*PROMPT[:12], *drafted], 0, [0, 1])),
                sampling=sampling,
                output_nodes=ints(*range(11, 18)),
                draw_rules=np.array([DrawRule.MATCH], np.uint8),
            )
            return drafted, (await verifying.run(verify)).token_ids.tolist()

    drafted, drawn = asyncio.run(scenario())
    assert len(drawn) == 7
    assert drafted == drawn[:6]


def change(**fields: Any) -> Callable[[DraftStep], DraftStep]:
    return lambda s: dataclasses.replace(s, **fields)


BAD_STEPS: list[tuple[str, Callable[[DraftStep], DraftStep]]] = [
    (r"draft_lengths\[0\] is -1", change(draft_lengths=ints(-1))),
    (
        r"proposal_kinds is 0; this drafter can do GREEDY, SAMPLED, MATCHED",
        change(proposal_kinds=np.zeros(1, np.uint8)),
    ),
    (r"page_counts\[0\] is 1; row 0 needs 17 slots", change(draft_lengths=ints(16))),
    (r"node_limits is below draft_lengths", change(node_limits=ints(2))),
    (r"support_limit is 0", change(support_limit=0)),
    (r"features is given; must be absent", change(features=np.zeros((2, 4), np.float32))),
    (r"length of sampling|length of temperatures", change(sampling=sampling_rows(2))),
    (
        r"page_ids is inconsistent; slot 66",
        lambda s: step(Row([5, 6], 0, [4]), Row([6], 2, [4]), lengths=[2, 0], kinds=[GREEDY, GREEDY]),
    ),
]


def test_bad_steps_are_refused_by_name_and_other_streams_go_on(start_draft: Any) -> None:
    good = step(Row([5, 6], 0, [4]), lengths=[3], kinds=[GREEDY])

    async def scenario() -> None:
        async with start_draft() as worker:
            other = worker.stream()
            await other.open(4)
            asked = step(Row(PROMPT[:20], 0, [0, 1]), lengths=[3], kinds=[GREEDY])
            before = (await other.run(asked)).token_ids.tolist()
            stream = worker.stream()
            await stream.open(4)
            right = (await stream.run(good)).token_ids.tolist()
            for message, spoil in BAD_STEPS:
                with pytest.raises(InvalidArgumentError, match=message):
                    await stream.run(spoil(good))
                assert (await stream.run(good)).token_ids.tolist() == right  # the stream goes on as well
                assert (await other.run(asked)).token_ids.tolist() == before

    asyncio.run(scenario())


def test_pages_run_out_and_come_back_and_stopping_ends_streams(start_draft: Any) -> None:
    async def scenario() -> None:
        async with start_draft() as worker:
            first, second = worker.stream(), worker.stream()
            await first.open(30)
            with pytest.raises(OverloadedError, match="3 pages asked for, but at most 2 of 32"):
                await worker.stream().open(3)
            await first.close()
            await second.open()
            await worker.streams.stop()
            with pytest.raises(UnavailableError, match="shutting down"):
                await second.run(step(Row([5], 0, [0]), lengths=[0], kinds=[0]))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--drafter", "oracle"], "drafter is 'oracle'; known are auto, eagle, eagle3, medusa, model, mtp"),
        ([], "model is missing"),
        (["--model", "/nowhere"], "/nowhere does not exist"),
        (["--model", "/nowhere", "--support", "9"], "--support is no flag"),
    ],
)
def test_a_start_that_fails_says_why_and_exits_with_2(
    flags: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--listen", "127.0.0.1:0", *flags])
    assert exit_info.value.code == 2
    assert message in capfd.readouterr().err
