// The table of requests that run and wait, one row each, kept in place while its numbers change; and the way to others.

import { setText } from "./canvas.js";
import { element } from "./dom.js";
import { count, duration } from "./format.js";

const COLUMNS = ["Request", "State", "Prompt", "Cached", "Output", "Blocks", "Age", "Queued", "Adapter", "Preempted"];
/** Columns that most servers have nothing for: left out unless a request has. */
const RARE = { Adapter: ({ adapter }) => adapter !== null, Preempted: ({ preemptions }) => preemptions > 0 };
const NUMBERS = new Set(["Prompt", "Cached", "Output", "Blocks", "Age", "Queued", "Preempted"]);
const REFRESH = 2000;
const MOST_FINISHED = 30;

export class Requests {
  /** colourOf(key) is the colour of a request in the map; hrefOf(id) the address under which it is shown. */
  constructor({ api, colourOf, hrefOf }) {
    this._api = api;
    this._colourOf = colourOf;
    this._hrefOf = hrefOf;
    this._rows = new Map();
    this._chosen = null;
    this._asked = 0;
    this._listed = "";
    this._body = element("tbody");
    this._note = element("p", { class: "muted", id: "live-requests-note" }, "None.");
    const head = COLUMNS.map((name) => element("th", { scope: "col", class: NUMBERS.has(name) ? "number" : "" }, name));
    this._columns = COLUMNS.map(() => element("col"));
    const table = element(
      "table",
      { id: "live-requests" },
      element("colgroup", {}, ...this._columns),
      element("thead", {}, element("tr", {}, ...head)),
      this._body,
    );
    this._scroll = element("div", { class: "wide requests-scroll", tabIndex: 0, role: "region", "aria-label": "Requests" }, table);
    this.root = element(
      "section",
      { class: "card requests" },
      element("h2", {}, "Requests"),
      this._note,
      this._scroll,
      this._finder(),
      this._finishedList(),
    );
  }

  /** requests and requests_total of a state. */
  set({ requests, requests_total: total, counts }) {
    const rest = total > requests.length ? `; the first ${count(requests.length)} are listed` : "";
    const queued = counts.waiting + counts.preparing;
    setText(this._note, total ? `${count(counts.running)} running, ${count(queued)} in the queue${rest}.` : "None.");
    this._scroll.hidden = total === 0;
    const shown = new Set();
    requests.forEach((request, i) => {
      const key = nextKey(request.id, shown);
      const row = this._rows.get(key) ?? this._add(key, request);
      this._fill(row, request);
      if (this._body.children[i] !== row.root) this._body.insertBefore(row.root, this._body.children[i] ?? null);
    });
    for (const [key, row] of this._rows) {
      if (shown.has(key)) continue;
      row.root.remove();
      this._rows.delete(key);
    }
    for (const [name, has] of Object.entries(RARE)) {
      this._columns[COLUMNS.indexOf(name)].classList.toggle("is-empty", !requests.some(has));
    }
    this._refreshFinished();
  }

  choose(id) {
    this._chosen = id;
    for (const row of this._rows.values()) this._mark(row);
  }

  recolour() {
    for (const row of this._rows.values()) this._paint(row);
  }

  _add(key, { id }) {
    const swatch = element("i", { class: "swatch" });
    const link = element("a", { href: this._hrefOf(id), class: "mono", title: id }, swatch, id);
    const cells = COLUMNS.slice(1).map((name) => element("td", { class: NUMBERS.has(name) ? "number" : "" }));
    const root = element("tr", {}, element("th", { scope: "row" }, link), ...cells);
    const row = { id, swatch, link, cells, root, key: 0 };
    this._rows.set(key, row);
    this._mark(row);
    return row;
  }

  _fill(row, request) {
    row.key = request.state === "running" ? request.key : 0;
    this._paint(row);
    [
      request.state,
      count(request.prompt_tokens),
      count(request.cached_tokens),
      count(request.output_tokens),
      count(request.num_blocks),
      duration(request.age),
      duration(request.queue_seconds),
      request.adapter ?? "",
      request.preemptions ? count(request.preemptions) : "",
    ].forEach((text, i) => setText(row.cells[i], text));
  }

  _paint(row) {
    row.swatch.style.background = row.key ? this._colourOf(row.key) : "";
  }

  _mark(row) {
    if (row.id === this._chosen) row.link.setAttribute("aria-current", "true");
    else row.link.removeAttribute("aria-current");
  }

  _finder() {
    const input = element("input", { id: "live-find", autocomplete: "off", spellcheck: false, required: true });
    const find = (event) => {
      event.preventDefault();
      location.hash = this._hrefOf(input.value.trim());
    };
    return element(
      "form",
      { class: "finder", onsubmit: find },
      element("label", { htmlFor: "live-find" }, "Request id"),
      input,
      element("button", { type: "submit" }, "Show"),
    );
  }

  _finishedList() {
    this._finished = element("ul", { class: "finished" });
    this._finishedBox = element(
      "details",
      { ontoggle: () => this._refreshFinished() },
      element("summary", {}, "Finished lately"),
      this._finished,
    );
    return this._finishedBox;
  }

  /** While the list is open, it is asked for now and then. */
  async _refreshFinished() {
    if (!this._finishedBox.open || performance.now() - this._asked < REFRESH) return;
    this._asked = performance.now();
    try {
      const ids = (await this._api.json("debug/requests")).finished.slice(0, MOST_FINISHED);
      // A list that is the same stays, with the focus on it.
      if (ids.join() === this._listed && ids.length) return;
      this._listed = ids.join();
      const links = ids.map((id) => element("li", {}, element("a", { href: this._hrefOf(id), class: "mono" }, id)));
      this._finished.replaceChildren(...(links.length ? links : [element("li", {}, "None yet.")]));
    } catch (error) {
      this._finished.replaceChildren(element("li", { class: "error" }, error.message));
    }
  }
}

/** Completions of one request have its id in common: its first row has the key "id 0", the next one "id 1". */
function nextKey(id, shown) {
  let number = 0;
  while (shown.has(`${id} ${number}`)) number += 1;
  shown.add(`${id} ${number}`);
  return `${id} ${number}`;
}
