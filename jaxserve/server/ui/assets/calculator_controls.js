// What the calculator is asked: the model, how numbers are kept, the sessions, the memory.

import { GIB, KV_FORMS, SHAPES, WEIGHT_FORMS, parseConfig, weightBytes } from "./calculator_model.js";
import { Slider, evenStops, octaveStops } from "./calculator_slider.js";
import { element } from "./dom.js";
import { bytes, count } from "./format.js";

const DEFAULT_SHAPE = "Llama 3.1 8B";
const MOST_CONFIG_BYTES = 1_000_000;
const tokens = (value) => `${count(value)} tokens`;

export class Controls {
  /** onchange is called after every change that is good. */
  constructor(onchange) {
    this._onchange = onchange;
    this._shapes = [...SHAPES];
    this._served = null;
    this._model = element("select", { id: "calculator-model", onchange: () => this._modelChanged() });
    this._weightForm = this._select("calculator-weights-form", WEIGHT_FORMS, "16bit", () => {
      this._setWeights();
      onchange();
    });
    this._kvForm = this._select("calculator-kv-form", KV_FORMS, "16bit", onchange);
    this._note = element("p", { class: "hint", id: "calculator-shape" });
    this._makeSliders();
    this.root = element(
      "form",
      { class: "card controls", "aria-label": "What to calculate", onsubmit: (event) => event.preventDefault() },
      field("Model", this._model),
      this._note,
      this._configBox(),
      element("div", { class: "pair" }, field("Weights as", this._weightForm), field("KV as", this._kvForm)),
      ...Object.values(this._sliders).map((slider) => slider.root),
    );
    this._takeDrops();
    this._listShapes();
    this._choose(this._shapes.find(({ name }) => name === DEFAULT_SHAPE));
  }

  /** All that compare() needs but for what follows from it. */
  values() {
    const s = this._sliders;
    return {
      shape: this._shape,
      kvBytes: KV_FORMS.find(({ id }) => id === this._kvForm.value).bytes,
      memory: s.memory.value * GIB,
      share: s.share.value / 100,
      weights: s.weights.value * GIB,
      sessions: s.sessions.value,
      mean: s.mean.value,
      spread: s.spread.value / 100,
      maxLength: s.maxLength.value,
      blockSize: s.blockSize.value,
    };
  }

  /** Offers the model that this server runs, as its stream's first event describes it. */
  setServed(start) {
    const { num_layers: layers, num_kv_heads: kvHeads, head_dim: headDim, weight_bytes: weights } = start.model_shape;
    const served = { name: `${start.model} (served here)`, layers, kvHeads, headDim, maxLength: start.max_model_len };
    Object.assign(served, { weightBytes: weights, kvBytes: start.model_shape.kv_dtype_bytes, notes: [] });
    served.blockSize = start.block_size;
    const isChosen = this._shape === this._served;
    this._shapes = [served, ...this._shapes.filter((shape) => shape !== this._served)];
    this._served = served;
    if (isChosen) this._shape = served;
    this._listShapes();
  }

  _makeSliders() {
    const slider = (id, label, rest) => new Slider({ id: `calculator-${id}`, label, onchange: this._onchange, ...rest });
    const percents = { text: (value) => `${value} %` };
    this._sliders = {
      memory: slider("memory", "GPU memory, GiB", {
        stops: octaveStops(1, 2048), value: 80, isWhole: false, text: (value) => `${value} GiB`,
      }),
      share: slider("share", "Share in use, %", { stops: evenStops(50, 100, 1), value: 90, ...percents }),
      weights: slider("weights", "Weights, GiB", {
        stops: octaveStops(0, 2048), value: 0, isWhole: false, text: (value) => `${value} GiB`,
      }),
      sessions: slider("sessions", "Concurrent sessions", {
        stops: octaveStops(1, 512), value: 128, text: (value) => `${value} sessions`,
      }),
      mean: slider("mean", "Mean context, tokens", { stops: octaveStops(16, 131072), value: 2048, text: tokens }),
      spread: slider("spread", "Spread, % of the mean", {
        stops: evenStops(0, 200, 5), value: 60, ...percents,
      }),
      maxLength: slider("max-length", "Longest context, tokens", { stops: octaveStops(64, 131072), value: 8192, text: tokens }),
      blockSize: slider("block-size", "Block size, tokens", {
        stops: Array.from({ length: 11 }, (_, i) => 2 ** i), value: 16, text: tokens, hint: "jaxserve takes 8, 16, 32, 64 or 128.",
      }),
    };
  }

