// What a request says beside its messages: the model, the system prompt, how tokens are sampled. A field left empty is not
// sent, so that the model's own default holds.

import { element } from "./dom.js";

/** `low` and `high` are where the slider ends, `min` and `max` what the server takes. */
const NUMBERS = [
  { name: "temperature", label: "Temperature", low: 0, high: 2, step: 0.05, start: 1, min: 0, max: 2, hint: "0 takes the likeliest token" },
  { name: "top_p", label: "Top p", low: 0.05, high: 1, step: 0.05, start: 1, min: 0.000001, max: 1, hint: "share of probability kept" },
  { name: "top_k", label: "Top k", low: 0, high: 100, step: 1, start: 0, min: 0, max: 2147483647, hint: "tokens kept, 0 is all" },
  { name: "min_p", label: "Min p", low: 0, high: 1, step: 0.05, start: 0, min: 0, max: 1, hint: "least share of the likeliest" },
  { name: "max_tokens", label: "Max tokens", low: 1, high: 2048, step: 1, start: 512, min: 1, hint: "at most so long an answer" },
  { name: "repetition_penalty", label: "Repetition penalty", low: 0.5, high: 2, step: 0.05, start: 1, min: 0.000001, max: 10000, hint: "above 1 avoids repeating" },
  { name: "presence_penalty", label: "Presence penalty", low: -2, high: 2, step: 0.1, start: 0, min: -2, max: 2, hint: "for tokens already said" },
  { name: "frequency_penalty", label: "Frequency penalty", low: -2, high: 2, step: 0.1, start: 0, min: -2, max: 2, hint: "for each time it was said" },
  { name: "seed", label: "Seed", step: 1, min: -9007199254740991, max: 9007199254740991, hint: "same seed, same answer" },
];

export class ChatSettings {
  constructor() {
    this._model = element("select", { id: "chat-model", name: "model" });
    this._system = element("textarea", { id: "chat-system", rows: 3, placeholder: "None" });
    this._stop = element("textarea", { id: "chat-stop", rows: 2, placeholder: "None", "aria-describedby": "chat-stop-hint" });
    this._numbers = new Map(NUMBERS.map((about) => [about.name, numberField(about)]));
    const reset = element("button", { type: "button", class: "quiet small" }, "Reset");
    reset.onclick = () => this._reset();
    this.root = element(
      "form",
      { class: "settings-form", onsubmit: (event) => event.preventDefault() },
      field("Model", this._model),
      field("System prompt", this._system),
      element("div", { class: "settings-title" }, element("h3", {}, "Sampling"), reset),
      ...[...this._numbers.values()].map(({ root }) => root),
      field("Stop at", this._stop, "one text a line"),
    );
  }

  /** `cards` are those of /v1/models. The choice stays while it is served. */
  setModels(cards) {
    const chosen = this._model.value;
    const options = (list) => list.map(({ id }) => element("option", { value: id }, id));
    const adapters = cards.filter(({ parent }) => parent);
    this._model.replaceChildren(...options(cards.filter(({ parent }) => !parent)));
    if (adapters.length) this._model.append(element("optgroup", { label: "Adapters" }, ...options(adapters)));
    if (cards.some(({ id }) => id === chosen)) this._model.value = chosen;
    const longest = Math.max(...cards.map((card) => card.max_model_len ?? 0));
    if (longest > 0) this._numbers.get("max_tokens").setHigh(longest);
  }

  get model() {
    return this._model.value;
  }

  /** Whether all fields hold what the server takes; where not, the browser says which. */
  check() {
    return this.root.reportValidity();
  }

  /** The fields of the request's body; `turns` are its messages. */
  body(turns) {
    const system = this._system.value.trim();
    const stop = this._stop.value.split("\n").filter(Boolean);
    const body = { model: this.model, messages: system ? [{ role: "system", content: system }, ...turns] : turns };
    for (const [name, { input }] of this._numbers) if (input.value !== "") body[name] = input.valueAsNumber;
    if (stop.length) body.stop = stop;
    return body;
  }

  _reset() {
    for (const { clear } of this._numbers.values()) clear();
    this._stop.value = "";
  }
}

function field(label, control, hint) {
  const row = element("div", { class: "field" }, element("label", { htmlFor: control.id }, label));
  if (hint) row.append(element("span", { class: "hint", id: `${control.id}-hint` }, hint));
  row.append(control);
  return row;
}

/** A number that may be empty, and where it makes sense a slider that sets it. */
function numberField({ name, label, low, high, step, start, min, max, hint }) {
  const id = `chat-${name.replaceAll("_", "-")}`;
  const input = element("input", { id, type: "number", placeholder: "default", min, max, step: step === 1 ? 1 : "any" });
  input.setAttribute("aria-describedby", `${id}-hint`);
  const root = element(
    "div",
    { class: "field number" },
    element("label", { htmlFor: id }, label),
    element("span", { class: "hint", id: `${id}-hint` }, hint),
    input,
  );
  let clear = () => (input.value = "");
  let setHigh = () => {};
  if (low !== undefined) {
    // max before value: a slider clamps what it is given.
    const slider = element("input", { type: "range", min: low, max: high, step, value: start, "aria-label": `${label}, slider` });
    slider.oninput = () => (input.value = slider.value);
    input.oninput = () => (slider.value = input.value === "" ? start : input.value);
    root.append(slider);
    clear = () => {
      input.value = "";
      slider.value = start;
    };
    setHigh = (most) => {
      slider.max = most;
      input.max = most;
    };
  }
  return { root, input, clear, setHigh };
}
