// The block map: one cell per block. 100,000 of them are one small picture of a pixel per cell, of which an event changes a
// few pixels; it is then drawn enlarged, and what is too fine for a pixel (borders, marks of sharing) only where it is seen.

import { colours, prepare, setText } from "./canvas.js";
import { element } from "./dom.js";
import { CACHED, FREE } from "./live_model.js";

/** Below the smallest whole side, cells are as small as it takes to show all of them. */
const SMALLEST_WHOLE = 3;
const SMALLEST = 1;
const LARGEST = 24;
const BORDERS_FROM = 4;
const MARKS_FROM = 6;
const SHARED_WEIGHT = 0.35;
const DIMMED_WEIGHT = 0.8;

export class BlockMap {
  /**
   * describe(cell): what is said of a cell. oncell(cell) is called when one is clicked or Enter is pressed on it.
   */
  constructor({ describe, oncell }) {
    this._describe = describe;
    this._oncell = oncell;
    this._pool = null;
    this._members = null;
    this._cursor = -1;
    this._wantedSide = 0;
    this._isScheduled = false;
    this._canvas = element("canvas", { class: "map-canvas", "aria-hidden": "true" });
    this._spacer = element("div", { class: "map-spacer" });
    this._frame = element(
      "div",
      {
        class: "map-frame",
        id: "map",
        tabindex: 0,
        role: "application",
        "aria-roledescription": "block map",
        "aria-label": "Block map. The arrow keys move from block to block, Enter chooses the request of one.",
        "aria-describedby": "map-cell",
      },
      this._spacer,
    );
    this._cell = element("output", { class: "map-cell hint", id: "map-cell" });
    this.root = element("div", { class: "map" }, element("div", { class: "map-box" }, this._canvas, this._frame), this._cell);
    this._picture = document.createElement("canvas");
    this._listen();
    this.retheme();
    this.point(-1);
  }

  /** Shows another pool: a stream has started. */
  show(pool) {
    this._pool = pool;
    this._members = null;
    if (this._cursor >= pool.size) this._cursor = -1;
    this.layout();
  }

  /** Cells of the pool have changed. */
  changed(cells) {
    for (const cell of cells) this._pixels[cell] = this._colourOf(cell);
    this._isStale = cells.length > 0 || this._isStale;
    if (this._cursor >= 0) this._say();
    this.schedule();
  }

  /** Dims all cells but these (a Uint8Array with a 1 for each that counts), or none with null. */
  highlight(members) {
    this._members = members;
    this._repaint();
  }

  /** Makes cells `by` times as large; with 0 as large as fits. */
  zoom(by) {
    this._wantedSide = by && Math.min(LARGEST, Math.max(SMALLEST, Math.round(this._side * by)));
    this.layout();
    if (this._cursor >= 0) this._reveal();
  }

  retheme() {
    const [free, cached, line, text, ground] = colours("--map-free", "--map-cached", "--line", "--text", "--surface");
    this._tones = { line, text, ground };
    this._isDark = luminance(components(ground)) < 0.5;
    this._mixes = { ground: components(ground), text: components(text) };
    this._rests = { [FREE]: components(free), [CACHED]: components(cached) };
    this._tints = new Uint32Array(4 * 65536);
    this._repaint();
  }

  /** The CSS colour of a request's cells. */
  colour(key) {
    return `rgb(${this._hue(key).map(Math.round).join(" ")})`;
  }

  layout() {
    const width = this._frame.clientWidth;
    if (this._pool === null || !width) return;
    const { size } = this._pool;
    const height = parseFloat(getComputedStyle(this._frame).maxHeight);
    this._side = this._wantedSide || fittingSide(size, width, height);
    this._columns = Math.max(1, Math.min(size, Math.floor(width / this._side)));
    this._rows = Math.ceil(size / this._columns);
    this._spacer.style.height = `${this._rows * this._side}px`;
    this._picture.width = this._columns;
    this._picture.height = this._rows;
    this._image = new ImageData(this._columns, this._rows);
    this._pixels = new Uint32Array(this._image.data.buffer);
    this._repaint();
  }

