// What the kernels are called with, whatever they are compiled for. Arrays are dense and row-major.
//
// A kernel's work is cut into items that any thread may do, in any order; `parallel.h` shares them out.
#pragma once

#include <stdint.h>

namespace jaxserve {

enum class Type { kFloat32, kBFloat16, kFloat16, kInt8, kInt4 };

// Bytes of `count` values.
inline int64_t bytes_of(Type type, int64_t count) {
  return type == Type::kFloat32 ? 4 * count : type == Type::kInt8 ? count : type == Type::kInt4 ? count / 2 : 2 * count;
}

constexpr int kPanel = 16;  // output columns of a panel
constexpr int kGroup = 32;  // inputs that share a scale

// Rows rounded to 8 bits, in groups of inputs: value = scale * integer.
struct Rounded {
  int16_t* shorts;  // [rows, depth] for int8 weights, else null
  int8_t* bytes;    // [rows, depth] for int4 weights, else null
  float* scale;     // [rows, depth / 32]; null: rows are not rounded
  float* sum;       // [rows, depth / 32]: of a group's values
};

// out [rows, size_out] = x [rows, depth] times a weight in panels (see packed_matmul/format.py).
struct MatmulArgs {
  const float* x;
  Rounded rounded;         // the same, if they meet quantised weights in integers
  const void* data;        // [panels, depth, 16] of `type`; int8 in pairs, int4 in words of eight inputs
  Type type;
  const uint16_t* scale;   // [panels, depth / 32, 16] float16, or null
  const uint16_t* offset;  // the same, or null
  float* out;
  int64_t rows, depth, panels, size_out;
  int64_t item_rows, item_panels;  // size of an item
};

// Query tokens [first, first + count) of a row, for the query heads of KV heads [kv_head, kv_head + kv_heads).
struct AttentionItem {
  int32_t row, kv_head, kv_heads, first, count;
};

struct AttentionArgs {
  const void* q;            // [tokens, heads, dim] of `type`
  void* out;                // like q
  Type type;
  const void* k;            // [blocks, block_size, kv_heads, dim] of `kv_type`
  const void* v;
  Type kv_type;
  const int32_t* query_start;   // [rows + 1]
  const int32_t* kv_lens;       // [rows]
  const int32_t* block_tables;  // [rows, max_blocks]
  const uint32_t* tree;         // [rows, tree_queries, tree_words], or null: which of its row's query tokens each one sees
  int64_t num_trees;            // that many rows, from the first, have one
  int64_t tree_queries, tree_words;
  int64_t heads, kv_heads, dim, block_size, max_blocks;
  float scale;
  int64_t window;   // 0: none
  float soft_cap;   // 0: none
};

// out [rows, dim] of `type` = x / root mean square * weight [dim].
struct NormArgs {
  const void* x;
  void* out;
  Type type;
  const void* weight;
  Type weight_type;
  int64_t rows, dim;
  float eps;
  int64_t item_rows;
};

constexpr int kMostRank = 512;

// out [tokens, size_out] = what each token's adapter adds to a product whose columns fall into parts (see lora_matmul/weights.py).
struct LoraArgs {
  const float* x;        // [tokens, size_in]
  const void* a;         // [slots, layers, parts * max_rank, size_in] of `type`
  const void* b;         // [slots, layers, max_rank, size_out]
  Type type;
  const int32_t* ranks;  // [slots, layers, parts]
  const int64_t* columns;  // [parts]
  float* out;
  int64_t size_in, size_out, layers, layer, parts, max_rank;
};

// Tokens of one slot, for one part; slot 0 is none.
struct LoraItem {
  const int32_t* tokens;
  int32_t count, slot, part;
};

constexpr int kFewQueries = 8;   // most query tokens of an item that is worked on token by token
constexpr int kQueryTile = 64;   // most query tokens of any item

struct Kernels {
  const char* name;
  int rows_step;  // rows of a full tile
  void (*matmul)(const MatmulArgs& args, int64_t item);
  void (*round)(const float* x, int64_t rows, int64_t depth, const Rounded& out);
  void (*attention)(const AttentionArgs& args, const AttentionItem& item);
  void (*normalise)(const NormArgs& args, int64_t item);
  void (*adapt)(const LoraArgs& args, const LoraItem& item);
  void (*widen)(Type type, const void* from, float* to, int64_t count);
};

// The kernels in use. `use_kernels` takes a name ("avx512", "avx2", "neon", "generic"), or "auto" for the best that this CPU
// runs, and says whether it can.
const Kernels& kernels();
bool use_kernels(const char* name);

}  // namespace jaxserve
