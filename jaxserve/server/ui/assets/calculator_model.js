// What KV memory comes to: the arithmetic of the calculator, without a page. Lengths are tokens, sizes bytes.
//
// A contiguous server does not know how long a session will get, so it reserves the longest length for each. A paged one
// gives each session blocks as its context grows: ceil(context / block size) of them, and wastes less than one block.

export const GIB = 2 ** 30;

/** Shapes of well-known models, from each one's config.json. All are dense decoders with grouped queries or plain heads. */
export const SHAPES = [
  shape("SmolLM2 135M", [49152, 576, 1536], [9, 3, 64], 30, 8192, true),
  shape("Llama 3.2 1B", [128256, 2048, 8192], [32, 8, 64], 16, 131072, true),
  shape("Llama 3.1 8B", [128256, 4096, 14336], [32, 8, 128], 32, 131072, false),
  shape("Llama 3.1 70B", [128256, 8192, 28672], [64, 8, 128], 80, 131072, false),
  shape("Llama 2 7B", [32000, 4096, 11008], [32, 32, 128], 32, 4096, false),
  shape("Llama 2 13B", [32000, 5120, 13824], [40, 40, 128], 40, 4096, false),
  shape("Mistral 7B v0.3", [32768, 4096, 14336], [32, 8, 128], 32, 32768, false),
  shape("Qwen2.5 7B", [152064, 3584, 18944], [28, 4, 128], 28, 32768, false),
  shape("Qwen3 0.6B", [151936, 1024, 3072], [16, 8, 128], 28, 40960, true),
  shape("Qwen3 8B", [151936, 4096, 12288], [32, 8, 128], 36, 40960, false),
  shape("SmolLM3 3B", [128256, 2048, 11008], [16, 4, 128], 36, 65536, true),
];

/** Forms of the weights: bytes of a value in a matrix (with a 16 bit scale per 32), and in a table that is only looked up. */
export const WEIGHT_FORMS = [
  { id: "float32", label: "float32", matrix: 4, table: 4 },
  { id: "16bit", label: "16 bit", matrix: 2, table: 2 },
  { id: "int8", label: "int8 (8.5 bit)", matrix: 1 + 2 / 32, table: 2 },
  { id: "q4_0", label: "Q4_0 (4.5 bit)", matrix: 0.5 + 2 / 32, table: 2 },
];

/** Forms of the KV. 8 bit is there to see what it would give; this engine keeps KV in the dtype of its activations. */
export const KV_FORMS = [
  { id: "float32", label: "float32", bytes: 4 },
  { id: "16bit", label: "16 bit", bytes: 2 },
  { id: "8bit", label: "8 bit (what if)", bytes: 1 },
];

function shape(name, [vocabulary, hidden, ffn], [heads, kvHeads, headDim], layers, maxLength, tied) {
  return { name, vocabulary, hidden, ffn, heads, kvHeads, headDim, layers, maxLength, tied, notes: [] };
}

/** Keys and values of one token in all layers. */
export function bytesPerToken({ layers, kvHeads, headDim }, kvBytes) {
  return 2 * layers * kvHeads * headDim * kvBytes;
}

/** All weights; null where the shape does not tell. Norms and biases, a thousandth of them, are left out. */
export function weightBytes(model, form) {
  if (model.weightBytes !== undefined) return model.weightBytes;
  const { vocabulary, hidden, ffn, heads, kvHeads, headDim, layers, tied } = model;
  const layer = hidden * (heads + 2 * kvHeads) * headDim + heads * headDim * hidden + 3 * hidden * ffn;
  const table = vocabulary * hidden;
  return (layers * layer + table) * form.matrix + (tied ? 0 : table * form.table);
}

/** The shape that a config.json describes. Throws Error with one line that names the field. */
export function parseConfig(text) {
  let config;
  try {
    config = JSON.parse(text);
  } catch (error) {
    throw new Error(`This is not JSON: ${error.message}`);
  }
  if (!isObject(config)) throw new Error("A config.json is an object with fields, { … }.");
  // Models that see or hear keep their decoder's shape in a field of its own.
  const fields = isObject(config.text_config) && config.num_hidden_layers === undefined ? config.text_config : config;
  if (fields.kv_lora_rank) throw new Error("kv_lora_rank: this model compresses its KV; the formula does not hold for it.");
  const layers = whole(fields, "num_hidden_layers");
  const heads = whole(fields, "num_attention_heads");
  const kvHeads = whole(fields, "num_key_value_heads", heads);
  const hidden = whole(fields, "hidden_size");
  if (heads % kvHeads) {
    throw new Error(`num_key_value_heads: ${kvHeads} does not divide num_attention_heads ${heads}.`);
  }
  if (fields.head_dim == null && hidden % heads) {
    throw new Error(`head_dim is missing, and hidden_size ${hidden} is no multiple of num_attention_heads ${heads}.`);
  }
  const found = {
    name: nameOf(config),
    layers,
    heads,
    kvHeads,
    hidden,
    headDim: whole(fields, "head_dim", hidden / heads),
    maxLength: whole(fields, "max_position_embeddings", 8192),
    vocabulary: whole(fields, "vocab_size"),
    ffn: whole(fields, "intermediate_size", 4 * hidden),
    tied: fields.tie_word_embeddings === true,
    notes: [],
  };
  if (fields.max_position_embeddings == null) found.notes.push("max_position_embeddings is missing; 8,192 is assumed.");
  if (fields.num_experts ?? fields.num_local_experts ?? fields.n_routed_experts) {
    found.weightBytes = null;
    found.notes.push("A mixture of experts: its weights are not in this formula. Give their size.");
  } else if (fields.intermediate_size == null) {
    found.notes.push("intermediate_size is missing; four times hidden_size is assumed.");
  }
  if (fields.sliding_window && fields.use_sliding_window !== false) {
    found.notes.push("Some layers may look at a window only; their KV is counted for the whole context, as it is kept.");
  }
  return found;
}