  schedule() {
    if (this._isScheduled) return;
    this._isScheduled = true;
    requestAnimationFrame(() => {
      this._isScheduled = false;
      this.draw();
    });
  }

  /** Draws what is in sight. */
  draw() {
    if (!this._pool || !this._pixels) return;
    const prepared = prepare(this._canvas);
    if (prepared === null) return;
    const { context: pen } = prepared;
    const height = this._frame.clientHeight;
    if (this._isStale) this._picture.getContext("2d").putImageData(this._image, 0, 0);
    this._isStale = false;
    const side = this._side;
    const first = Math.floor(this._frame.scrollTop / side);
    const last = Math.min(this._rows, Math.ceil((this._frame.scrollTop + height) / side));
    const top = first * side - this._frame.scrollTop;
    const breadth = this._columns * side;
    pen.imageSmoothingEnabled = false;
    pen.drawImage(this._picture, 0, first, this._columns, last - first, 0, top, breadth, (last - first) * side);
    if (side >= MARKS_FROM) this._drawMarks(pen, first, last, top);
    if (side >= BORDERS_FROM) {
      pen.fillStyle = this._tones.ground;
      for (let row = 0; row <= last - first; row += 1) pen.fillRect(0, top + row * side - 1, breadth, 1);
      for (let column = 1; column <= this._columns; column += 1) pen.fillRect(column * side - 1, 0, 1, height);
    }
    if (this._cursor >= 0) this._drawCursor(pen);
  }

  /** Puts the cursor on a cell, or nowhere with -1. */
  point(cell) {
    this._cursor = cell;
    this._say();
    this.schedule();
  }

  _drawMarks(pen, first, last, top) {
    const side = this._side;
    const mark = Math.max(2, Math.round(side / 3));
    const inset = (side - 1 - mark) / 2;
    const end = Math.min(this._pool.size, last * this._columns);
    pen.fillStyle = this._tones.text;
    for (let cell = first * this._columns; cell < end; cell += 1) {
      if (this._pool.refs[cell] < 2) continue;
      const row = Math.floor(cell / this._columns) - first;
      pen.fillRect((cell % this._columns) * side + inset, top + row * side + inset, mark, mark);
    }
  }

  _drawCursor(pen) {
    const side = this._side;
    const x = (this._cursor % this._columns) * side;
    const y = Math.floor(this._cursor / this._columns) * side - this._frame.scrollTop;
    pen.lineWidth = 2;
    pen.strokeStyle = this._tones.ground;
    pen.strokeRect(x - 3, y - 3, side + 5, side + 5);
    pen.strokeStyle = this._tones.text;
    pen.strokeRect(x - 1, y - 1, side + 1, side + 1);
  }

  _repaint() {
    if (!this._pixels) return;
    this._pixels.fill(0);
    for (let cell = 0; cell < this._pool.size; cell += 1) this._pixels[cell] = this._colourOf(cell);
    this._isStale = true;
    this.schedule();
  }

  /** The pixel of a cell. Each kind of cell is computed once. */
  _colourOf(cell) {
    const owner = this._pool.owners[cell];
    // Cells too small for a mark say by their tone alone that they are shared.
    const isDeep = this._side < MARKS_FROM && this._pool.refs[cell] > 1;
    const isDimmed = this._members !== null && !this._members[cell];
    const kind = 4 * owner + 2 * isDeep + isDimmed;
    return this._tints[kind] || (this._tints[kind] = this._tint(owner, isDeep, isDimmed));
  }

  _tint(owner, isDeep, isDimmed) {
    let colour = this._hue(owner);
    if (isDeep) colour = mix(colour, this._mixes.text, SHARED_WEIGHT);
    if (isDimmed) colour = mix(colour, this._mixes.ground, DIMMED_WEIGHT);
    return (255 << 24) | (colour[2] << 16) | (colour[1] << 8) | colour[0];
  }

