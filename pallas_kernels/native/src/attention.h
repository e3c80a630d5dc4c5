// Paged attention: flash attention (Dao et al. 2022, arXiv:2205.14135) over chunks of a row's cached tokens, read in place
// through its block table.
//
// Two ways, chosen by a row's own number of query tokens. Few (decodes, verifies): every cached token is read once and meets
// all queries at once; the work is memory's. Many (prompt chunks): chunks are repacked into panels, and scores and outputs are
// the products of `tile.h`. Chunks begin at fixed positions and slots past a row's end are never read, so a row's result does
// not depend on the rows beside it.
#pragma once

#include "matmul.h"

namespace jaxserve {
namespace JAXSERVE_ISA {

constexpr int kFewChunk = 32;   // cached tokens at a time, for few queries
constexpr int kManyChunk = 64;   // and for many
constexpr int kTogether = 4;     // cached tokens that meet a query at a time
constexpr float kMasked = -1e30f;

// Memory of one thread, kept between calls.
struct Scratch {
  char* data = nullptr;
  size_t size = 0;
  ~Scratch() { __builtin_free(data); }

  float* take(size_t floats) {
    if (floats * sizeof(float) > size) {
      __builtin_free(data);
      size = floats * sizeof(float);
      data = static_cast<char*>(__builtin_malloc(size + 64));
      if (data == nullptr) __builtin_trap();
    }
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(data) + 63) & ~static_cast<uintptr_t>(63));
  }
};

// An item with what all its chunks share.
struct Queries {
  const AttentionArgs& a;
  int64_t group;           // query heads per KV head
  int64_t rows_of_head;    // queries * group, ordered by query
  int64_t rows;            // of all heads of the item
  int64_t first_position;  // of the first query
  int64_t begin, end;      // cached tokens that any query sees
  const int32_t* table;
  int64_t head;            // first KV head
  int64_t token;           // first query token
  int64_t row_position;    // slot of the row's first query token
  const uint32_t* tree;    // of the first query: bits of the row's query tokens that it sees; null where it sees all before it
  bool few;                // whether the whole row has few queries

  Queries(const AttentionArgs& args, const AttentionItem& item) : a(args) {
    group = a.heads / a.kv_heads;
    rows_of_head = item.count * group;
    rows = rows_of_head * item.kv_heads;
    int64_t queries = a.query_start[item.row + 1] - a.query_start[item.row];
    row_position = a.kv_lens[item.row] - queries;
    first_position = row_position + item.first;
    end = first_position + item.count;
    tree = item.row < a.num_trees ? a.tree + (item.row * a.tree_queries + item.first) * a.tree_words : nullptr;
    int64_t oldest = (tree ? row_position : first_position) + 1 - a.window;
    begin = a.window > 0 && oldest > 0 ? oldest : 0;
    few = queries <= kFewQueries;
    table = a.block_tables + item.row * a.max_blocks;
    head = item.kv_head;
    token = a.query_start[item.row] + item.first;
  }

  // Index of query row `r` in q and out, in elements.
  int64_t at(int64_t r) const {
    int64_t query = r % rows_of_head / group, kv_head = head + r / rows_of_head;
    return ((token + query) * a.heads + kv_head * group + r % group) * a.dim;
  }

  // Index of a cached token of the first head in the pools, in elements; those of the item's heads lie together.
  int64_t slot(int64_t position) const {
    int64_t block = table[position / a.block_size];
    return ((block * a.block_size + position % a.block_size) * a.kv_heads + head) * a.dim;
  }

  // The same of `count` tokens from `first` on; those past the last one are the last one.
  void slots(int64_t first, int64_t count, int64_t* out) const {
    int64_t block = first / a.block_size, within = first % a.block_size;
    const int64_t step = a.kv_heads * a.dim;
    for (int64_t j = 0; j < count; j++) {
      out[j] = first + j < end ? (table[block] * a.block_size + within) * step + head * a.dim : out[j - 1];
      if (++within == a.block_size) {
        within = 0;
        block++;
      }
    }
  }

