"""What a report looks like: tables, remarks, JSON, and the page with its plots."""

from __future__ import annotations

import dataclasses
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from bench_passes import completion, failed, one_pass, record, report, setting

from pilotfish import RoundTimes
from pilotfish.bench.page import page
from pilotfish.bench.plots import plots
from pilotfish.bench.records import Load, Pass, Setting
from pilotfish.bench.report import Report
from pilotfish.bench.tables import remarks, tables

VOID = {"meta", "br", "link", "img"}


def sweep(*loads: Load, temperatures: tuple[float, ...] = (0.0,)) -> list[tuple[Setting, Pass]]:
    off, on = completion([(0, 0)] * 8), completion([(2, 2), (1, 4), (0, 1)])
    return [
        (setting(length, load, temperature), one_pass(record(off if length == 0 else on), duration_s=2 - repeat))
        for load in loads
        for temperature in temperatures
        for repeat in range(2)
        for length in (0, 4, None)
    ]


SMALL = report(sweep(Load(concurrency=1)))
LARGE = report(sweep(Load(concurrency=1), Load(concurrency=16), temperatures=(0.0, 0.8)))
OPEN = report(sweep(Load(rate=0.5), Load(rate=2.0)))
BROKEN = report([(setting(0), one_pass(failed("<b>the queue</b> is full"))), (setting(4), one_pass(failed("gone")))])