function nameOf(config) {
  const name = config._name_or_path || config.architectures?.[0] || config.model_type;
  return typeof name === "string" ? name : "config.json";
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

const MOST = 2 ** 31;

function whole(fields, name, otherwise) {
  const value = fields[name] ?? otherwise;
  if (value === undefined) throw new Error(`${name} is missing.`);
  if (!Number.isInteger(value) || value < 1 || value > MOST) {
    throw new Error(`${name}: a whole number from 1 to ${MOST} is needed, not ${short(value)}.`);
  }
  return value;
}

function short(value) {
  const text = JSON.stringify(value);
  return text.length > 40 ? `${text.slice(0, 40)}…` : text;
}

/**
 * The context of session i: log-normal with the given mean and spread (standard deviation / mean), at most maxLength.
 *
 * Nothing is random: session i takes the quantile frac(1/2 + i · φ) of the distribution, φ the golden ratio's fraction.
 * So any number of sessions covers the distribution evenly, and a session keeps its place while sliders move.
 */
export function contextOf(i, { mean, spread, maxLength }) {
  const variance = Math.log1p(spread * spread);
  const quantile = (0.5 + i * GOLDEN) % 1;
  const drawn = Math.exp(Math.log(mean) - variance / 2 + Math.sqrt(variance) * normalQuantile(quantile));
  return Math.min(Math.max(Math.round(drawn), 1), maxLength);
}

const GOLDEN = (Math.sqrt(5) - 1) / 2;

/** P. J. Acklam's rational approximation of the normal distribution's quantile; its relative error is below 1.2e-9. */
export function normalQuantile(p) {
  if (p < LOW) return tail(Math.sqrt(-2 * Math.log(p)));
  if (p > 1 - LOW) return -tail(Math.sqrt(-2 * Math.log(1 - p)));
  const q = p - 0.5;
  const r = q * q;
  return (polynomial(A, r) * q) / (polynomial(B, r) * r + 1);
}

const LOW = 0.02425;
const A = [
  -3.969683028665376e1, 2.209460984245205e2, -2.759285104469687e2, 1.38357751867269e2, -3.066479806614716e1,
  2.506628277459239,
];
const B = [-5.447609879822406e1, 1.615858368580409e2, -1.556989798598866e2, 6.680131188771972e1, -1.328068155288572e1];
const C = [
  -7.784894002430293e-3, -3.223964580411365e-1, -2.400758277161838, -2.549732539343734, 4.374664141464968,
  2.938163982698783,
];
const D = [7.784695709041462e-3, 3.224671290700398e-1, 2.445134137142996, 3.754408661907416];

function tail(q) {
  return polynomial(C, q) / (polynomial(D, q) * q + 1);
}

function polynomial(coefficients, x) {
  return coefficients.reduce((sum, coefficient) => sum * x + coefficient, 0);
}

/** More sessions than this are not tried one by one: the rest is taken to be like them. */
const MOST_TRIED = 16384;

/** Tokens of the blocks that hold this many. */
export function inBlocks(tokens, blockSize) {
  return Math.ceil(tokens / blockSize) * blockSize;
}

/**
 * What both ways take for `sessions` sessions, and how many of them fit into the pool.
 *
 * given: tokenBytes (KV of a token), poolBytes (for KV), sessions, mean, spread, maxLength, blockSize.
 * Returns contexts (per session), tokens (their sum), poolBlocks, and for contiguous and paged: reserved (tokens that have a
 * place), bytes (of those), waste (share of them without a token), fits (sessions). Contiguous regions are whole blocks
 * of the same pool, as with --kv-reservation contiguous, and as `jaxserve plan` counts.
 */
export function compare(given) {
  const { tokenBytes, sessions, maxLength, blockSize } = given;
  const contexts = Array.from({ length: sessions }, (_, i) => contextOf(i, given));
  const tokens = contexts.reduce((sum, context) => sum + context, 0);
  const region = inBlocks(maxLength, blockSize);
  const all = poolBlocks(given);
  const side = (reserved, fits) => ({ reserved, bytes: reserved * tokenBytes, waste: 1 - tokens / reserved, fits });
  return {
    contexts,
    tokens,
    poolBlocks: all,
    contiguous: side(sessions * region, Math.floor((all * blockSize) / region)),
    paged: side(contexts.reduce((sum, context) => sum + inBlocks(context, blockSize), 0), pagedFits(given, all)),
  };
}

/** Blocks of the pool that sessions can have: one is kept for what padding writes. */
export function poolBlocks({ tokenBytes, poolBytes, blockSize }) {
  return Math.max(0, Math.floor(poolBytes / (blockSize * tokenBytes)) - 1);
}

function pagedFits(given, all) {
  let taken = 0;
  for (let i = 0; i < MOST_TRIED; i += 1) {
    taken += Math.ceil(contextOf(i, given) / given.blockSize);
    if (taken > all) return i;
  }
  return Math.floor((all / taken) * MOST_TRIED);
}