  _select(id, forms, value, onchange) {
    const options = forms.map((form) => element("option", { value: form.id, selected: form.id === value }, form.label));
    return element("select", { id, onchange }, ...options);
  }

  _listShapes() {
    this._model.replaceChildren(
      ...this._shapes.map((shape, i) => element("option", { value: i, selected: shape === this._shape }, shape.name)),
    );
  }

  _modelChanged() {
    this._choose(this._shapes[Number(this._model.value)]);
    this._onchange();
  }

  _choose(shape) {
    this._shape = shape;
    this._model.value = this._shapes.indexOf(shape);
    const known = KV_FORMS.find((form) => form.bytes === shape.kvBytes);
    if (known) this._kvForm.value = known.id;
    this._weightForm.disabled = shape.weightBytes !== undefined;
    this._sliders.maxLength.setStops(octaveStops(Math.min(64, shape.maxLength), shape.maxLength));
    this._sliders.mean.setStops(octaveStops(Math.min(16, shape.maxLength), shape.maxLength));
    if (shape.blockSize) this._sliders.blockSize.set(shape.blockSize);
    const heads = `${count(shape.layers)} layers, ${count(shape.kvHeads)} KV heads of ${count(shape.headDim)}`;
    this._note.textContent = [`${heads}, contexts up to ${count(shape.maxLength)}.`, ...shape.notes].join(" ");
    this._setWeights();
  }

  _setWeights() {
    const form = WEIGHT_FORMS.find(({ id }) => id === this._weightForm.value);
    const size = weightBytes(this._shape, form);
    if (size !== null) this._sliders.weights.set(Number((size / GIB).toPrecision(4)));
  }

  _configBox() {
    this._text = element("textarea", {
      id: "calculator-config",
      rows: 5,
      spellcheck: "false",
      placeholder: '{ "num_hidden_layers": 80, … }',
    });
    this._error = element("p", { class: "error", id: "calculator-config-error", role: "alert" });
    const file = element("input", {
      type: "file",
      accept: ".json,application/json",
      "aria-label": "A config.json from this computer",
      onchange: () => this._read(file.files[0]),
    });
    const use = element("button", { type: "button", onclick: () => this._use(this._text.value) }, "Use it");
    return element(
      "details",
      { class: "config" },
      element("summary", {}, "Another model: its config.json"),
      field("Paste it here, or drop the file anywhere on this card", this._text),
      element("div", { class: "config-actions" }, use, file),
      this._error,
    );
  }

  _takeDrops() {
    this.root.addEventListener("dragover", (event) => {
      event.preventDefault();
      this.root.classList.add("is-target");
    });
    this.root.addEventListener("dragleave", () => this.root.classList.remove("is-target"));
    this.root.addEventListener("drop", (event) => {
      event.preventDefault();
      this.root.classList.remove("is-target");
      this._read(event.dataTransfer.files[0]);
    });
  }

  async _read(file) {
    if (!file) return;
    if (file.size > MOST_CONFIG_BYTES) this._fail(`${file.name} has ${bytes(file.size)}; a config.json is far smaller.`);
    else this._use(await file.text());
  }

  _use(text) {
    try {
      const shape = parseConfig(text);
      this._error.textContent = "";
      this._shapes = [shape, ...this._shapes];
      this._listShapes();
      this._choose(shape);
      this._onchange();
    } catch (error) {
      this._fail(error.message);
    }
  }

  _fail(message) {
    this.root.querySelector(".config").open = true;
    this._error.textContent = message;
  }
}

function field(label, control) {
  return element("div", { class: "field" }, element("label", { for: control.id }, label), control);
}
