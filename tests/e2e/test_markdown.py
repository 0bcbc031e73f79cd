"""The playground's Markdown: what it draws, token by token, and what it never does."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Page
from deployment import Deployment

from pilotfish.runtime.loading import LoadedModel

HELPERS = Path(__file__).parents[1] / "data" / "markdown.js"

DOCUMENT = """\
# Fish *and* chips

Some **bold _and both_** words, `code * here`, ~~gone~~ and \\*stars\\*.
Another line; snake_case_name, 2 * 3 * 4.

- one
- two
  1. first
  2. second
     ```py
     if x < 1:

         y = "<b>"
     ```

> A quote
> of *two
> lines*

| fish | count |
|:-----|------:|
| cod  | `1|2` |
| a \\| b | 3 |

***
[a link](https://example.org/a_(b)?c=d&e "title"), https://example.org/x_y_z. <mailto:a@b.c> ![picture](https://example.org/p.png)
"""

DRAWN = (
    "<h3>Fish <em>and</em> chips</h3>"
    "<p>Some <strong>bold <em>and both</em></strong> words, <code>code * here</code>, <s>gone</s> and *stars*.<br>"
    "Another line; snake_case_name, 2 * 3 * 4.</p>"
    "<ul><li><p>one</p></li><li><p>two</p><ol><li><p>first</p></li><li><p>second</p>"
    "<div><header><span>py</span><button>Copy</button></header>"
    '<pre><code>if x &lt; 1:\n\n    y = "&lt;b&gt;"</code></pre></div></li></ol></li></ul>'
    "<blockquote><p>A quote<br>of <em>two<br>lines</em></p></blockquote>"
    "<div><table><thead><tr><th>fish</th><th>count</th></tr></thead><tbody>"
    "<tr><td>cod</td><td>`1</td></tr><tr><td>a | b</td><td>3</td></tr></tbody></table></div>"
    "<hr><p><a>a link</a>, <a>https://example.org/x_y_z</a>. <a>mailto:a@b.c</a> <a>picture</a></p>"
)


@pytest.fixture(scope="module")
def deployment(tiny_folder: Path, tiny_target: LoadedModel) -> Iterator[Deployment]:
    with Deployment(tiny_folder, tiny_target, http="127.0.0.1:0") as deployment:
        yield deployment


@pytest.fixture
def markdown(browser: Page, deployment: Deployment) -> Page:
    assert deployment.orchestrator.gateway is not None
    browser.open(f"http://{deployment.orchestrator.gateway.address}/")
    browser.errors.clear()
    browser.look(HELPERS.read_text(encoding="utf-8"))
    return browser


@pytest.mark.parametrize("size", [1, 3, 7, 5000])
def test_markdown_is_drawn_token_by_token(markdown: Page, size: int) -> None:
    markdown.look(f"lane = streamed({json.dumps(DOCUMENT)}, {size}), 0")
    assert markdown.look("bare(lane.text)") == DRAWN
    assert markdown.look(
        "[...lane.text.querySelectorAll('a')].map((a) => [a.getAttribute('href'), a.rel, a.target])"
    ) == [
        [address, "noopener noreferrer nofollow", "_blank"]
        for address in (
            "https://example.org/a_(b)?c=d&e",
            "https://example.org/x_y_z",
            "mailto:a@b.c",
            "https://example.org/p.png",
        )
    ]
    assert markdown.look("lane.text.querySelectorAll('.right').length") == 3
    # Every piece of text is of a token of its origin, in its order; nothing of the source stands in two places.
    assert markdown.look("lane.spans.every((span) => span.token.text.includes(span.textContent))")
    assert markdown.look("lane.spans.every((span) => span.matches('.' + span.token.origin))")
    assert markdown.look("lane.spans.map((span) => span.token.start).every((at, i, all) => !i || all[i - 1] <= at)")
    markdown.look("$('markdown').click()")
    assert markdown.look("lane.text.textContent") == DOCUMENT
    assert markdown.look("lane.spans.length") == -(-len(DOCUMENT) // size)
    markdown.look("$('markdown').click()")
    assert markdown.look("bare(lane.text)") == DRAWN
    assert markdown.errors == []


def test_any_text_is_drawn_alike_whole_and_as_it_comes_and_never_as_html(markdown: Page) -> None:
    assert markdown.look("faultsOfDrawing(200)") == []
    assert markdown.errors == []


@pytest.mark.parametrize(
    "text",
    [
        "[x](javascript:alert(1))",
        "[x](JAVASCRIPT:alert)",
        "[x](data:text/html,hi)",
        "[x](vbscript:x)",
        "<javascript:alert(1)>",
        "[x](/relative)",
        "[x]( java\tscript:alert(1))",
        "![x](file:///etc/passwd)",
        "[x](https://)",
    ],
)
def test_a_link_that_leads_elsewhere_than_into_the_web_stays_text(markdown: Page, text: str) -> None:
    markdown.look(f"lane = streamed({json.dumps(text)}, 2), 0")
    assert markdown.look("bare(lane.text)") == f"<p>{html.escape(text, quote=False)}</p>"


@pytest.mark.parametrize("text", ["*a" * 5000, "[" * 5000, "> " * 5000, "- " * 5000, "`a" * 5000, "|" * 5000 + "\n|-"])
def test_no_text_holds_the_page_up(markdown: Page, text: str) -> None:
    """Seconds, where a way of looking again and again would take minutes."""
    took = markdown.look(
        f"(() => {{ const t = performance.now(); streamed({json.dumps(text)}, 1000); "
        "return performance.now() - t; })()"
    )
    assert took < 20_000


def test_what_is_copied_is_the_source(markdown: Page) -> None:
    markdown.look("navigator.clipboard.writeText = async (text) => { copied_text = text; }, 0")
    markdown.look(f"lane = streamed({json.dumps(DOCUMENT)}, 3), 0")
    markdown.click("pre")
    markdown.click(".listing .copy")
    assert markdown.wait("copied_text") == 'if x < 1:\n\n    y = "<b>"'
    markdown.click(".lane footer .copy")
    assert markdown.wait(f"copied_text === {json.dumps(DOCUMENT)}")
    assert markdown.wait("document.querySelector('footer .copy').textContent === 'Copied'")
    markdown.look("navigator.clipboard.writeText = async () => { throw Error('no'); }, 0")
    markdown.click(".lane footer .copy")
    assert markdown.wait("document.querySelector('footer .copy').textContent === 'Not copied'")


def test_the_colours_of_tokens_can_be_turned_off(markdown: Page) -> None:
    markdown.look("lane = streamed('some words', 3), 0")
    colour = "getComputedStyle(lane.spans[0]).backgroundColor"
    coloured = markdown.look(colour)
    markdown.look("$('colours').click()")
    assert markdown.look(colour) == "rgba(0, 0, 0, 0)" != coloured
    markdown.look("$('colours').click()")
    assert markdown.look(colour) == coloured


def test_the_arrow_keys_pass_every_token_once(markdown: Page) -> None:
    markdown.look("lane = streamed('ab**cd**ef', 5), lane.text.focus()")
    assert markdown.look("lane.spans.map((span) => span.textContent)") == ["ab", "c", "d", "ef"]
    seen = []
    for _ in range(3):
        markdown.press("ArrowRight")
        seen.append(markdown.look("document.querySelector('.inspected').textContent"))
    assert seen == ["ab", "d", "d"]


def test_reasoning_is_folded_and_not_sent_again(markdown: Page) -> None:
    markdown.look("""(() => {
      run = new Run(true), lane = new Lane(run, "");
      $("chat").append(lane.section);
      const take = (text, delta) => {
        const round = { tokens: [{ id: 1, text, kind: "bonus" }], drafted: 0, accepted: 0, times: null };
        run.take({ delta, round });
        lane.update();
      };
      take("<think>", {});
      take("so *be*", { reasoning_content: "so *be*" });
      take(" it</think>A", { content: null, reasoning_content: " it" });
      run.take({ delta: { content: "A" } });
      take("nswer", { content: "nswer" });
      lane.update();
    })()""")
    assert markdown.look("[lane.reasoning.hidden, lane.reasoning.open]") == [False, False]
    assert markdown.look("bare(lane.text)") == "<p>Answer</p>"
    assert "so <em>be</em> it" in markdown.look("bare(lane.reasoning.lastChild)")
    assert markdown.look("run.content") == "Answer"
