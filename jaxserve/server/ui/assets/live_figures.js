// The numbers of the live view: rates with their last minutes, latencies, prefix hits, drafts, adapters.

import { setText } from "./canvas.js";
import { element } from "./dom.js";
import { bytes, count, duration, figure, percent } from "./format.js";
import { Recent } from "./live_model.js";

const MOST_POINTS = 240;
const SVG = "http://www.w3.org/2000/svg";

/** A number under its name, with a line of its past where it has one. */
class Tile {
  constructor(id, label, { hasPast = false, title = "" } = {}) {
    this._value = element("span", { id: `live-${id}` }, "–");
    this._past = hasPast ? new Recent(MOST_POINTS) : null;
    this._line = document.createElementNS(SVG, "polyline");
    this.root = element("div", { class: "figure", title }, element("span", {}, label), this._value);
    if (!hasPast) return;
    const picture = document.createElementNS(SVG, "svg");
    picture.setAttribute("viewBox", `0 0 ${MOST_POINTS} 24`);
    picture.setAttribute("preserveAspectRatio", "none");
    picture.setAttribute("aria-hidden", "true");
    picture.setAttribute("class", "past");
    picture.append(this._line);
    this._value.before(picture);
  }

  set(text, value) {
    setText(this._value, text);
    if (this._past === null) return;
    this._past.add(value);
    const { items } = this._past;
    const most = Math.max(...items, 1e-9);
    const gap = MOST_POINTS / Math.max(1, items.length - 1);
    const points = items.map((each, i) => `${(i * gap).toFixed(1)},${(23 - (22 * each) / most).toFixed(1)}`);
    this._line.setAttribute("points", points.join(" "));
  }
}

export class Tiles {
  constructor() {
    this._tiles = {
      generation: new Tile("generation", "Generated tokens/s", { hasPast: true }),
      prompt: new Tile("prompt", "Prompt tokens/s", { hasPast: true }),
      running: new Tile("running", "Running", { title: "Sequences that have blocks" }),
      queue: new Tile("queue", "In the queue", { title: "Sequences that wait, and requests that are prepared" }),
      hits: new Tile("hits", "Prefix hit rate", { title: "Prompt tokens found in the cache, since the server started" }),
      waste: new Tile("waste", "KV waste", { title: "Places in the newest step's blocks that hold no token" }),
      preemptions: new Tile("preemptions", "Preemptions", { title: "Since the server started" }),
      recomputed: new Tile("recomputed", "Computed again", { title: "Tokens, after preemptions, since the server started" }),
    };
    this.root = element("div", { class: "card figures tiles" }, ...Object.values(this._tiles).map((tile) => tile.root));
  }

  set({ rates, counts }) {
    const tiles = this._tiles;
    tiles.generation.set(figure(rates.generation_tokens_per_second), rates.generation_tokens_per_second);
    tiles.prompt.set(figure(rates.prompt_tokens_per_second), rates.prompt_tokens_per_second);
    tiles.running.set(count(counts.running));
    tiles.queue.set(count(counts.waiting + counts.preparing));
    tiles.hits.set(percent(counts.prefix_hits / counts.prefix_queries));
    tiles.waste.set(percent(counts.kv_waste));
    tiles.preemptions.set(count(counts.preemptions));
    tiles.recomputed.set(count(counts.recomputed_tokens));
  }
}

/** TTFT and ITL by percentile. */
export class Latencies {
  constructor() {
    const row = (label, title) => {
      const cells = Array.from({ length: 4 }, () => element("td", { class: "number" }));
      return { cells, root: element("tr", {}, element("th", { scope: "row", title }, label), ...cells) };
    };
    this._rows = { ttft: row("TTFT", "Time to the first token"), itl: row("ITL", "Time between two tokens") };
    const heads = ["p50", "p90", "p99", "samples"].map((name) => element("th", { class: "number", scope: "col" }, name));
    this.root = element(
      "section",
      { class: "card wide" },
      element("h2", {}, "Latency, last minute"),
      element(
        "table",
        { id: "live-latency" },
        element("thead", {}, element("tr", {}, element("td"), ...heads)),
        element("tbody", {}, this._rows.ttft.root, this._rows.itl.root),
      ),
    );
  }

  set({ latency }) {
    for (const [name, { cells }] of Object.entries(this._rows)) {
      const { p50, p90, p99, count: samples } = latency[name];
      [duration(p50), duration(p90), duration(p99), count(samples)].forEach((text, i) => setText(cells[i], text));
    }
  }
}