  // Tokens [low, high) of the chunk at `start` that query row `r` sees, counted within the chunk; in a tree, not all of them.
  void range(int64_t r, int64_t start, int64_t chunk, int64_t* low, int64_t* high) const {
    int64_t query = r % rows_of_head / group, position = first_position + query;
    *high = least(position + 1 - start, chunk);
    *low = 0;
    if (a.window == 0) return;
    int64_t oldest = position + 1 - a.window;
    if (tree != nullptr) {  // a query's position in its sequence counts what it sees; of the tree, a window hides nothing
      int64_t depth = -1;
      for (int64_t word = 0; word < a.tree_words; word++) depth += __builtin_popcount(tree[query * a.tree_words + word]);
      oldest = least(row_position + depth + 1 - a.window, row_position);
    }
    if (oldest > start) *low = least(oldest - start, chunk);
  }

  // Mask the scores of tokens [low, high) of the chunk at `start` that another branch of the tree holds.
  void prune(int64_t r, int64_t start, int64_t low, int64_t high, float* scores) const {
    if (tree == nullptr) return;
    const uint32_t* bits = tree + r % rows_of_head / group * a.tree_words;
    for (int64_t i = low > row_position - start ? low : row_position - start; i < high; i++) {
      int64_t other = start + i - row_position;
      if ((bits[other / 32] >> (other % 32) & 1) == 0) scores[i] = kMasked;
    }
  }
};

// Running softmax of one query row.
struct Softmax {
  float top = kMasked;
  float total = 0;

  // Turn scores of the chunk at `start`, of which query row `r` sees [low, high), into weights, and give the factor of what
  // was summed before.
  float step(const Queries& s, int64_t r, int64_t start, int64_t low, int64_t high, int64_t chunk, float* scores) {
    const float soft_cap = s.a.soft_cap;
    if (soft_cap > 0)
      for (int64_t i = 0; i < chunk; i += kLanes) store(scores + i, soft_cap * hyperbolic_tangent(load(scores + i) / soft_cap));
    for (int64_t i = 0; i < low; i++) scores[i] = kMasked;
    for (int64_t i = high; i < chunk; i++) scores[i] = kMasked;
    s.prune(r, start, low, high, scores);
    Vec tops = splat(top);
    for (int64_t i = 0; i < chunk; i += kLanes) tops = larger(load(scores + i), tops);
    float new_top = largest(tops);
    if (new_top == kMasked) {  // nothing seen yet
      memset(scores, 0, static_cast<size_t>(chunk) * sizeof(float));
      return 1;
    }
    Vec sums{};
    for (int64_t i = 0; i < chunk; i += kLanes) {
      Vec weights = exponential(load(scores + i) - new_top);
      store(scores + i, weights);
      sums += weights;
    }
    float keep = exponential(splat(top - new_top))[0];
    total = total * keep + sum(sums);
    top = new_top;
    return keep;
  }
};

template <typename Q>
void load_queries(const Queries& s, float* out) {
  for (int64_t r = 0; r < s.rows; r++) {
    const Q* from = static_cast<const Q*>(s.a.q) + s.at(r);
    for (int64_t d = 0; d < s.a.dim; d += kLanes) store(out + r * s.a.dim + d, load(from + d) * s.a.scale);
  }
}

template <typename Q>
void store_outputs(const Queries& s, const Softmax* softmax, const float* sums) {
  for (int64_t r = 0; r < s.rows; r++) {
    Q* to = static_cast<Q*>(s.a.out) + s.at(r);
    float factor = 1.0f / softmax[r].total;
    for (int64_t d = 0; d < s.a.dim; d++) store_scalar(to + d, sums[r * s.a.dim + d] * factor);
  }
}

