// The newest steps: what each computed, on a logarithmic scale (a prefill of 2,048 tokens beside a decode of 3), shared out
// within a bar as it is within the step; below it, how long the step took.

import { colours, prepare, setText } from "./canvas.js";
import { element } from "./dom.js";
import { count, duration, percent } from "./format.js";
import { Recent, summarise } from "./live_model.js";

const MOST = 120;
const PARTS = [
  { field: "prefill", label: "prefill", colour: "--series-1" },
  { field: "decode", label: "decode", colour: "--series-3" },
  { field: "verify", label: "verify (drafts)", colour: "--series-4" },
  { field: "padding", label: "padding", colour: "--map-cached" },
];
const TICKS = [1, 8, 64, 512, 4096, 32768];
const MARGIN = 44;
const GAP = 18;

const total = (step) => PARTS.reduce((sum, { field }) => sum + step[field], 0);

export class Timeline {
  constructor() {
    this._steps = new Recent(MOST);
    this._cursor = -1;
    this._isScheduled = false;
    this._canvas = element("canvas", {
      class: "steps-canvas",
      id: "steps",
      tabIndex: 0,
      role: "application",
      "aria-roledescription": "step timeline",
      "aria-label": "The newest steps. The arrow keys move from step to step.",
      "aria-describedby": "step-said",
    });
    this._said = element("output", { class: "hint", id: "step-said" });
    this._summary = element("p", { class: "muted", id: "steps-summary" });
    const legend = PARTS.map(({ field, label }) => element("span", {}, element("i", { class: `swatch ${field}` }), label));
    this.root = element(
      "div",
      { class: "steps" },
      this._summary,
      element("p", { class: "legend hint" }, ...legend),
      this._canvas,
      this._said,
    );
    this._canvas.addEventListener("pointermove", (event) => this._point(this._indexAt(event.offsetX)));
    this._canvas.addEventListener("pointerleave", () => this._point(-1));
    this._canvas.addEventListener("keydown", (event) => this._pressed(event));
    new ResizeObserver(() => this.schedule()).observe(this._canvas);
    this._say();
  }

  clear() {
    this._steps.items = [];
    this._point(-1);
  }

  add(steps) {
    const before = this._steps.items.length + steps.length - MOST;
    this._steps.add(...steps);
    // The step that is pointed at moves on with the others.
    if (this._cursor >= 0 && before > 0) this._cursor = Math.max(-1, this._cursor - before);
    this._say();
    this.schedule();
  }

  schedule() {
    if (this._isScheduled) return;
    this._isScheduled = true;
    requestAnimationFrame(() => {
      this._isScheduled = false;
      this._draw();
    });
  }

  _draw() {
    const prepared = prepare(this._canvas);
    if (prepared === null) return;
    const { context: pen, width, height } = prepared;
    const steps = this._steps.items;
    const [line, muted, text, accent, ...tones] = colours(
      "--line", "--muted", "--text", "--series-2", ...PARTS.map(({ colour }) => colour),
    );
    const upper = Math.round((height - GAP) * 0.68);
    const most = Math.max(64, ...steps.map(total));
    const longest = Math.max(1e-3, ...steps.map(({ seconds }) => seconds));
    const heightOf = (tokens) => (upper * Math.log2(1 + tokens)) / Math.log2(1 + most);
    pen.font = `11px ${getComputedStyle(this._canvas).fontFamily}`;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const tick of TICKS.filter((tick) => tick <= most)) {
      const y = Math.max(6, upper - heightOf(tick));
      pen.fillStyle = line;
      pen.fillRect(MARGIN, y, width - MARGIN, 1);
      pen.fillStyle = muted;
      pen.fillText(count(tick), MARGIN - 6, y);
    }
    pen.fillText(duration(longest), MARGIN - 6, upper + GAP);
    const breadth = (width - MARGIN) / MOST;
    steps.forEach((step, i) => {
      const left = MARGIN + (MOST - steps.length + i) * breadth;
      const scale = heightOf(total(step)) / (total(step) || 1);
      let y = upper;
      PARTS.forEach(({ field }, part) => {
        const share = step[field] * scale;
        pen.fillStyle = tones[part];
        pen.fillRect(left, y - share, Math.max(1, breadth - 1), share);
        y -= share;
      });
      const seconds = ((height - upper - GAP) * step.seconds) / longest;
      pen.fillStyle = i === this._cursor ? text : accent;
      pen.fillRect(left, height - seconds, Math.max(1, breadth - 1), seconds);
      if (i !== this._cursor) return;
      pen.strokeStyle = text;
      pen.strokeRect(left - 0.5, 0.5, breadth, height - 1);
    });
    pen.fillStyle = line;
    pen.fillRect(MARGIN, upper, width - MARGIN, 1);
    pen.fillRect(MARGIN, height - 1, width - MARGIN, 1);
  }

  _point(index) {
    this._cursor = index;
    this._say();
    this.schedule();
  }

  _say() {
    const { count: number, paddingShare, median, longest } = summarise(this._steps.items);
    setText(
      this._summary,
      number
        ? `Newest ${count(number)} steps: ${duration(median)} in the middle, ${duration(longest)} at most; ` +
            `${percent(paddingShare)} of what was computed is padding.`
        : "No steps yet.",
    );
    const step = this._steps.items[this._cursor];
    if (!step) {
      setText(this._said, "Above: tokens (logarithmic), below: time per step. Point at a step, or use the arrow keys.");
      return;
    }
    const parts = PARTS.filter(({ field }) => step[field]).map(({ field, label }) => `${count(step[field])} ${label}`);
    const rows = `${count(step.rows)} ${step.rows === 1 ? "row" : "rows"}`;
    setText(this._said, `${step.kind} step of tokens: ${parts.join(", ")}; ${rows}, ${duration(step.seconds)}.`);
  }

  _indexAt(x) {
    const { items } = this._steps;
    const place = Math.floor(((x - MARGIN) * MOST) / (this._canvas.clientWidth - MARGIN));
    const index = place - (MOST - items.length);
    return index >= 0 && index < items.length ? index : -1;
  }

  _pressed(event) {
    const last = this._steps.items.length - 1;
    const from = this._cursor < 0 ? last + 1 : this._cursor;
    const moves = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: last };
    if (event.key === "Escape") this._point(-1);
    else if (event.key in moves) this._point(Math.min(last, Math.max(0, moves[event.key])));
    else return;
    event.preventDefault();
  }
}
