/* What the tests of the playground's Markdown do within the page. */

/** A lane into which a text is streamed in tokens of some characters. */
function streamed(text, size) {
  const run = new Run(true);
  const lane = new Lane(run, "");
  lanes.set(run, lane);
  $("chat").append(lane.section);
  for (let at = 0; at < text.length; at += size) {
    const token = { id: at, text: text.slice(at, at + size), kind: at % 3 ? "accepted" : "recovered" };
    run.take({ delta: { content: token.text }, round: { tokens: [token], drafted: 1, accepted: 1, times: null } });
    lane.update();
  }
  lane.finish("stop");
  return lane;
}

/** What is drawn, without the tokens' spans and attributes. */
function bare(drawn) {
  const copy = drawn.cloneNode(true);
  for (const token of copy.querySelectorAll(".token")) token.replaceWith(...token.childNodes);
  for (const each of copy.querySelectorAll("*")) {
    for (const name of each.getAttributeNames()) each.removeAttribute(name);
  }
  return copy.innerHTML;
}

function isPartOf(text, whole) {
  let at = -1;
  return [...text].every((character) => (at = whole.indexOf(character, at + 1)) >= 0);
}

/** What is wrong with how any texts are drawn. */
function faultsOfDrawing(count) {
  let state = 1;
  const draw = (count) => (state = (state * 48271) % 2147483647) % count;
  const parts = ["*", "**", "_", "`", "```", "~~", "[", "](", ")", "|", "-", "# ", "> ", "\n", "\n\n", "  ", "1. ",
    "- ", "a", "b c", "<b>", "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "javascript:alert(1)",
    "https://a.b/", "&lt;", "\\", "!", "|-|-|\n", "===", "\t", "é", "\ud83d\udc1f", "<", ">", "(", ":"];
  const tags = new Set("P H3 H4 H5 H6 UL OL LI PRE CODE BLOCKQUOTE HR BR EM STRONG S A SPAN DIV HEADER BUTTON TABLE THEAD TBODY TR TH TD".split(" "));
  const names = new Set("class href title target rel start type data-round".split(" "));
  const faults = [];
  for (let round = 0; round < count; round += 1) {
    const text = Array.from({ length: 1 + draw(40) }, () => parts[draw(parts.length)]).join("");
    const lane = streamed(text, 1 + draw(5));
    const grown = lane.text.innerHTML;
    lane.redraw();
    const elements = [...lane.text.querySelectorAll("*")];
    const seen = lane.spans.map((span) => span.textContent).join("");
    if (grown !== lane.text.innerHTML) faults.push(["differs", text, grown, lane.text.innerHTML]);
    if (!isPartOf(seen, text)) faults.push(["made up", text, seen]);
    if (!elements.every((each) => tags.has(each.tagName) && each.getAttributeNames().every((name) => names.has(name))))
      faults.push(["html", text]);
    if (!elements.every((each) => !each.href || /^(https?|mailto):/.test(each.protocol))) faults.push(["link", text]);
    lane.section.remove();
  }
  return faults;
}