// ---- few queries
// Scores of one query with kTogether keys: its vectors are loaded once, and the sums are in flight together.
template <typename KV>
inline void dots(const float* q, const KV* const* k, int64_t offset, int64_t dim, float* out) {
  Vec even[kTogether] = {}, odd[kTogether] = {};
  int64_t d = 0;
  for (; d + 2 * kLanes <= dim; d += 2 * kLanes)
    for (int j = 0; j < kTogether; j++) {
      even[j] += load(q + d) * load(k[j] + offset + d);
      odd[j] += load(q + d + kLanes) * load(k[j] + offset + d + kLanes);
    }
  for (int j = 0; d < dim && j < kTogether; j++) even[j] += load(q + d) * load(k[j] + offset + d);
  for (int j = 0; j < kTogether; j++) out[j] = sum(even[j] + odd[j]);
}

// sums [kVecs * lanes] = sums * keep + weights [count] times rows of v.
template <int kVecs, typename KV>
inline void weigh(const float* weights, const KV* const* v, int64_t offset, int64_t count, float keep, float* sums) {
  Vec acc[kVecs];
  for (int i = 0; i < kVecs; i++) acc[i] = load(sums + i * kLanes) * keep;
  for (int64_t j = 0; j < count; j++)
    for (int i = 0; i < kVecs; i++) acc[i] += load(v[j] + offset + i * kLanes) * weights[j];
  for (int i = 0; i < kVecs; i++) store(sums + i * kLanes, acc[i]);
}

template <typename KV>
inline void fetch(const KV* p, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 64 / static_cast<int64_t>(sizeof(KV))) __builtin_prefetch(p + d);
}

template <typename KV>
void attend_few(const Queries& s, const float* q, Softmax* softmax, float* sums) {
  const int64_t dim = s.a.dim, heads = s.rows / s.rows_of_head;
  int64_t slots[2 * kFewChunk];
  const KV* keys[2 * kFewChunk];  // of this chunk and of the next one
  const KV* values[2 * kFewChunk];
  alignas(64) float scores[kFewChunk];
  for (int64_t start = s.begin / kFewChunk * kFewChunk; start < s.end; start += kFewChunk) {
    int64_t skipped = s.begin > start ? s.begin - start : 0;
    int64_t count = least(kFewChunk, s.end - start);
    s.slots(start + skipped, 2 * kFewChunk - skipped, slots + skipped);
    for (int64_t j = 0; j < 2 * kFewChunk; j++) {
      int64_t slot = slots[j < skipped ? skipped : j];
      keys[j] = static_cast<const KV*>(s.a.k) + slot;
      values[j] = static_cast<const KV*>(s.a.v) + slot;
    }
    for (int64_t r = 0; r < s.rows; r++) {
      int64_t low, high;
      s.range(r, start, count, &low, &high);
      if (low >= high) continue;
      const int64_t head = r / s.rows_of_head * dim;
      memset(scores, 0, sizeof scores);
      for (int64_t j = low / kTogether * kTogether; j < high; j += kTogether) {
        // Memory is never idle: all queries take turns in fetching the next chunk.
        for (int64_t i = j + kFewChunk; j / kTogether % s.rows == r && i < j + kFewChunk + kTogether; i++) {
          fetch(keys[i], heads * dim);
          fetch(values[i], heads * dim);
        }
        dots(q + r * dim, keys + j, head, dim, scores + j);
      }
      float keep = softmax[r].step(s, r, start, low, high, kFewChunk, scores);
      float* out = sums + r * dim;
      int64_t d = 0;
      for (; d + 8 * kLanes <= dim; d += 8 * kLanes) weigh<8>(scores + low, values + low, head + d, high - low, keep, out + d);
      for (; d < dim; d += kLanes) weigh<1>(scores + low, values + low, head + d, high - low, keep, out + d);
    }
  }
}

// ---- many queries
// Keys of a chunk as panels [chunk / 16, dim, 16], values as panels [dim / 16, chunk, 16]; zeros where no query sees a token.
template <typename KV>
void pack_chunk(const Queries& s, int64_t start, float* keys, float* values) {
  const int64_t dim = s.a.dim;
  for (int64_t j = 0; j < kManyChunk; j++) {
    bool seen = start + j >= s.begin && start + j < s.end;
    int64_t slot = seen ? s.slot(start + j) : 0;
    const KV* k = static_cast<const KV*>(s.a.k) + slot;
    const KV* v = static_cast<const KV*>(s.a.v) + slot;
    float* key = keys + j / kPanel * dim * kPanel + j % kPanel;
    for (int64_t d = 0; d < dim; d++) key[d * kPanel] = seen ? scalar(k[d]) : 0.0f;
    for (int64_t d = 0; d < dim; d += kLanes) {
      float* value = values + (d / kPanel * kManyChunk + j) * kPanel + d % kPanel;
      store(value, seen ? load(v + d) : Vec{});
    }
  }
}

