// A slider with a number beside it: the slider for trying, the number for what is wanted exactly.

import { element } from "./dom.js";

/** Whole numbers from min to max, four to an octave: a key press is a step that can be seen, at every size. */
export function octaveStops(min, max) {
  const stops = new Set([min, max]);
  for (let octave = 1; octave <= max; octave *= 2) {
    for (const part of [1, 1.25, 1.5, 1.75]) {
      const stop = octave * part;
      if (Number.isInteger(stop) && stop > min && stop < max) stops.add(stop);
    }
  }
  return [...stops].sort((a, b) => a - b);
}

/** min, max and everything between in steps. */
export function evenStops(min, max, step) {
  return Array.from({ length: Math.round((max - min) / step) + 1 }, (_, i) => Number((min + i * step).toFixed(6)));
}

export class Slider {
  /**
   * stops: what the slider can stand at. text: the value as it is read out. isWhole: no fractions in the number.
   * onchange is called with every new value that is good.
   */
  constructor({ id, label, hint = "", stops, value, text = String, isWhole = true, onchange }) {
    this._text = text;
    this._isWhole = isWhole;
    this._onchange = onchange;
    this._error = element("span", { class: "error hint", id: `${id}-error`, role: "alert" });
    this._range = element("input", { type: "range", id, min: 0, step: 1, oninput: () => this._slid() });
    this._number = element("input", {
      type: "number",
      id: `${id}-number`,
      "aria-label": `${label}, exactly`,
      "aria-describedby": `${id}-error`,
      step: isWhole ? 1 : "any",
      inputmode: isWhole ? "numeric" : "decimal",
      oninput: () => this._typed(),
      onblur: () => this._leave(),
    });
    this.root = element(
      "div",
      { class: "slider" },
      element("label", { for: id }, label),
      this._number,
      this._range,
      element("span", { class: "hint" }, hint),
      this._error,
    );
    this.value = value;
    this.setStops(stops);
  }

  setStops(stops) {
    this._stops = stops;
    this._range.max = stops.length - 1;
    this._number.min = stops[0];
    this._number.max = stops.at(-1);
    this.set(Math.min(Math.max(this.value, stops[0]), stops.at(-1)));
  }

  /** Sets the value from outside; onchange is not called. */
  set(value) {
    this.value = value;
    this._number.value = value;
    this._show();
  }

  _show() {
    const distance = (stop) => Math.abs(stop - this.value);
    const nearest = this._stops.reduce((best, stop, i) => (distance(stop) < distance(this._stops[best]) ? i : best), 0);
    this._range.value = nearest;
    this._range.setAttribute("aria-valuetext", this._text(this.value));
    this._number.removeAttribute("aria-invalid");
    this._error.textContent = "";
  }

  _slid() {
    this.set(this._stops[this._range.valueAsNumber]);
    this._onchange(this.value);
  }

  _typed() {
    const value = this._number.valueAsNumber;
    const [least, most] = [this._stops[0], this._stops.at(-1)];
    if (Number.isNaN(value) || value < least || value > most || (this._isWhole && !Number.isInteger(value))) {
      this._number.setAttribute("aria-invalid", "true");
      this._error.textContent = `A ${this._isWhole ? "whole " : ""}number from ${least} to ${most}, please.`;
      return;
    }
    this.value = value;
    this._show();
    this._onchange(value);
  }

  /** What is shown when the number is left is what is computed with. */
  _leave() {
    if (this._number.getAttribute("aria-invalid")) this.set(this.value);
  }
}
