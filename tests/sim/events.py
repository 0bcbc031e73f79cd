"""Random events in the life of a deployment, and what must hold after any mix of them."""

from __future__ import annotations

from fakes import STATES, plain_text, prompt
from hypothesis import strategies as st
from simulator import Costs, Simulator

from orchestrator.core.acceptance import Rule
from orchestrator.core.requests import State

Event = tuple  # its name and its arguments
DRAFT_LENGTHS = st.one_of(st.none(), st.integers(0, 6))
AGREEMENTS = st.sampled_from([0.0, 0.5, 1.0])
HEADS = (
    st.tuples(st.just("open head"), st.integers(4, 40), AGREEMENTS),
    st.tuples(st.just("reads take"), st.integers(0, 3)),
    st.tuples(st.just("fail reads")),
)
"""Further events, where the target stores features."""

RULES = {3: Rule.RATIO, 4: Rule.BLOCK}
"""Of a sampled request, by its seed; else match."""


def submissions(
    most_prompt: int,
    most_tokens: int,
    most_seed: int,
    draft_lengths: st.SearchStrategy[int | None] = DRAFT_LENGTHS,
) -> st.SearchStrategy[Event]:
    """Requests of any priority, greedy with seed 0 and sampled with others."""
    prompts, tokens, seeds = st.integers(1, most_prompt), st.integers(0, most_tokens), st.integers(0, most_seed)
    return st.tuples(st.just("submit"), prompts, tokens, draft_lengths, seeds, st.integers(-1, 1))


def openings(most_pages: int) -> st.SearchStrategy[Event]:
    """Targets that may be too small for a request."""
    return st.tuples(st.just("open target"), st.integers(most_pages // 2, most_pages))


def lists(most: int, *more: st.SearchStrategy[Event]) -> st.SearchStrategy[list[Event]]:
    """Lists of events, those of any deployment and more."""
    return st.lists(
        st.one_of(
            st.tuples(st.just("round"), st.integers(1, 6)),
            st.tuples(st.just("cancel"), st.integers(0, 30)),
            st.tuples(st.just("lose draft")),
            st.tuples(st.just("open draft"), st.integers(4, 30), AGREEMENTS),
            st.tuples(st.just("lose target")),
            *more,
        ),
        max_size=most,
    )


class Player:
    """Plays events, those that are possible; every pool is checked after every round and every event.

    Args:
        simulator: with a target.
        pages: of the target that is opened at the end, if none is there.
        features: that targets store.
    """

    def __init__(self, simulator: Simulator, pages: int, features: tuple[str, ...] = ()) -> None:
        self._simulator, self._pages, self._features = simulator, pages, features
        self._branches = 2 if simulator.limits.tree_nodes else 1
        self._replicas = 0
        self._cancelled: set[str] = set()

    def play(self, events: list[Event]) -> None:
        """Plays events, lets all requests come to their end, and checks their texts."""
        for event in events:
            self._play(event)
            self._simulator.check()
        self._play(("open target", self._pages))
        self._simulator.run()
        self._simulator.check()
        self._check_texts()

    def _play(self, event: Event) -> None:
        simulator = self._simulator
        match event:
            case ("submit", length, max_tokens, draft_length, seed, priority):
                self._submit(length, max_tokens, draft_length, seed, priority)
            case ("round", count):
                for _ in range(count):
                    simulator.round()
            case ("cancel", index) if simulator.requests:
                name = f"r{index % len(simulator.requests)}"
                simulator.cancel(name)
                self._cancelled.add(name)
            case ("lose draft",) if simulator.replicas:
                simulator.lose_draft(next(iter(simulator.replicas)))
            case ("open draft", pages, agreement) if len(simulator.replicas) < 3:
                self._replicas += 1
                simulator.open_draft(f"d{self._replicas}", pages, agreement, self._branches)
            case ("open head", pages, agreement) if len(simulator.replicas) < 3:
                self._open_head(pages, agreement)
            case ("reads take", rounds):
                simulator.read_rounds = rounds
            case ("fail reads",):
                simulator.fail_reads()
            case ("lose target",) if simulator.target is not None:
                simulator.lose_target()
            case ("open target", pages) if simulator.target is None:
                simulator.open_target(pages, features=self._features)

    def _submit(self, length: int, max_tokens: int, draft_length: int | None, seed: int, priority: int) -> None:
        index, rule = len(self._simulator.requests), RULES.get(seed, Rule.MATCH)
        options = {"temperature": float(seed > 0), "seed": seed, "rule": rule, "priority": priority}
        options["show_proposals"] = length % 2 == 0
        if length % 3 == 0:
            options |= {"logprobs": seed, "prompt_logprobs": seed - 1 if seed else None}
        self._simulator.submit(f"r{index}", prompt(index % 5, length), max_tokens, draft_length, **options)

    def _open_head(self, pages: int, agreement: float) -> None:
        self._replicas += 1
        costs = Costs(2500 if self._replicas % 4 == 0 else 100, 1)  # every fourth is late
        states = (STATES, STATES[1:], STATES[::-1])[self._replicas % 3]
        self._simulator.open_draft(f"h{self._replicas}", pages, agreement, self._branches, costs, features=states)

    def _check_texts(self) -> None:
        """Texts of requests that were not cancelled are the target's own, by the match rule."""
        for name, request in self._simulator.requests.items():
            assert request.state is State.FINISHED
            assert request.features is None
            params, text = request.params, self._simulator.texts[name]
            if name in self._cancelled or params.rule is not Rule.MATCH or not text:
                continue  # without a text it could not fit a smaller target and was failed
            assert text == plain_text(request.prompt.tolist(), params.max_tokens, params.temperature, params.seed)
