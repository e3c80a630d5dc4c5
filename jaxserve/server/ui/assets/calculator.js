// The calculator: what KV memory a model and its sessions take, contiguous and paged. Beside it, what the pool here wastes.

import { Controls } from "./calculator_controls.js";
import { drawSessions, memoryBar } from "./calculator_draw.js";
import { bytesPerToken, compare, inBlocks } from "./calculator_model.js";
import { setText } from "./canvas.js";
import { element } from "./dom.js";
import { bytes, count, percent } from "./format.js";
import { LiveFeed } from "./live_feed.js";

const QUIET = 700;

const STORY =
  "Nobody knows beforehand how long an answer will get. A server with contiguous memory must keep room for the longest " +
  "context from a session's first token on, and most of that room never holds a token. With blocks, a session takes its " +
  "next block when the last one is full: what is wasted is less than one block per session, and all else is there for others.";
const CAVEAT =
  "Contexts are log-normal with this mean and spread, cut at the longest length. Nothing is random: session i takes the " +
  "quantile ½ + i·φ (mod 1), φ the golden ratio, so the same sliders give the same numbers. Both ways have the same blocks; " +
  "one of them is kept for padding. Activations and workspace are not counted here; the command jaxserve plan counts them.";

let view = null;

/** Called once, with the element to fill, before the view is shown for the first time. */
export function mount(root, context) {
  view = new Calculator(root, context);
}

/** Called whenever the view is shown (with the rest of the address behind its name) or hidden. */
export function shown(isShown) {
  view.feed.want(isShown);
  if (isShown) view.update();
}

class Calculator {
  constructor(root, context) {
    this._context = context;
    this._announcing = 0;
    this._controls = new Controls(() => this.update());
    this._headline = element("h2", { class: "headline", id: "calculator-headline" });
    this._figures = new Figures([
      ["token", "KV per token"],
      ["session", "KV of a session of mean context"],
      ["all", "KV of all sessions, paged"],
      ["pool", "Memory for KV"],
      ["blocks", "Blocks in it"],
    ]);
    this._contiguous = new Side("contiguous", "Contiguous", "Each session reserves the longest length.");
    this._paged = new Side("paged", "Paged", "Each session takes blocks as its context grows.");
    this._table = new Table();
    this._pool = new PoolCard();
    const legend = element(
      "p",
      { class: "legend hint" },
      ...[
        ["weights", "weights"],
        ["used", "holds tokens"],
        ["waste", "reserved, empty"],
        ["free", "free for more"],
      ].map(([name, text]) => element("span", {}, element("i", { class: `swatch ${name}` }), text)),
    );
    root.replaceChildren(
      element("h1", { class: "unseen" }, "Calculator"),
      this._controls.root,
      element(
        "div",
        { class: "results" },
        element("div", { class: "card" }, this._headline, this._figures.root),
        element("div", { class: "sides" }, this._contiguous.root, this._paged.root),
        legend,
        element("div", { class: "card wide" }, element("h2", {}, "In numbers"), this._table.root),
        this._pool.root,
        element("div", { class: "card prose" }, element("h2", {}, "Why blocks"), element("p", {}, STORY)),
        element("p", { class: "hint prose" }, CAVEAT),
      ),
    );
    this.feed = new LiveFeed(
      context.api,
      {
        start: (start) => {
          this._controls.setServed(start);
          this._pool.start(start);
        },
        state: (state) => this._pool.state(state),
        status: (status, detail) => this._pool.status(status, detail),
      },
      2000,
    );
    new ResizeObserver(() => this._draw()).observe(root);
    document.addEventListener("themechange", () => this._draw());
    this.update();
  }

  update() {
    const given = this._controls.values();
    const tokenBytes = bytesPerToken(given.shape, given.kvBytes);
    const poolBytes = Math.max(0, given.memory * given.share - given.weights);
    this._given = { ...given, tokenBytes, poolBytes };
    this._result = compare(this._given);
    this._headline.textContent = headline(this._given, this._result);
    this._figures.set({
      token: bytes(tokenBytes),
      session: bytes((this._result.tokens / given.sessions) * tokenBytes),
      all: bytes(this._result.paged.bytes),
      pool: bytes(poolBytes),
      blocks: count(this._result.poolBlocks),
    });
    this._table.set(this._given, this._result);
    this._draw();
    clearTimeout(this._announcing);
    this._announcing = setTimeout(() => this._context.announce(this._headline.textContent), QUIET);
  }

  _draw() {
    const { maxLength, blockSize } = this._given;
    this._contiguous.set(this._given, this._result, () => inBlocks(maxLength, blockSize), 0);
    this._paged.set(this._given, this._result, (tokens) => inBlocks(tokens, blockSize), blockSize);
  }
}

function headline({ sessions, poolBytes }, { contiguous, paged }) {
  if (poolBytes === 0) return "The weights alone fill this memory.";
  if (contiguous.fits >= sessions) return `All ${count(sessions)} sessions fit, either way; paged memory has room for ${count(paged.fits)}.`;
  const fits = (side) => (side.fits >= sessions ? `all ${count(sessions)}` : `${count(side.fits)} of ${count(sessions)}`);
  return `Paged memory holds ${fits(paged)} sessions at once, contiguous memory ${fits(contiguous)}.`;
}