/** Names with a bar and a text each, kept in place while their values change. */
export class Bars {
  constructor(id, label) {
    this._rows = new Map();
    this.root = element("ul", { class: "bars", id, "aria-label": label });
  }

  /** items: [{ name, share (0..1, of the bar), text }] */
  set(items) {
    const names = new Set(items.map(({ name }) => name));
    for (const [name, row] of this._rows) {
      if (names.has(name)) continue;
      row.root.remove();
      this._rows.delete(name);
    }
    items.forEach(({ name, share, text }, i) => {
      const row = this._rows.get(name) ?? this._add(name);
      row.fill.style.width = `${(100 * Math.min(1, Math.max(0, share))).toFixed(1)}%`;
      setText(row.text, text);
      if (this.root.children[i] !== row.root) this.root.insertBefore(row.root, this.root.children[i] ?? null);
    });
  }

  _add(name) {
    const fill = element("span", { class: "fill" });
    const text = element("span", { class: "value" });
    const root = element(
      "li",
      {},
      element("span", { class: "name" }, name),
      element("span", { class: "track", "aria-hidden": "true" }, fill),
      text,
    );
    this._rows.set(name, { root, fill, text });
    return this._rows.get(name);
  }
}

export const MISS_REASONS = {
  cold: "never seen",
  evicted: "evicted",
  partial_block: "less than a block",
  lora: "other adapter",
  salt: "other cache salt",
  read: "read anew, as was asked",
  off: "cache switched off",
};

/** Bars of {reason: tokens}; `all` is what the bars are shares of. */
export function missBars(misses, all) {
  return Object.entries(misses)
    .filter(([, tokens]) => tokens > 0)
    .sort(([, a], [, b]) => b - a)
    .map(([reason, tokens]) => ({
      name: MISS_REASONS[reason] ?? reason,
      share: tokens / Math.max(1, all),
      text: `${count(tokens)} (${percent(tokens / Math.max(1, all))})`,
    }));
}

/** Bars of accepted drafts by position: shares of `verifies` where their number is known, else counts. */
export function draftBars({ accepted_by_position: positions }, verifies = null) {
  const all = Math.max(1, verifies ?? Math.max(0, ...positions));
  return positions.map((accepted, i) => ({
    name: `Draft ${i + 1}`,
    share: accepted / all,
    text: verifies ? percent(accepted / verifies) : count(accepted),
  }));
}

/** Prefix misses, drafts and adapters: what a server has of them. */
export class Sections {
  constructor() {
    this._misses = new Section("Prefix cache", new Bars("live-misses", "Prompt tokens not found, by reason"));
    this._drafts = new Section("Drafts", new Bars("live-drafts", "Accepted drafts by position"));
    this._adapters = new Section("Adapter slots", new Bars("live-adapters", "Adapters"));
    this.roots = [this._misses.root, this._drafts.root, this._adapters.root];
  }

  set({ counts, misses, drafts, adapters }, { prefix_caching: isCaching }) {
    const { prefix_queries: asked, prefix_hits: found } = counts;
    this._misses.set(
      isCaching ? `${count(found)} of ${count(asked)} prompt tokens found. Not found, and why:` : "Switched off.",
      missBars(misses, asked),
    );
    this._drafts.root.hidden = drafts === null;
    if (drafts !== null) {
      const { proposed, accepted, verifies } = drafts;
      const rate = `${count(accepted)} of ${count(proposed)} accepted (${percent(accepted / proposed)})`;
      this._drafts.set(`${rate} in ${count(verifies)} verifies. Accepted by position:`, draftBars(drafts, verifies));
    }
    this._adapters.root.hidden = adapters === null;
    if (adapters !== null) {
      const used = adapters.loaded.filter(({ slot }) => slot !== null).length;
      const most = Math.max(1, ...adapters.loaded.map(({ requests }) => requests));
      this._adapters.set(
        `${count(used)} of ${count(adapters.num_slots)} slots taken. Requests by adapter:`,
        adapters.loaded.map(({ name, slot, requests, bytes: size, in_host: isHost }) => ({
          name,
          share: requests / most,
          text: `${count(requests)} · ${slot !== null ? `slot ${slot}` : isHost ? "host" : "disk"} · ${bytes(size)}`,
        })),
      );
    }
  }
}

class Section {
  constructor(title, bars) {
    this._note = element("p", { class: "muted" });
    this._bars = bars;
    this.root = element("section", { class: "card" }, element("h2", {}, title), this._note, bars.root);
  }

  set(note, items) {
    setText(this._note, note);
    this._bars.set(items);
  }
}
