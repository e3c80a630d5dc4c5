// The view of the running engine: its blocks, requests, steps and figures, as the stream of GET /debug/live tells of them.

import { setText } from "./canvas.js";
import { element } from "./dom.js";
import { bytes, count, percent } from "./format.js";
import { Detail } from "./live_detail.js";
import { LiveFeed } from "./live_feed.js";
import { Latencies, Sections, Tiles } from "./live_figures.js";
import { BlockMap } from "./live_map.js";
import { CACHED, FREE, Pool, toStep } from "./live_model.js";
import { Requests } from "./live_requests.js";
import { Timeline } from "./live_timeline.js";

const INTERVALS = [
  [100, "10 a second"],
  [250, "4 a second"],
  [1000, "every second"],
  [5000, "every 5 seconds"],
];
const STATUSES = { paused: "Paused", connecting: "Connecting …", connected: "Connected", lost: "Connection lost." };

let view = null;

/** Called once, with the element to fill, before the view is shown for the first time. */
export function mount(root, context) {
  view = new Live(root, context);
}

/** Called whenever the view is shown (with the rest of the address behind its name) or hidden. */
export function shown(isShown, rest) {
  view.show(isShown);
  if (isShown) view.choose(rest[0] === "requests" ? rest.slice(1).join("/") : null);
}

class Live {
  constructor(root, context) {
    this._context = context;
    this._pool = null;
    this._start = null;
    this._chosen = null;
    this._table = [];
    this._names = new Map();
    this._announced = "";
    this._isShown = false;
    this._isPaused = false;
    const { api } = context;
    this._map = new BlockMap({ describe: (cell) => this._describe(cell), oncell: (cell) => this._cellChosen(cell) });
    this._requests = new Requests({ api, colourOf: (key) => this._map.colour(key), hrefOf: context.requestLink });
    this._detail = new Detail({ api, ontable: (blocks) => this._tableKnown(blocks) });
    this._timeline = new Timeline();
    this._tiles = new Tiles();
    this._latencies = new Latencies();
    this._sections = new Sections();
    this._counts = new Counts();
    const isCalm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const handlers = {
      start: (start) => this._started(start),
      state: (state) => this._changed(state),
      status: (status, detail) => this._showStatus(status, detail),
    };
    const interval = isCalm ? 1000 : 250;
    this._feed = new LiveFeed(api, handlers, interval);
    root.replaceChildren(
      element("h1", { class: "unseen" }, "Live"),
      this._statusBar(interval),
      this._tiles.root,
      element(
        "div",
        { class: "halves" },
        this._mapCard(),
        element("div", { class: "requests-side" }, this._requests.root, this._detail.root),
      ),
      element("section", { class: "card" }, element("h2", {}, "Steps"), this._timeline.root),
      element("div", { class: "sections" }, this._latencies.root, ...this._sections.roots),
    );
    document.addEventListener("themechange", () => {
      this._map.retheme();
      this._timeline.schedule();
      this._requests.recolour();
    });
    document.addEventListener("visibilitychange", () => this._follow());
  }

  show(isShown) {
    this._isShown = isShown;
    this._follow();
  }

  choose(id) {
    if (id === this._chosen) return;
    this._chosen = id;
    this._requests.choose(id);
    this._detail.choose(id);
    this._highlight();
    // Who chooses in the map stays there, to look at what is marked.
    if (id !== null && !this._map.root.contains(document.activeElement)) this._detail.root.focus();
  }

  _follow() {
    this._feed.want(this._isShown && !this._isPaused);
    this._detail.watch(this._isShown && !this._isPaused && !document.hidden);
  }

  _started(start) {
    this._start = start;
    this._pool = new Pool(start);
    this._map.show(this._pool);
    this._timeline.clear();
    this._counts.set(this._pool, start);
    this._highlight();
  }

  _changed(state) {
    const cells = this._pool.apply(state.changed);
    this._names = new Map(state.requests.filter(({ key }) => key > CACHED).map(({ id, key }) => [key, id]));
    this._map.changed(cells);
    if (this._chosen !== null && cells.length) this._highlight();
    this._counts.set(this._pool, this._start);
    this._timeline.add(state.steps.map(toStep));
    this._tiles.set(state);
    this._requests.set(state);
    this._latencies.set(state);
    this._sections.set(state, this._start);
  }

  _tableKnown(blocks) {
    this._table = blocks;
    this._highlight();
  }

