"""The playground, as a browser shows it, and as it is served."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from browser import Page
from deployment import Deployment, wait_until_idle
from oracle_head import OracleHead

from pilotfish.runtime.loading import LoadedModel
from pilotfish.steps import Grant, TargetResult, TargetStep
from target_svc.engine import TargetEngine

QUESTION = "hello there"
TEXT = "[...document.querySelectorAll('.lane:last-child .token')].map((token) => token.textContent).join('')"
IS_DONE = "!running && document.querySelectorAll('.lane .token').length > 0"


@pytest.fixture(scope="module")
def deployment(tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel) -> Iterator[Deployment]:
    with Deployment(tiny_folder, tiny_target, (tiny_draft,), http="127.0.0.1:0") as deployment:
        yield deployment


@pytest.fixture
def page(browser: Page, deployment: Deployment) -> Page:
    return opened(browser, deployment)


def url(deployment: Deployment) -> str:
    assert deployment.orchestrator.gateway is not None
    return f"http://{deployment.orchestrator.gateway.address}/"


def opened(page: Page, deployment: Deployment, *, markdown: bool = False) -> Page:
    """The page, afresh, once it knows the model; text as it is, or as Markdown."""
    page.open(url(deployment))
    page.errors.clear()
    page.requests.clear()
    page.wait("$('served').textContent.includes('tiny')")
    if not markdown:
        page.look("$('markdown').click()")
    return page


def fill(page: Page, name: str, text: str) -> None:
    """Writes into a field as a person would."""
    assert page.look(f"$('{name}').focus(), $('{name}').select(), document.activeElement === $('{name}')")
    page.type(text)


def ask(page: Page, text: str = QUESTION, max_tokens: int = 24) -> None:
    fill(page, "max_completion_tokens", str(max_tokens))
    fill(page, "message", text)
    page.press("Enter")


def bodies(page: Page) -> list[dict[str, Any]]:
    """What the page has asked of the chat endpoint."""
    return [json.loads(request["postData"]) for request in page.requests if request["url"].endswith("/completions")]


def expected(deployment: Deployment, max_tokens: int = 24, **others: Any) -> str:
    """What the API itself answers."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    answer = httpx2.post(f"{url(deployment)}v1/chat/completions", json=body | others, timeout=60)
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


# As it is served


def test_it_is_one_file_that_loads_nothing_else(deployment: Deployment) -> None:
    answer = httpx2.get(url(deployment))
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert re.fullmatch(r"'sha256-[\w+/]+=*'", policy["script-src"])
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert not re.search(r"https?:|//\w+\.|@import|url\(", answer.text)
    assert re.findall(r'(?:src|href|action)="([^"]*)"', answer.text) == ["data:,"]
    assert " style=" not in answer.text  # the policy would refuse it
    assert not re.search(r"\son\w+=", answer.text)  # alike
    assert httpx2.head(url(deployment)).status_code == 200


def test_it_can_be_left_out(tiny_folder: Path, tiny_target: LoadedModel) -> None:
    with Deployment(tiny_folder, tiny_target, http="127.0.0.1:0", http_playground=False) as deployment:
        assert httpx2.get(url(deployment)).status_code == 404
        assert httpx2.get(f"{url(deployment)}health").status_code == 200


# As it is seen


def test_tokens_stream_in_by_origin(page: Page, deployment: Deployment) -> None:
    ask(page)
    page.wait(IS_DONE)
    assert page.look(TEXT) == expected(deployment)
    origins = page.look("[...document.querySelectorAll('.lane .token')].map((token) => token.classList[1])")
    assert len(origins) == 24
    assert origins[0] == "undrafted"  # the prompt's own pass
    assert {"accepted", "recovered"} <= set(origins)
    page.wait("$('acceptance').textContent.includes('%') && Number($('per_round').textContent) > 1")
    counted = page.look("[...$('legend').querySelectorAll('b')].map((count) => Number(count.textContent))")
    assert sum(counted) == 24
    assert counted[0] == origins.count("accepted")
    page.hover(".lane .token.accepted")
    tip = page.wait("!$('tip').hidden && $('tip').textContent")
    assert re.search(r"· id \d+accepted: drafted, and kept", tip)
    page.look("document.querySelector('.lane .answer').focus()")
    for _ in range(3):
        page.press("ArrowRight")
    page.press("ArrowLeft")
    assert page.look("lanes.get(panel.run).spans[1].matches('.inspected') && !$('tip').hidden")
    assert page.errors == []


