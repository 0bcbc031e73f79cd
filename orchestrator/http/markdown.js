/* Markdown, as models write it: parsed into nodes that know where in the source their text stands.

   Nothing here is ever read as HTML: whoever draws the nodes makes elements of a few kinds and fills them with text, and
   as each text is a range of the source, it can be drawn token by token. Answers grow at their end, and a block that
   another one follows does not change any more: so `parse` can begin at the last block there was.

   Blocks:  heading {level}, paragraph, code {info, ranges}, quote, list {start}, item, table {head, rows}, rule
   Inline:  text {ranges}, codespan {ranges}, em, strong, strike, link {url}, break
   A range is [start, end) of the source. */

const markdown = (() => {
  const DEEPEST = 12; // of quotes and lists in each other, and of emphasis; beyond it, all is text
  const LONGEST_LABEL = 1000;
  const SAFE = /^(https?|mailto):/i; // what a link may lead to

  const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
  const HEADING = /^( {0,3}(#{1,6})(?:[ \t]+|$))(.*?)(?:[ \t]+#+)?[ \t]*$/;
  const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
  const QUOTE = /^ {0,3}> ?/;
  const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +(?=\S)|$)/;
  const UNDERLINE = /^ {0,3}(=+|-+)[ \t]*$/;
  const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

  /** The blocks of a source from an offset on, which must be where a block begins, or none was. */
  function parse(source, from = 0) {
    const lines = [];
    for (let start = from; start < source.length; ) {
      const at = source.indexOf("\n", start);
      const end = at < 0 ? source.length : at;
      lines.push({ start, end });
      start = end + 1;
    }
    return new Blocks(source, 0).read(lines);
  }

  class Blocks {
    constructor(source, depth) {
      this.source = source;
      this.depth = depth;
    }

    /** The blocks of some lines, whose starts may lie behind what their containers begin them with. */
    read(lines) {
      const blocks = [];
      for (let index = 0; index < lines.length; ) {
        if (!this.text(lines[index]).trim()) {
          index += 1;
          continue;
        }
        const [block, next] = this.block(lines, index);
        block.start = lines[index].start;
        blocks.push(block);
        index = next;
      }
      return blocks;
    }

    text(line) {
      return this.source.slice(line.start, line.end);
    }

    /** The block that begins at a line, and the index of the line behind it. */
    block(lines, index) {
      const text = this.text(lines[index]);
      let match;
      if ((match = FENCE.exec(text))) return this.code(lines, index, match);
      if ((match = HEADING.exec(text))) return [this.heading(lines[index], match), index + 1];
      if (RULE.test(text)) return [{ type: "rule" }, index + 1];
      if (this.depth < DEEPEST) {
        if (QUOTE.test(text)) return this.quote(lines, index);
        if (ITEM.test(text)) return this.list(lines, index);
      }
      if (this.isTable(lines, index)) return this.table(lines, index);
      return this.paragraph(lines, index);
    }

    inner(lines) {
      return new Blocks(this.source, this.depth + 1).read(lines);
    }

    code(lines, index, [, fence, info]) {
      const closing = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}[ \\t]*$`);
      const indent = this.text(lines[index]).search(/\S/);
      const ranges = [];
      let next = index + 1;
      while (next < lines.length && !closing.test(this.text(lines[next]))) {
        const { start, end } = lines[next];
        const spaces = Math.min(indent, Math.max(0, this.text(lines[next]).search(/\S|$/)));
        ranges.push([start + spaces, Math.min(end + 1, this.source.length)]);
        next += 1;
      }
      const isClosed = next < lines.length;
      if (isClosed && ranges.length) ranges.at(-1)[1] -= 1; // the end of the last line belongs to the fence
      return [{ type: "code", info: info.trim().split(/\s/)[0], ranges: ranges.filter(([a, b]) => a < b) }, next + isClosed];
    }

    heading(line, [, opening, hashes, text]) {
      const start = line.start + opening.length;
      return { type: "heading", level: hashes.length, children: this.inline([{ start, end: start + text.length }]) };
    }

    quote(lines, index) {
      const within = [];
      let next = index;
      for (let match; next < lines.length && (match = QUOTE.exec(this.text(lines[next]))); next += 1) {
        within.push({ start: lines[next].start + match[0].length, end: lines[next].end });
      }
      return [{ type: "quote", children: this.inner(within) }, next];
    }

    list(lines, index) {
      const kindOf = (marker) => (/\d/.test(marker) ? marker.at(-1) : marker);
      const [, lead, first] = ITEM.exec(this.text(lines[index]));
      const items = [];
      let next = index;
      while (next < lines.length) {
        const match = ITEM.exec(this.text(lines[next]));
        if (!match || RULE.test(this.text(lines[next]))) break;
        if (kindOf(match[2]) !== kindOf(first) || match[1].length > lead.length + 1) break;
        const start = lines[next].start;
        let item;
        [item, next] = this.item(lines, next, match);
        items.push({ type: "item", start, children: this.inner(item) });
        next = this.behindBlanks(lines, next);
      }
      while (next > index && next <= lines.length && !this.text(lines[next - 1]).trim()) next -= 1;
      const start = /\d/.test(first) ? parseInt(first, 10) : null;
      return [{ type: "list", start: null, first: start, children: items }, next];
    }

    /** The index of the first line from one on that is not blank. */
    behindBlanks(lines, index) {
      let next = index;
      while (next < lines.length && !this.text(lines[next]).trim()) next += 1;
      return next;
    }

    /** The lines of an item. What is within it is indented at least by two more than its marker. */
    item(lines, index, [whole, lead, marker]) {
      const width = whole.length > lead.length + marker.length ? whole.length : lead.length + marker.length + 1;
      const least = Math.min(width, lead.length + 2);
      const within = [{ start: Math.min(lines[index].start + width, lines[index].end), end: lines[index].end }];
      let next = index + 1;
      let wasBlank = !this.text(within[0]).trim();
      for (; next < lines.length; next += 1) {
        const text = this.text(lines[next]);
        const indent = text.search(/\S/);
        if (indent < 0) {
          wasBlank = true;
          within.push({ start: lines[next].end, end: lines[next].end });
          continue;
        }
        if (indent < least && (wasBlank || this.begins(text))) break;
        within.push({ start: lines[next].start + Math.min(indent, width), end: lines[next].end });
        wasBlank = false;
      }
      while (within.length > 1 && within.at(-1).start === within.at(-1).end) {
        within.pop();
        next -= 1;
      }
      return [within, next];
    }

    /** Whether a line begins a block even right behind a paragraph. */
    begins(text) {
      const item = ITEM.exec(text);
      const isItem = item && (!/\d/.test(item[2]) || parseInt(item[2], 10) === 1 || this.depth > 0) && item[3];
      return FENCE.test(text) || HEADING.test(text) || RULE.test(text) || QUOTE.test(text) || Boolean(isItem);
    }

    isTable(lines, index) {
      if (index + 1 >= lines.length) return false;
      const [head, delimiters] = [lines[index], lines[index + 1]];
      const text = this.text(delimiters);
      return (
        this.text(head).includes("|") && text.includes("-") && DELIMITERS.test(text) &&
        this.cells(head).length === this.cells(delimiters).length
      );
    }

    table(lines, index) {
      const align = this.cells(lines[index + 1]).map((cell) => {
        const text = this.text(cell).trim();
        const [left, right] = [text.startsWith(":"), text.endsWith(":")];
        return left && right ? "center" : right ? "right" : "";
      });
      const row = (line) => {
        const cells = this.cells(line);
        return align.map((side, column) => ({ align: side, children: cells[column] ? this.inline([cells[column]]) : [] }));
      };
      const rows = [];
      let next = index + 2;
      for (; next < lines.length; next += 1) {
        const text = this.text(lines[next]);
        if (!text.trim() || this.begins(text)) break;
        rows.push(row(lines[next]));
      }
      return [{ type: "table", head: row(lines[index]), rows }, next];
    }

    /** The cells of a row, without the spaces around them. */
    cells(line) {
      const bars = [];
      for (let at = line.start; at < line.end; at += 1) {
        if (this.source[at] === "\\") at += 1;
        else if (this.source[at] === "|") bars.push(at);
      }
      const trimmed = (start, end) => {
        const text = this.source.slice(start, end);
        const lead = text.length - text.trimStart().length;
        return { start: start + lead, end: Math.max(start + lead, start + text.trimEnd().length) };
      };
      const edges = [line.start - 1, ...bars, line.end];
      const cells = edges.slice(1).map((end, index) => trimmed(edges[index] + 1, end));
      if (cells.length > 1 && cells[0].start === cells[0].end && bars.length) cells.shift();
      if (cells.length > 1 && cells.at(-1).start === cells.at(-1).end) cells.pop();
      return cells;
    }

    paragraph(lines, index) {
      let next = index + 1;
      for (; next < lines.length; next += 1) {
        const text = this.text(lines[next]);
        if (!text.trim()) break;
        const underline = UNDERLINE.exec(text);
        if (underline) {
          const level = underline[1][0] === "=" ? 1 : 2;
          return [{ type: "heading", level, children: this.inline(lines.slice(index, next)) }, next + 1];
        }
        if (this.begins(text) || this.isTable(lines, next)) break;
      }
      return [{ type: "paragraph", children: this.inline(lines.slice(index, next)) }, next];
    }

    inline(lines) {
      return new Inline(this.source, lines).read();
    }
  }

  /** The text of some lines as one, which knows where in the source each of its characters stands. */
  class Inline {
    constructor(source, lines) {
      this.at = [];
      this.text = lines
        .map(({ start, end }) => {
          for (let at = start; at <= end; at += 1) this.at.push(at);
          return source.slice(start, end);
        })
        .join("\n");
      this.fruitless = new Set(); // delimiters that nothing closes any more
    }

    read() {
      return this.within(0, this.text.length, 0);
    }

    /** Ranges of the source for characters [from, to). */
    ranges(from, to) {
      const ranges = [];
      for (let index = from; index < to; index += 1) {
        const last = ranges.at(-1);
        if (last && last[1] === this.at[index]) last[1] += 1;
        else ranges.push([this.at[index], this.at[index] + 1]);
      }
      return ranges;
    }

    within(from, to, depth) {
      const nodes = [];
      let plain = from; // where text begins that is no node yet
      const flush = (end) => {
        if (end > plain) nodes.push({ type: "text", ranges: this.ranges(plain, end) });
      };
      for (let index = from; index < to; ) {
        const found = depth < DEEPEST ? this.special(index, to, from, depth) : null;
        if (!found) {
          index += 1;
          continue;
        }
        flush(index);
        if (found.node) nodes.push(found.node);
        plain = found.plain ?? found.next;
        index = found.next;
      }
      flush(to);
      return nodes;
    }

    /** What begins at a place and is no plain text: its node, if it has one, and where it ends. */
    special(index, to, from, depth) {
      const character = this.text[index];
      if (character === "\\") return this.escape(index, to);
      if (character === "\n" || character === " ") return this.lineBreak(index, to);
      if (character === "`") return this.codespan(index, to);
      if (character === "[" || (character === "!" && this.text[index + 1] === "[")) return this.link(index, to, depth);
      if (character === "<") return this.autolink(index, to);
      if (character === "h" || character === "H") return this.bare(index, to, from);
      if (character === "*" || character === "_" || character === "~") return this.emphasis(index, to, from, depth);
      return null;
    }

    escape(index, to) {
      if (index + 1 >= to) return null;
      if (this.text[index + 1] === "\n") return { node: { type: "break" }, next: index + 2 };
      if (!/[!-/:-@[-`{-~]/.test(this.text[index + 1])) return null;
      return { plain: index + 1, next: index + 2 };
    }

    /** Every end of a line is one: models mean it so. */
    lineBreak(index, to) {
      if (this.text[index - 1] === " ") return null; // the first of several has been looked at
      const match = this.match(/ *\n/y, index, to);
      return match && { node: { type: "break" }, next: index + match[0].length };
    }

    codespan(index, to) {
      const ticks = this.run(index, to);
      for (let at = index + ticks; at < to; ) {
        const next = this.text.indexOf("`", at);
        if (next < 0 || next >= to) break;
        const run = this.run(next, to);
        if (run === ticks) return this.code(index + ticks, next, next + run);
        at = next + run;
      }
      return { plain: index, next: index + ticks };
    }

    code(start, end, next) {
      const text = this.text.slice(start, end);
      const isPadded = text.length > 2 && /^[ \n].*[ \n]$/s.test(text) && text.trim();
      const pad = isPadded ? 1 : 0;
      return { node: { type: "codespan", ranges: this.ranges(start + pad, end - pad) }, next };
    }

    /** [label](url "title"); of a picture the label is what there is to see. */
    link(index, to, depth) {
      const start = index + (this.text[index] === "!" ? 2 : 1);
      const end = this.closing(start, Math.min(to, start + LONGEST_LABEL));
      if (end < 0 || this.text[end + 1] !== "(") return null;
      const match = this.match(/\(\s*(?:<([^<>\n]*)>|((?:[^\s()]|\([^\s()]*\))*))(?:\s+(?:"[^"\n]*"|'[^'\n]*'))?\s*\)/y, end + 1, to);
      if (!match) return null;
      const url = safe(match[1] ?? match[2]);
      if (!url) return null;
      return { node: { type: "link", url, children: this.within(start, end, depth + 1) }, next: end + 1 + match[0].length };
    }

    /** The bracket that closes the one before a place; -1 if none does. */
    closing(start, to) {
      let open = 1;
      for (let at = start; at < to; at += 1) {
        if (this.text[at] === "\\") at += 1;
        else if (this.text[at] === "[") open += 1;
        else if (this.text[at] === "]" && (open -= 1) === 0) return at;
      }
      return -1;
    }

    autolink(index, to) {
      const match = this.match(/<([^\s<>]+)>/y, index, to);
      const url = match && safe(match[1]);
      if (!url) return null;
      const next = index + match[0].length;
      return { node: { type: "link", url, children: [this.words(index + 1, next - 1)] }, next };
    }

    bare(index, to, from) {
      if (index > from && /\w/.test(this.text[index - 1])) return null;
      const match = this.match(/https?:\/\/[^\s<>`]+/iy, index, to);
      if (!match) return null;
      let text = match[0].replace(/[.,:;!?'"*_~]+$/, "");
      if (text.endsWith(")") && !text.includes("(")) text = text.slice(0, -1);
      const url = safe(text);
      if (!url) return null;
      const next = index + text.length;
      return { node: { type: "link", url, children: [this.words(index, next)] }, next };
    }

    words(from, to) {
      return { type: "text", ranges: this.ranges(from, to) };
    }

    emphasis(index, to, from, depth) {
      const character = this.text[index];
      const length = this.run(index, to);
      const start = index + length;
      const isKnown = character === "~" ? length === 2 : length <= 3;
      const [before, after] = [index > from ? this.text[index - 1] : " ", this.text[start] ?? " "];
      const opens = !/\s/.test(after) && !(character === "_" && /\w/.test(before));
      const end = isKnown && opens && start < to ? this.ending(character, length, start, to) : -1;
      if (end < 0) return { plain: index, next: start };
      let children = this.within(start, end, depth + 1);
      if (length === 3) children = [{ type: "em", children }];
      const type = character === "~" ? "strike" : length === 1 ? "em" : "strong";
      return { node: { type, children }, next: end + length };
    }

    /** Where so many of a delimiter end what they opened; -1 if they do not. */
    ending(character, length, start, to) {
      const key = `${character}${length}`;
      if (this.fruitless.has(key)) return -1;
      for (let at = start; at < to; ) {
        if (this.text[at] === "\\") at += 2;
        else if (this.text[at] === "`") at = this.codespan(at, to).next;
        else if (this.text[at] !== character) at += 1;
        else {
          const run = this.run(at, to);
          const fits = run === length || (run === 3 && at > start);
          const closes = !/\s/.test(this.text[at - 1]) && !(character === "_" && /\w/.test(this.text[at + run] ?? " "));
          if (fits && closes && at > start) return at + run - length;
          at += run;
        }
      }
      if (to === this.text.length) this.fruitless.add(key);
      return -1;
    }

    /** How often the character at a place comes there in a row. */
    run(index, to) {
      let end = index + 1;
      while (end < to && this.text[end] === this.text[index]) end += 1;
      return end - index;
    }

    match(pattern, index, to) {
      pattern.lastIndex = index;
      const match = pattern.exec(this.text);
      return match && index + match[0].length <= to ? match : null;
    }
  }

  /** The address, if a link may lead there; "" if not. */
  function safe(text) {
    try {
      return SAFE.test(text) ? new URL(text).href : "";
    } catch {
      return "";
    }
  }

  return { parse };
})();