  _hue(owner) {
    return this._rests[owner] ?? hueOf(owner, this._isDark);
  }

  _say() {
    const isKnown = this._pool !== null && this._cursor >= 0;
    setText(this._cell, isKnown ? this._describe(this._cursor) : "Point at a block, or move with the arrow keys.");
  }

  _reveal() {
    const y = Math.floor(this._cursor / this._columns) * this._side;
    const { scrollTop, clientHeight } = this._frame;
    if (y < scrollTop) this._frame.scrollTop = y;
    else if (y + this._side > scrollTop + clientHeight) this._frame.scrollTop = y + this._side - clientHeight;
  }

  _listen() {
    this._frame.addEventListener("scroll", () => this.schedule());
    this._frame.addEventListener("pointermove", (event) => this.point(this._cellAt(event)));
    this._frame.addEventListener("pointerleave", () => this.point(-1));
    this._frame.addEventListener("click", (event) => {
      this.point(this._cellAt(event));
      if (this._cursor >= 0) this._oncell(this._cursor);
    });
    this._frame.addEventListener("keydown", (event) => this._pressed(event));
    new ResizeObserver(() => this.layout()).observe(this._frame);
  }

  _cellAt(event) {
    if (!this._pool) return -1;
    const box = this._frame.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - this._frame.clientLeft) / this._side);
    const y = event.clientY - box.top - this._frame.clientTop + this._frame.scrollTop;
    const cell = Math.floor(y / this._side) * this._columns + column;
    return column >= 0 && column < this._columns && cell < this._pool.size ? cell : -1;
  }

  _pressed(event) {
    if (!this._pool || event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(this._frame.clientHeight / this._side) - 1) * this._columns;
    const moves = {
      ArrowLeft: -1,
      ArrowRight: 1,
      ArrowUp: -this._columns,
      ArrowDown: this._columns,
      PageUp: -page,
      PageDown: page,
      Home: -this._pool.size,
      End: this._pool.size,
    };
    if (event.key === "Enter" && this._cursor >= 0) this._oncell(this._cursor);
    else if (event.key === "Escape") this.point(-1);
    else if (event.key in moves) {
      const from = this._cursor < 0 ? 0 : this._cursor + moves[event.key];
      this.point(Math.min(this._pool.size - 1, Math.max(0, from)));
      this._reveal();
    } else return;
    event.preventDefault();
  }
}

/** The largest side at which `size` cells fill no more than an area. */
function fittingSide(size, width, height) {
  let side = Math.min(LARGEST, Math.sqrt((width * height) / size));
  if (side >= SMALLEST_WHOLE) side = Math.floor(side);
  // The square root is of an area; whole cells may need one row more than there is.
  while (side > SMALLEST && Math.ceil(size / Math.floor(width / side)) * side > height) {
    side = side > SMALLEST_WHOLE ? side - 1 : side * 0.99;
  }
  return Math.max(SMALLEST, side);
}

function components(colour) {
  return colour.match(/[\d.]+/g).slice(0, 3).map(Number);
}

function luminance([red, green, blue]) {
  return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255;
}

function mix(from, to, weight) {
  return from.map((part, i) => part + (to[i] - part) * weight);
}

/**
 * A colour per request: hues a golden angle apart, so that neighbours in time differ most, at equal lightness in OKLCH.
 *
 * Björn Ottosson, "A perceptual color space for image processing" (2020), whose matrices these are.
 */
function hueOf(key, isDark) {
  const angle = (key * 137.508 * Math.PI) / 180;
  const lightness = isDark ? 0.74 : 0.62;
  const a = 0.13 * Math.cos(angle);
  const b = 0.13 * Math.sin(angle);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map((linear) => {
    const clipped = Math.min(1, Math.max(0, linear));
    return 255 * (clipped <= 0.0031308 ? 12.92 * clipped : 1.055 * clipped ** (1 / 2.4) - 0.055);
  });
}