  /** The chosen request's blocks: those of its table as it was last asked for, and those it has taken since. */
  _highlight() {
    if (this._pool === null) return;
    const keys = new Set([...this._names].filter(([, id]) => id === this._chosen).map(([key]) => key));
    if (this._table.length === 0 && keys.size === 0) {
      this._map.highlight(null);
      return;
    }
    const { owners, refs, size } = this._pool;
    const members = new Uint8Array(size);
    // The table may be a second old: a block of it that one other request has now is no longer of this one.
    for (const block of this._table) members[block - 1] = Number(refs[block - 1] > 1 || (keys.size === 0 && refs[block - 1] > 0));
    for (const key of keys) owners.forEach((owner, cell) => (members[cell] |= owner === key));
    this._map.highlight(members);
  }

  _describe(cell) {
    const owner = this._pool.owners[cell];
    const name = `Block ${count(cell + 1)}`;
    if (owner === FREE) return `${name}: free.`;
    if (owner === CACHED) return `${name}: cached; free, and keeps a prefix for reuse.`;
    const refs = this._pool.refs[cell];
    const sharing = refs > 1 ? `${refs === 255 ? "255 or more" : refs} references, shared` : "1 reference";
    const place = this._table.indexOf(cell + 1);
    const size = this._start.block_size;
    const holds = place < 0 ? "" : ` Holds tokens ${count(place * size)} to ${count((place + 1) * size - 1)} of the chosen request.`;
    return `${name}: ${this._names.get(owner) ?? "a request that is not listed"}; ${sharing}.${holds}`;
  }

  _cellChosen(cell) {
    const id = this._names.get(this._pool.owners[cell]);
    location.hash = id === undefined ? "#live" : this._context.requestLink(id);
  }

  _mapCard() {
    const zoom = (label, text, by) =>
      element("button", { type: "button", class: "small", "aria-label": label, onclick: () => this._map.zoom(by) }, text);
    return element(
      "section",
      { class: "card" },
      element(
        "div",
        { class: "map-head" },
        element("h2", {}, "Blocks"),
        element("div", {}, zoom("Smaller blocks", "−", 0.75), zoom("Blocks as large as fit", "Fit", 0), zoom("Larger blocks", "+", 1.4)),
      ),
      this._map.root,
      this._counts.root,
    );
  }

  _statusBar(interval) {
    this._dot = element("i", { class: "dot", "aria-hidden": "true" });
    this._status = element("span", { id: "live-status" });
    this._pause = element("button", { type: "button", "aria-pressed": "false", onclick: () => this._togglePause() }, "Pause");
    const options = INTERVALS.map(([value, label]) => element("option", { value, selected: value === interval }, label));
    const select = element(
      "select",
      { id: "live-interval", onchange: () => this._feed.setInterval(Number(select.value)) },
      ...options,
    );
    return element(
      "div",
      { class: "live-bar" },
      element("p", { class: "live-status" }, this._dot, this._status),
      element("span", { class: "live-actions" }, element("label", { htmlFor: "live-interval" }, "Updates"), select, this._pause),
    );
  }

  _togglePause() {
    this._isPaused = !this._isPaused;
    this._pause.setAttribute("aria-pressed", String(this._isPaused));
    this._follow();
  }

  _showStatus(status, detail) {
    this._dot.dataset.status = status;
    const text = `${STATUSES[status]} ${detail}`.trim();
    // Said once, however often it is tried again.
    if (status !== "connecting" && status !== this._announced) {
      this._announced = status;
      this._context.announce(text);
    }
    setText(this._status, text);
  }
}

/** How many blocks are what: legend, numbers, and the map for who does not see it. */
class Counts {
  constructor() {
    const kinds = [
      ["free", "Free"],
      ["cached", "Cached"],
      ["active", "Active"],
      ["shared", "Shared"],
    ];
    this._cells = new Map();
    const rows = kinds.map(([kind, label]) => {
      const cells = [element("td", { class: "number" }), element("td", { class: "number" }), element("td", { class: "number" })];
      this._cells.set(kind, cells);
      return element("tr", {}, element("th", { scope: "row" }, element("i", { class: `swatch ${kind}` }), label), ...cells);
    });
    const heads = ["Blocks", "Share", "Memory"].map((name) => element("th", { scope: "col", class: "number" }, name));
    const head = element("thead", {}, element("tr", {}, element("td"), ...heads));
    this.root = element("table", { class: "counts", id: "live-counts" }, head, element("tbody", {}, ...rows));
  }

  set(pool, { block_bytes: size }) {
    for (const [kind, cells] of this._cells) {
      [count(pool[kind]), percent(pool[kind] / pool.size), bytes(pool[kind] * size)].forEach((text, i) => setText(cells[i], text));
    }
  }
}