// out [rows, columns] (+)= x [rows, depth] times panels [columns / 16, depth, 16].
inline void multiply_all(const float* x, int64_t rows, int64_t depth, const float* panels, int64_t columns, float* out, bool add) {
  int now;
  for (int64_t row = 0; row < rows; row += now) {
    now = next_rows(rows - row);
    for (int64_t c = 0; c < columns; c += kPanel) {
      Tile tile = {x + row * depth, depth, panels + c * depth, 0, depth, out + row * columns + c, columns, add,
                   nullptr, 0};
      multiply_tile(tile, now, 1);
    }
  }
}

template <typename KV>
void attend_many(const Queries& s, const float* q, Softmax* softmax, float* sums, float* scratch) {
  const int64_t dim = s.a.dim;
  float* keys = scratch;
  float* values = keys + kManyChunk * dim;
  float* scores = values + kManyChunk * dim;
  for (int64_t start = s.begin / kManyChunk * kManyChunk; start < s.end; start += kManyChunk) {
    pack_chunk<KV>(s, start, keys, values);
    // Queries before the chunk see nothing of it.
    int64_t first = start > s.first_position ? (start - s.first_position) * s.group : 0;
    int64_t rows = s.rows - first;
    multiply_all(q + first * dim, rows, dim, keys, kManyChunk, scores, false);
    for (int64_t r = 0; r < rows; r++) {
      int64_t low, high;
      s.range(first + r, start, kManyChunk, &low, &high);
      float keep = softmax[first + r].step(s, first + r, start, low, high, kManyChunk, scores + r * kManyChunk);
      if (keep == 1) continue;
      float* out = sums + (first + r) * dim;
      for (int64_t d = 0; d < dim; d += kLanes) store(out + d, load(out + d) * keep);
    }
    multiply_all(scores, rows, kManyChunk, values, dim, sums + first * dim, true);
  }
}

template <typename Q, typename KV>
void attend(const Queries& s) {
  static thread_local Scratch memory;
  const int64_t dim = s.a.dim;
  size_t size = static_cast<size_t>(s.rows * (2 * dim + kManyChunk) + 2 * kManyChunk * dim);
  float* q = memory.take(size + static_cast<size_t>(s.rows) * 2);
  float* sums = q + s.rows * dim;
  float* scratch = sums + s.rows * dim;
  Softmax* softmax = reinterpret_cast<Softmax*>(q + size);
  for (int64_t r = 0; r < s.rows; r++) softmax[r] = Softmax();
  memset(sums, 0, static_cast<size_t>(s.rows * dim) * sizeof(float));
  load_queries<Q>(s, q);
  if (s.few) {
    attend_few<KV>(s, q, softmax, sums);
  } else {
    attend_many<KV>(s, q, softmax, sums, scratch);
  }
  store_outputs<Q>(s, softmax, sums);
}

template <typename Q>
void attend_kv(const Queries& s) {
  switch (s.a.kv_type) {
    case Type::kFloat32: return attend<Q, float>(s);
    case Type::kBFloat16: return attend<Q, BFloat16>(s);
    default: return attend<Q, Float16>(s);
  }
}

void attention(const AttentionArgs& a, const AttentionItem& item) {
  Queries queries(a, item);
  switch (a.type) {
    case Type::kFloat32: return attend_kv<float>(queries);
    case Type::kBFloat16: return attend_kv<BFloat16>(queries);
    default: return attend_kv<Float16>(queries);
  }
}

}  // namespace JAXSERVE_ISA
}  // namespace jaxserve