class Outline(HTMLParser):
    """Checks that tags are closed in order, and keeps headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def test_the_tables_of_a_sweep() -> None:
    speed, speculation, latency, parts = tables(SMALL)
    assert speed.header == ("at once", "K", "failed", "tokens", "tokens/s", "speed-up", "from", "to")
    assert speed.rows == (
        ("1", "off", "0 of 2", "18", "6.8", "1.00×", "1.00×", "1.00×"),
        ("1", "4", "0 of 2", "14", "5.2", "0.78×", "0.78×", "0.78×"),
        ("1", "auto", "0 of 2", "14", "5.2", "0.78×", "0.78×", "0.78×"),
    )
    assert speculation.rows[:2] == (
        ("1", "off", "1.00", "–", "–", "0.00", "–"),
        ("1", "4", "2.00", "1.96", "0.600", "2.33", "67 50"),
    )
    assert latency.rows[0] == ("1", "off", "500/500/500", "100/100/100", "100/100/100")
    assert latency.rows[1] == ("1", "4", "500/500/500", "41.7/95.0/100", "100/100/100")
    assert parts.rows[:2] == (
        ("1", "off", "4.00", "–", "2.00", "1.00", "60%", "70%"),
        ("1", "4", "4.00", "3.00", "2.00", "1.00", "60%", "70%"),
    )


def test_temperatures_have_a_column_where_there_are_several() -> None:
    table = tables(LARGE)[0]
    assert table.header[:3] == ("at once", "T", "K")
    assert table.labels == 3
    assert table.groups == (3, 6, 9)
    assert tables(OPEN)[0].header[0] == "req/s"


def test_the_features_of_a_round_are_shown_where_there_are_any() -> None:
    times = [RoundTimes(4000, 2000, 1000, 1000, feature_bytes=count) for count in (8000, 2000, 3000)]
    measured = [
        (setting(0), one_pass(*[record(completion([(0, 0)]))] * 3)),
        (setting(4), one_pass(*(record(completion([(1, 1)], each)) for each in times))),
    ]
    with_features, without = tables(report(measured))[-1], tables(report(measured[:1]))[-1]
    assert with_features.header[-1] == "features, KB"
    assert [row[-1] for row in with_features.rows] == ["–", "3.0"]
    assert "features, KB" not in without.header


def test_remarks_say_what_went_wrong_first() -> None:
    assert remarks(BROKEN)[0] == "1 of 1 requests failed (1 at once, K off): <b>the queue</b> is full"
    assert remarks(BROKEN)[1] == "1 of 1 requests failed (1 at once, K 4): gone"
    lost, same, cached, _ = remarks(SMALL)
    assert lost == "speculation was slower than none in 2 of 2 settings: 0.78× 1 at once, K 4; 0.78× 1 at once, K auto"
    assert "0 of 4 greedy texts are those of speculation off" in same
    assert cached.startswith("50% of the prompt tokens")


def test_the_json_has_a_stable_form() -> None:
    value = json.loads(SMALL.as_json())
    assert value["schema"] == 1
    assert set(value) == {
        "schema", "server", "address", "started_by", "command", "date", "machine", "api", "prompts",
        "requests", "repeats", "max_tokens", "seed", "results", "notes",
    }  # fmt: skip
    result = value["results"][1]
    assert result["setting"] == {
        "load": {"concurrency": 1, "rate": None}, "temperature": 0.0, "draft_length": 4,
    }  # fmt: skip
    assert set(result) == {
        "setting", "requests", "failures", "prompt_tokens", "cached_tokens", "output_tokens", "tokens_per_s",
        "pass_tokens_per_s", "speed_up", "pass_speed_ups", "same_texts", "compared_texts", "first_token", "inter_token",
        "pause", "whole", "rounds", "drafted", "accepted", "judged_per_position", "kept_per_position",
        "acceptance_rate", "tokens_per_round", "predicted_tokens_per_round", "median_round", "feature_kb",
        "target_idle", "draft_idle", "generator_cpu",
    }  # fmt: skip
    assert set(result["first_token"]) == {"median", "p90", "p99", "percentiles"}
    assert result["median_round"] == {"target": 4.0, "draft": 3.0, "hops": 2.0, "orchestrator": 1.0}


def test_failures_are_told_in_json_too() -> None:
    (off, on) = json.loads(BROKEN.as_json())["results"]
    assert (off["failures"], on["failures"]) == ({"<b>the queue</b> is full": 1}, {"gone": 1})


@pytest.mark.parametrize(
    ("shown", "drawn"),
    [
        (SMALL, ["Speed-up against K", "Acceptance per position", "Where a round's time goes", "Latency"]),
        (
            LARGE,
            [
                "Speed-up against K",
                "Tokens per second",
                "Acceptance per position",
                "Where a round's time goes",
                "Latency",
            ],
        ),
        (report(sweep(Load(concurrency=1))[::3]), ["Where a round's time goes", "Latency"]),
        (BROKEN, []),
    ],
)
def test_the_page_has_what_there_is_something_for(shown: Report, drawn: list[str]) -> None:
    titles = ["Speed", "Speculation", "Latency, ms", "A round, ms"]
    assert Outline(page(shown)).headings == [*drawn, *titles, "Beside the numbers"]


def test_the_page_says_whose_numbers_they_are() -> None:
    text = page(SMALL)
    for fact in ("big with small", "a machine", "pilotfish bench", "2026-01-01", "our own"):
        assert fact in text
    assert "&lt;b&gt;the queue&lt;/b&gt; is full" in page(BROKEN)


def test_the_page_needs_nothing_else() -> None:
    text = page(LARGE)
    assert "src=" not in text
    assert "<link" not in text
    assert "@import" not in text


def test_plots_take_the_page_s_colours_and_share_no_ids() -> None:
    drawn = plots(LARGE)
    ids = []
    for shape in (shape for plot in drawn for shape in plot.shapes):
        root = ElementTree.fromstring(shape)
        ids += [each for element in root.iter() if (each := element.get("id"))]
        assert "var(--ink)" in shape
        assert not re.search(r"[:\"]\s*#[0-9a-f]{6}", shape)
        assert root.get("width") is None
    assert ids
    assert len(ids) == len(set(ids))


def test_a_page_has_its_plots_for_desks_and_for_phones() -> None:
    for plot in plots(LARGE):
        wide, narrow = map(ElementTree.fromstring, plot.shapes)
        assert (wide.get("class"), narrow.get("class")) == ("wide", "narrow")
        widths = [float((each.get("viewBox") or "").split()[2]) for each in (wide, narrow)]
        assert widths == [pytest.approx(8.6 * 72), pytest.approx(4.4 * 72)]
    assert "svg.narrow { display: none; }" in page(LARGE)


MIXED = report(
    [
        (setting(length, load), one_pass(record(completion([(0, 0)] * 8)), duration_s=seconds))
        for load, seconds_off, seconds_on in ((Load(concurrency=1), 2.0, 1.0), (Load(concurrency=16), 2.0, 2.5))
        for length, seconds in ((0, seconds_off), (4, seconds_on))
    ]
)


def test_a_loss_stands_beside_the_best_speed_up() -> None:
    text = page(MIXED)
    best = "<div><b>2.00×</b><span>best speed-up over speculation off (1 at once, K 4)</span></div>"
    worst = '<div class="loss"><b>0.80×</b><span>where speculation loses most (16 at once, K 4)</span></div>'
    assert f"{best}\n{worst}" in text
    assert text.count('<td class="loss">0.80×</td>') == 1
    assert '<td class="loss">2.00×' not in text
    assert remarks(MIXED)[0] == "speculation was slower than none in 1 of 2 settings: 0.80× 16 at once, K 4"
    gains = page(
        report([(setting(k), one_pass(record(completion([(1, 1)])), duration_s=2 - k / 9)) for k in (0, 4, 8)])
    )
    assert "where speculation gains least" in gains
    assert 'class="loss"' not in gains


FOREIGN = dataclasses.replace(
    LARGE, origin=dataclasses.replace(LARGE.origin, api="OpenAI", address="http://h/v1"), notes=["chunks were counted"]
)


def test_of_any_server_there_is_what_openai_s_api_shows() -> None:
    speed, latency = tables(FOREIGN)
    assert speed.header == ("at once", "T", "failed", "tokens", "tokens/s", "from", "to")
    assert latency.header == ("at once", "T", "first token", "inter-token", "pieces")
    assert "chunks were counted" in remarks(FOREIGN)
    text = page(FOREIGN)
    assert "<title>pilotfish bench: big at http://h/v1</title>" in text
    assert "OpenAI&#39;s API at http://h/v1" in text