class Figures {
  constructor(items) {
    this._values = new Map(items.map(([id]) => [id, element("output", { id: `calculator-${id}` })]));
    this.root = element(
      "div",
      { class: "figures" },
      ...items.map(([id, label]) => element("div", { class: "figure" }, element("span", {}, label), this._values.get(id))),
    );
  }

  set(texts) {
    for (const [id, text] of Object.entries(texts)) setText(this._values.get(id), text);
  }
}

/** One way to keep KV: its waste, the memory as a bar, and its sessions as columns. */
class Side {
  constructor(id, title, note) {
    this._id = id;
    this._fits = element("strong");
    this._waste = element("strong");
    this._bar = element("div", { class: "memory" });
    this._canvas = element("canvas", { class: "columns", role: "img" });
    this._memoryTitle = element("h3");
    this._columnsTitle = element("h3");
    this.root = element(
      "section",
      { class: "card side", "aria-labelledby": `${id}-title` },
      element("h2", { id: `${id}-title` }, title),
      element("p", { class: "muted" }, note),
      element(
        "p",
        { class: "verdict" },
        element("span", {}, this._fits, " sessions fit"),
        element("span", {}, this._waste, " of what is reserved is empty"),
      ),
      this._memoryTitle,
      this._bar,
      this._columnsTitle,
      this._canvas,
    );
  }

  set(given, result, reservedOf, unit) {
    const side = result[this._id];
    const running = result.contexts.slice(0, side.fits);
    const total = (of) => running.reduce((sum, context) => sum + of(context), 0) * given.tokenBytes;
    const used = total((context) => context);
    const waste = total(reservedOf) - used;
    const usable = given.memory * given.share;
    const rest = Math.max(0, usable - given.weights - used - waste);
    setText(this._fits, count(side.fits));
    setText(this._waste, percent(side.waste));
    setText(this._memoryTitle, `${bytes(usable)} for weights and KV`);
    setText(this._columnsTitle, `One column per session, ${count(given.maxLength)} tokens high; pale ones have no room`);
    memoryBar(
      this._bar,
      [
        { label: "Weights", class: "weights", bytes: given.weights, text: bytes(given.weights) },
        { label: "Holds tokens", class: "used", bytes: used, text: bytes(used) },
        { label: "Reserved and empty", class: "waste", bytes: waste, text: bytes(waste) },
        { label: "Free", class: "free", bytes: rest, text: bytes(rest) },
      ],
      usable,
    );
    this._canvas.setAttribute(
      "aria-label",
      `${count(result.contexts.length)} sessions, ${count(Math.min(side.fits, result.contexts.length))} of them with room; ` +
        `${percent(side.waste)} of what is reserved is empty.`,
    );
    const top = inBlocks(given.maxLength, given.blockSize);
    drawSessions(this._canvas, { contexts: result.contexts, fits: side.fits, top, reservedOf, unit });
  }
}

class Table {
  constructor() {
    const names = ["KV reserved", "of it with tokens", "Empty", "Empty, of what is reserved", "KV of one session", "Sessions that fit"];
    this._rows = names.map((name) => ({ name, cells: [element("td", { class: "number" }), element("td", { class: "number" })] }));
    this.root = element(
      "table",
      { id: "calculator-table" },
      element(
        "thead",
        {},
        element(
          "tr",
          {},
          element("td"),
          ...["Contiguous", "Paged"].map((name) => element("th", { class: "number", scope: "col" }, name)),
        ),
      ),
      element(
        "tbody",
        {},
        ...this._rows.map(({ name, cells }) => element("tr", {}, element("th", { scope: "row" }, name), ...cells)),
      ),
    );
  }

  set({ tokenBytes, sessions }, { tokens, contiguous, paged }) {
    const used = tokens * tokenBytes;
    [contiguous, paged].forEach((side, column) => {
      const texts = [
        bytes(side.bytes),
        bytes(used),
        bytes(side.bytes - used),
        percent(side.waste),
        `${bytes(side.bytes / sessions)}${column ? ", on average" : ""}`,
        count(side.fits),
      ];
      texts.forEach((text, row) => setText(this._rows[row].cells[column], text));
    });
  }
}

/** What this server's own pool wastes at the moment. */
class PoolCard {
  constructor() {
    this._text = element("p", { id: "calculator-live" });
    this._start = null;
    this.root = element("section", { class: "card" }, element("h2", {}, "The pool of this server, now"), this._text);
  }

  start(start) {
    this._start = start;
  }

  state({ counts }) {
    const { model, num_blocks: all, block_bytes: size, block_size: tokens, kv_reservation: reservation } = this._start;
    const running = `${count(counts.running)} running ${counts.running === 1 ? "sequence" : "sequences"}`;
    const waste = counts.running ? `${percent(counts.kv_waste)} of their places hold no token yet` : "nothing is wasted";
    setText(
      this._text,
      `${model}: ${count(counts.used)} of ${count(all)} blocks in use (${bytes(all * size)} in all, ${count(tokens)} tokens a ` +
        `block, ${reservation}) by ${running}; ${waste}. ${count(counts.cached)} free blocks keep prefixes.`,
    );
  }

  status(status, detail) {
    if (status === "lost") setText(this._text, detail);
    else if (status === "connecting" && this._start === null) setText(this._text, "Asking the server …");
  }
}
