// What is known of one request: where its time went, what was cached and why not more, its chunks, drafts and blocks.

import { setText } from "./canvas.js";
import { element } from "./dom.js";
import { count, duration, percent } from "./format.js";
import { Bars, draftBars, missBars } from "./live_figures.js";

const PHASES = [
  ["preparing", "preparing"],
  ["queue", "in the queue"],
  ["prefill", "prefill"],
  ["decode", "decode"],
];
const REFRESH = 1000;
const MOST_LISTED = 400;

export class Detail {
  /** ontable(block ids) is called whenever the chosen request's table is known anew, with [] when there is none. */
  constructor({ api, ontable }) {
    this._api = api;
    this._ontable = ontable;
    this._id = null;
    this._timer = 0;
    this._isWatched = false;
    this._title = element("h2", {});
    this._error = element("p", { class: "error", role: "alert" });
    this._bar = element("div", { class: "phases", role: "img" });
    this._legend = element("p", { class: "legend hint" });
    this._facts = element("dl", { class: "facts" });
    this._misses = new Bars("detail-misses", "Prompt tokens that were not cached, by reason");
    this._drafts = new Bars("detail-drafts", "Accepted drafts by position");
    this._missTitle = element("h3", {}, "Not found in the prefix cache, and why");
    this._draftTitle = element("h3", {}, "Drafts accepted by position");
    this._completions = element("div", { hidden: true });
    this._blocks = element("p", { class: "mono block-table" });
    this._blocksTitle = element("summary", {}, "Block table");
    this._blocksBox = element("details", { open: true }, this._blocksTitle, this._blocks);
    this._body = element(
      "div",
      { class: "detail-body" },
      this._bar,
      this._legend,
      this._facts,
      this._missTitle,
      this._misses.root,
      this._draftTitle,
      this._drafts.root,
      this._completions,
      this._blocksBox,
    );
    this.root = element(
      "section",
      { class: "card detail", id: "live-detail", tabIndex: -1, hidden: true },
      element("div", { class: "detail-head" }, this._title, element("a", { href: "#live" }, "Close")),
      this._error,
      this._body,
    );
  }

  /** Shows a request, or none with null. */
  choose(id) {
    if (id === this._id) return;
    this._id = id;
    this._ontable([]);
    this.root.hidden = id === null;
    this._body.hidden = true;
    this._error.textContent = "";
    this._title.replaceChildren("Request ", element("span", { class: "mono" }, id ?? ""));
    this._ask();
  }

  /** Whether anybody looks: only then the server is asked, again and again until the request has ended. */
  watch(isWatched) {
    this._isWatched = isWatched;
    this._ask();
  }

  async _ask() {
    clearTimeout(this._timer);
    const id = this._id;
    if (id === null || !this._isWatched) return;
    let isOver = false;
    try {
      const found = await this._api.json(`debug/requests/${encodeURIComponent(id)}`);
      if (id !== this._id) return;
      this._show(found);
      isOver = found.state === "finished";
      this._error.textContent = "";
    } catch (error) {
      if (id !== this._id) return;
      this._error.textContent = error.message;
      isOver = error.status === 404;
    }
    clearTimeout(this._timer);
    if (!isOver) this._timer = setTimeout(() => this._ask(), REFRESH);
  }

  _show(found) {
    this._body.hidden = false;
    this._showTimes(found.times);
    const cached = `${count(found.cached_tokens)} (${percent(found.cached_tokens / found.prompt_tokens)})`;
    const facts = [
      ["State", found.finish_reason ? `${found.state}, ${found.finish_reason}` : found.state],
      ["Model", found.adapter ? `${found.model}, adapter ${found.adapter}` : found.model],
      ["Prompt tokens", count(found.prompt_tokens)],
      ["Found in the cache", cached],
      ["Output tokens", count(found.output_tokens)],
      ["Prefill chunks", found.chunks.length ? found.chunks.map(count).join(" + ") : "none"],
      ["Preemptions", found.preemptions ? `${count(found.preemptions)}; ${count(found.recomputed_tokens)} tokens computed again` : "0"],
    ];
    const { proposed, accepted } = found.drafts ?? { proposed: 0 };
    if (proposed) facts.push(["Drafts", `${count(accepted)} of ${count(proposed)} accepted (${percent(accepted / proposed)})`]);
    this._facts.replaceChildren(...facts.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]));
    const missed = missBars(found.misses, found.prompt_tokens);
    this._missTitle.hidden = missed.length === 0;
    this._misses.set(missed);
    this._draftTitle.hidden = !proposed;
    this._drafts.set(proposed ? draftBars(found.drafts) : []);
    this._showCompletions(found.completions ?? []);
    this._showTable(found);
  }

  _showCompletions(completions) {
    this._completions.hidden = completions.length === 0;
    this._completions.replaceChildren(
      element("h3", {}, `${count(completions.length)} completions`),
      ...completions.map((each, i) =>
        element(
          "p",
          {},
          `${i + 1}: ${[each.state, each.finish_reason].filter(Boolean).join(", ")}; ${count(each.cached_tokens)} of ` +
            `${count(each.prompt_tokens)} prompt tokens cached, ${count(each.output_tokens)} generated in ` +
            `${duration(each.times.total)}.`,
        ),
      ),
    );
  }

  _showTimes(times) {
    const known = PHASES.filter(([name]) => times[name] > 0);
    const total = Math.max(times.total ?? 0, 1e-9);
    this._bar.replaceChildren(
      ...known.map(([name, label]) => {
        const piece = element("span", { class: `piece ${name}`, title: `${label}: ${duration(times[name])}` });
        piece.style.width = `${(100 * times[name]) / total}%`;
        return piece;
      }),
    );
    const texts = known.map(([name, label]) => [name, `${label} ${duration(times[name])}`]);
    this._bar.setAttribute("aria-label", `${duration(times.total)} in all: ${texts.map(([, text]) => text).join(", ")}`);
    this._legend.replaceChildren(
      ...texts.map(([name, text]) => element("span", {}, element("i", { class: `swatch ${name}` }), text)),
      element("span", {}, `${duration(times.total)} in all`),
    );
  }

  _showTable({ block_table: table = [], block_size: size, completions = [] }) {
    this._ontable([...new Set([...table, ...completions.flatMap((each) => each.block_table)])]);
    this._blocksBox.hidden = table.length === 0;
    setText(this._blocksTitle, `Block table: ${count(table.length)} blocks of ${count(size)} tokens, marked in the map`);
    const rest = table.length > MOST_LISTED ? ` … and ${count(table.length - MOST_LISTED)} more` : "";
    setText(this._blocks, table.slice(0, MOST_LISTED).join(" ") + rest);
  }
}