def test_a_conversation_goes_on_and_is_cleared(page: Page) -> None:
    ask(page, max_tokens=6)
    page.wait(IS_DONE)
    first = page.look(TEXT)
    fill(page, "system", "be brief")
    page.look("$('message').focus()")
    page.type("and")
    page.press("Enter", shift=True)
    page.type("then?")
    assert len(bodies(page)) == 1  # a new line sends nothing
    page.press("Enter")
    page.wait("!running && document.querySelectorAll('.lane').length === 2")
    assert bodies(page)[1]["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "and\nthen?"},
    ]
    page.click("#clear")
    page.wait("!document.querySelector('.turn') && !$('hello').hidden")
    ask(page, "afresh")
    page.wait(IS_DONE)
    assert [message["content"] for message in bodies(page)[2]["messages"]] == ["be brief", "afresh"]
    assert page.errors == []


def test_settings_are_what_is_asked_for(page: Page) -> None:
    ask(page, max_tokens=4)
    page.wait(IS_DONE)
    (plain,) = bodies(page)
    assert plain == {
        "model": "tiny",
        "messages": [{"role": "user", "content": QUESTION}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "show_tokens": True,
        "temperature": 0,
        "max_completion_tokens": 4,
    }
    page.click("#clear")
    fill(page, "draft_length", "2")
    page.look("$('draft_model').value = 'tiny-draft'")
    fill(page, "seed", "7")
    page.look("$('temperature').value = 0.5, $('top_p').value = 0.9")
    ask(page, max_tokens=4)
    page.wait(IS_DONE)
    drafted = {"draft_length": 2, "draft_model": "tiny-draft"}
    assert bodies(page)[1] == plain | drafted | {"seed": 7, "temperature": 0.5, "top_p": 0.9}
    page.click("#clear")
    page.click("#logprobs")
    page.click("#speculation")
    ask(page, max_tokens=4)
    page.wait(IS_DONE)
    alone = {"draft_length": 0, "seed": 7, "temperature": 0.5, "top_p": 0.9, "logprobs": True, "top_logprobs": 3}
    assert bodies(page)[2] == plain | alone
    page.hover(".lane .token")
    tip = page.wait("!$('tip').hidden && $('tip').textContent")
    assert re.search(r"log probability -\d+\.\d+, ", tip)
    assert page.look("$('tip').querySelectorAll('tr').length") == 3
    assert page.look("$('draft_length').disabled && $('compare').disabled")
    assert page.look("[...document.querySelectorAll('.lane .token')].every((token) => token.matches('.undrafted'))")
    assert page.errors == []


def test_it_compares_with_speculation_off(page: Page, deployment: Deployment) -> None:
    page.click("#compare")
    ask(page)
    verdict = page.wait("!running && document.querySelector('.verdict')?.textContent")
    assert re.fullmatch(
        r"Same text\. With speculation [\d.]+ tokens/s, without [\d.]+: [\d.]+ times as fast\.", verdict
    )
    assert [body.get("draft_length") for body in bodies(page)] == [None, 0]
    texts = page.look("[...document.querySelectorAll('.lane .answer')].map((text) => text.textContent)")
    assert texts == [expected(deployment)] * 2
    assert page.look("panel.run.speculates")
    assert page.errors == []


def test_the_proposal_is_drawn_as_a_tree(browser: Page, tiny_folder: Path, tiny_target: LoadedModel) -> None:
    head = OracleHead(tiny_folder, tiny_target, spoil=3)
    with Deployment(
        tiny_folder, tiny_target, (head,), features=head.info.features, draft_tree=12, http="127.0.0.1:0"
    ) as deployment:
        opened(browser, deployment)
        ask(browser)
        browser.wait(IS_DONE)
        seen = set()
        for index, (kept, tokens, drafted) in enumerate(
            browser.look("panel.run.rounds.map((round) => [round.accepted, round.tokens.length, round.drafted])")
        ):
            browser.look(f"panel.show(panel.run, {index}), panel.paint()")
            assert browser.look("$('place').textContent").startswith(f"round {index} of ")
            assert browser.look("document.querySelectorAll('.token.shown').length") == tokens
            nodes = browser.look("panel.run.rounds[panel.index].proposal?.nodes.length ?? 0")
            if not drafted:
                assert browser.look("$('drawing').querySelector('p') !== null && !$('drawing').querySelector('svg')")
                continue
            count = "$('drawing').querySelectorAll('{}').length"
            assert browser.look(count.format(".node.accepted")) == kept
            assert browser.look(count.format(".node.rejected")) == nodes - kept
            assert browser.look(count.format(".edge.kept, .edge.own")) == tokens
            assert browser.look(count.format(".edge")) == nodes + tokens - kept
            overlaps = (
                "[...$('drawing').querySelectorAll('rect')].map((box) => box.getBBox()).some((a, index, boxes) => "
                "boxes.slice(index + 1).some((b) => a.y === b.y && a.x < b.x + b.width && b.x < a.x + a.width))"
            )
            assert not browser.look(overlaps)
            seen.add((nodes > drafted, kept > 0))
        assert (True, True) in seen  # a tree that branches, of which a path was kept
        browser.click("#earlier")
        assert browser.wait("$('place').textContent").startswith("round ")
    assert browser.errors == []


def test_an_error_names_its_parameter(page: Page) -> None:
    fill(page, "draft_length", "999")
    ask(page)
    shown = page.wait("document.querySelector('.turn.error')?.textContent")
    assert shown == "draft_length is 999; must be at most 64"
    assert page.look("document.querySelector('.turn.error code').textContent") == "draft_length"
    assert page.wait("!running && $('message').value") == QUESTION  # there to be sent again
    assert page.look("$('draft_length').getAttribute('aria-invalid')") == "true"
    assert ["status of 400" in error for error in page.errors] == [True]  # the browser's own note
    fill(page, "draft_length", "2")
    page.look("$('message').focus()")
    page.press("Enter")
    page.wait(IS_DONE)
    assert not page.look("document.querySelector('.turn.error')")
    assert len(bodies(page)[1]["messages"]) == 1


def test_a_server_that_is_gone_is_an_error(browser: Page, tiny_folder: Path, tiny_target: LoadedModel) -> None:
    with Deployment(tiny_folder, tiny_target, http="127.0.0.1:0") as deployment:
        opened(browser, deployment)
    ask(browser)
    assert browser.wait("document.querySelector('.turn.error')?.textContent") == "the server cannot be reached"


def test_it_asks_for_a_key_and_with_it(browser: Page, tiny_folder: Path, tiny_target: LoadedModel) -> None:
    is_pointed_to = "$('settings').open && document.activeElement === $('key') && $('key').matches('[aria-invalid]')"
    with Deployment(tiny_folder, tiny_target, http="127.0.0.1:0", api_key=["sesame"]) as deployment:
        browser.open(url(deployment))
        browser.wait("$('served').textContent.includes('this server wants an API key')")
        browser.wait(is_pointed_to)
        fill(browser, "message", QUESTION)
        browser.look("$('settings').open = false")
        browser.press("Enter")  # without one
        assert "this server wants an API key" in browser.wait("document.querySelector('.turn.error')?.textContent")
        browser.wait(f"!running && {is_pointed_to}")
        browser.look("$('message').focus(), $('settings').open = false")
        browser.click(".turn.error button")
        assert browser.look(is_pointed_to)
        fill(browser, "key", "sesame")
        browser.press("Enter")
        browser.wait("$('served').textContent.includes('tiny')")
        assert not browser.look("$('key').matches('[aria-invalid]')")
        ask(browser, max_tokens=4)
        browser.wait(IS_DONE)
        assert "sesame" not in browser.look("JSON.stringify([localStorage, sessionStorage, document.cookie])")


def test_on_a_phone_the_panel_folds(browser: Page, deployment: Deployment) -> None:
    browser.size(390, 800)
    try:
        opened(browser, deployment)
        browser.look("$('settings').open = true")
        ask(browser)
        browser.wait(IS_DONE)
        browser.wait("$('acceptance').textContent.includes('%')")
        folded = browser.look("$('more').open ? 0 : document.querySelector('.live').offsetHeight")
        assert 0 < folded < 60
        assert browser.look("$('speed').offsetHeight > 0 && !$('legend').checkVisibility()")
        browser.click("#more > summary")
        browser.wait("$('more').open && $('legend').checkVisibility() && $('drawing').checkVisibility()")
        assert browser.look("document.querySelector('.live').offsetHeight < 0.65 * innerHeight")
        browser.click("#more > summary")
        browser.wait(f"document.querySelector('.live').offsetHeight === {folded}")
    finally:
        browser.size(1360, 850)
    assert browser.errors == []


class _Metered(TargetEngine):
    """A target that runs as many steps as it is allowed."""

    allowed = threading.Semaphore(0)

    def run(self, grant: Grant, step: TargetStep) -> TargetResult:
        assert self.allowed.acquire(timeout=60)
        return super().run(grant, step)


@pytest.mark.parametrize("way", ["Escape", "#stop"])
def test_stop_ends_the_request(browser: Page, tiny_folder: Path, tiny_target: LoadedModel, way: str) -> None:
    def engine() -> TargetEngine:
        return _Metered(tiny_target, pages=256, page_size=16)

    with Deployment(tiny_folder, engine, http="127.0.0.1:0") as deployment:
        try:
            opened(browser, deployment)
            ask(browser, max_tokens=200)
            _Metered.allowed.release(5)
            browser.wait("document.querySelectorAll('.lane .token').length > 2")
            assert browser.look("running !== null && !$('stop').hidden && $('send').hidden")
            assert deployment.look(lambda scheduler: len(scheduler.rows)) == 1
            if way == "Escape":
                browser.press(way)
            else:
                browser.click(way)
            browser.wait("!running && $('status').textContent === 'Stopped.' && !$('send').hidden")
            assert browser.look("document.querySelector('.lane footer span').textContent").endswith("stopped")
        finally:
            _Metered.allowed.release(2)  # the step under way, and at most one more
        wait_until_idle(deployment)
        _Metered.allowed.release(1000)  # whatever else runs until the services have stopped
    _Metered.allowed = threading.Semaphore(0)
    assert browser.errors == []


@pytest.mark.parametrize(("width", "is_dark"), [(320, False), (390, True), (800, False), (1360, True)])
def test_nothing_overflows(browser: Page, deployment: Deployment, width: int, is_dark: bool) -> None:
    browser.size(width, 800, dark=is_dark)
    try:
        opened(browser, deployment)
        browser.look("$('settings').open = $('more').open = $('compare').checked = true")
        ask(browser, "a" * 300)
        browser.wait("!running && document.querySelectorAll('.verdict').length")
        assert browser.look("document.scrollingElement.scrollWidth") <= width
        inside = "[...document.querySelectorAll('.card, .turn, .lane, .field, .numbers span')]"
        assert browser.look(f"{inside}.filter((each) => each.scrollWidth > each.clientWidth + 1).length") == 0
    finally:
        browser.size(1360, 850)
