"""A trace of whole deployments: what lies inside what, and what overlaps."""

from __future__ import annotations

import json
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from deployment import Deployment
from simulated import model

from draft_svc.drafters.simulated import SimulatedDrafter
from pilotfish import SamplingParams
from pilotfish.simulate.profile import Cost, Profile
from pilotfish.tokenizer_hash import tokenizer_hash
from target_svc.simulated import SimulatedTarget

SLOW = Cost(weights_us=10_000.0, token_us=0.0)  # long beside what the orchestrator does meanwhile
REQUESTS = 3


class Span(NamedTuple):
    name: str
    begin: float
    end: float
    args: dict[str, Any]

    def holds(self, other: Span) -> bool:
        return self.begin <= other.begin and other.end <= self.end


@pytest.fixture(scope="module")
def tracks(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Span]]:
    """Spans by process and thread, in the order of their beginnings, of three requests with two draft replicas."""
    path = tmp_path_factory.mktemp("trace") / "t.json"
    profile, described = Profile(agreement=0.5, target=SLOW, draft=SLOW), model(tokenizer_hash(tiny_folder))
    drafts = tuple(SimulatedDrafter(profile, described, pages=64) for _ in range(2))
    make = lambda: SimulatedTarget(profile, described, pages=64)  # noqa: E731
    params = SamplingParams(max_tokens=12, draft_length=2, ignore_eos=True)
    with (
        Deployment(tiny_folder, make, drafts, pages=64, trace=path) as deployment,
        deployment.client() as client,
        ThreadPoolExecutor(REQUESTS) as threads,
    ):
        list(threads.map(lambda index: client.generate([30 + index] * 60, params), range(REQUESTS)))
    events = json.loads(path.read_text())
    names = {event["pid"]: event["args"]["name"].split()[0] for event in events if event["name"] == "process_name"}
    threads_of = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[str, list[Span]] = defaultdict(list)
    open_steps: dict[tuple[int, int], float] = {}
    for event in events:
        if event["ph"] == "X":
            track = f"{names[event['pid']]}-{event['pid']} {threads_of[event['pid'], event['tid']]}"
            found[track].append(Span(event["name"], event["ts"], event["ts"] + event["dur"], event["args"]))
        elif event["ph"] == "b":
            open_steps[event["pid"], event["id"]] = event["ts"]
        elif event["ph"] == "e":
            begin = open_steps.pop((event["pid"], event["id"]))
            found[f"{names[event['pid']]}-{event['pid']} under way"].append(Span("", begin, event["ts"], {}))
    assert not open_steps
    return {track: sorted(spans, key=lambda span: span.begin) for track, spans in found.items()}


def spans_of(tracks: dict[str, list[Span]], kind: str, thread: str) -> list[Span]:
    return [
        span for track, spans in tracks.items() if track.startswith(kind) and track.endswith(thread) for span in spans
    ]


def test_every_process_is_there(tracks: dict[str, list[Span]]) -> None:
    kinds = sorted(track.partition("-")[0] for track in tracks if track.endswith("model"))
    assert kinds == ["draft", "draft", "target"]
    assert {span.name for span in spans_of(tracks, "draft", "model")} == {"propose", "catch up"}
    assert {span.name for span in spans_of(tracks, "target", "model")} >= {"prefill", "verify"}
    assert {span.name for span in spans_of(tracks, "orchestrator", "work")} == {
        "plan proposals", "plan target", "seal", "choose draft lengths", "plan catch up", "plan reads", "plan early",
            "draft early", "accept", "timed", "emit",
    }  # fmt: skip


def test_spans_of_a_thread_do_not_overlap(tracks: dict[str, list[Span]]) -> None:
    for track, spans in tracks.items():
        if not track.endswith("under way"):
            for before, after in pairwise(spans):
                assert before.end <= after.begin + 0.2, track  # the file has tenths of microseconds


def test_workers_compute_while_their_step_is_under_way(tracks: dict[str, list[Span]]) -> None:
    for track, spans in tracks.items():
        if track.endswith("model"):
            under_way = tracks[track.replace("model", "under way")]
            assert len(under_way) == len(spans)
            assert all(
                outer.begin - 0.2 <= inner.begin and inner.end <= outer.end + 0.2
                for outer, inner in zip(under_way, spans, strict=True)
            )


def test_a_round_accepts_what_its_target_step_verified(tracks: dict[str, list[Span]]) -> None:
    rounds, work = spans_of(tracks, "orchestrator", "rounds"), spans_of(tracks, "orchestrator", "work")
    steps = spans_of(tracks, "target", "model")
    assert len(rounds) == len(steps)
    for one, step in zip(rounds, steps, strict=True):
        seals = [span for span in work if span.name == "seal" and one.holds(span)]
        accepts = [span for span in work if span.name == "accept" and one.holds(span)]
        assert seals[-1].end <= step.begin
        assert step.end <= accepts[-1].begin
        assert step.args["rows"] == one.args["rows"]


def test_text_is_sent_while_a_worker_computes(tracks: dict[str, list[Span]]) -> None:
    emits = [span for span in spans_of(tracks, "orchestrator", "work") if span.name == "emit"]
    busy = spans_of(tracks, "target", "model") + spans_of(tracks, "draft", "model")
    under_way = spans_of(tracks, "target", "under way") + spans_of(tracks, "draft", "under way")
    # All but what the last rounds of requests brought, when nothing is left to compute.
    assert sum(any(step.holds(emit) for step in under_way) for emit in emits) >= len(emits) - REQUESTS
    assert any(step.holds(emit) for step in busy for emit in emits)
