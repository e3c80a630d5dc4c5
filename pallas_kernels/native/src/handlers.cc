// XLA's doors to the kernels: check what came, cut it into items, share them out.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;

ffi::Error invalid(const std::string& message) { return ffi::Error::InvalidArgument(message); }

bool float_type(ffi::DataType type, Type* out) {
  switch (type) {
    case ffi::DataType::F32: *out = Type::kFloat32; return true;
    case ffi::DataType::BF16: *out = Type::kBFloat16; return true;
    case ffi::DataType::F16: *out = Type::kFloat16; return true;
    default: return false;
  }
}

bool weight_type(ffi::DataType type, Type* out) {
  if (type == ffi::DataType::S8) *out = Type::kInt8;
  if (type == ffi::DataType::U32) *out = Type::kInt4;
  return type == ffi::DataType::S8 || type == ffi::DataType::U32 || float_type(type, out);
}

const uint16_t* halves(ffi::Buffer<ffi::DataType::F16>& buffer) {
  return buffer.element_count() == 0 ? nullptr : reinterpret_cast<const uint16_t*>(buffer.untyped_data());
}

// Memory that a thread keeps for its next call: a fresh large vector is paid for page by page.
enum class Use { kWide, kIntegers, kScales, kOrder };

template <typename T, Use kUse>
T* scratch(int64_t count) {
  thread_local std::vector<T> kept;
  if (static_cast<int64_t>(kept.size()) < count) kept.resize(count);
  return kept.data();
}

// x rounded to 8 bits for products with int8 or int4.
Rounded round_rows(const MatmulArgs& args) {
  int64_t count = args.rows * args.depth, groups = count / kGroup;
  float* scales = scratch<float, Use::kScales>(2 * groups);
  Rounded rounded = {nullptr, nullptr, scales, scales + groups};
  if (args.type == Type::kInt8) {
    rounded.shorts = scratch<int16_t, Use::kIntegers>(count);
  } else {
    rounded.bytes = scratch<int8_t, Use::kIntegers>(count);
  }
  kernels().round(args.x, args.rows, args.depth, rounded);
  return rounded;
}

// x [T, I], data in panels (see packed_matmul/format.py), scale and offset [P, I / 32, 16] or [0] -> [T, O]
ffi::Error Matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer data, ffi::Buffer<ffi::DataType::F16> scale,
                  ffi::Buffer<ffi::DataType::F16> offset, ffi::Result<ffi::Buffer<ffi::DataType::F32>> out,
                  int64_t activation_bits) {
  MatmulArgs args{};
  Type x_type;
  if (!float_type(x.element_type(), &x_type)) return invalid("matmul: x is not of a float type");
  if (!weight_type(data.element_type(), &args.type)) return invalid("matmul: weights are of no type that is served");
  args.rows = x.dimensions()[0];
  args.depth = x.dimensions()[1];
  args.panels = data.dimensions()[0];
  args.size_out = out->dimensions()[1];
  args.data = data.untyped_data();
  args.scale = halves(scale);
  args.offset = halves(offset);
  args.out = out->typed_data();
  bool quantised = args.type == Type::kInt8 || args.type == Type::kInt4;
  if (static_cast<int64_t>(data.size_bytes()) != bytes_of(args.type, args.panels * args.depth * kPanel) ||
      args.panels != (args.size_out + kPanel - 1) / kPanel)
    return invalid("matmul: shapes do not fit");
  if (quantised && (args.depth % kGroup != 0 || args.scale == nullptr || (args.type == Type::kInt4 && args.offset == nullptr)))
    return invalid("matmul: scales do not fit");

  args.x = static_cast<const float*>(x.untyped_data());
  if (x_type != Type::kFloat32) {
    float* wide = scratch<float, Use::kWide>(args.rows * args.depth);
    kernels().widen(x_type, x.untyped_data(), wide, args.rows * args.depth);
    args.x = wide;
  }
  if (quantised && activation_bits == 8) args.rounded = round_rows(args);
  // Rows of an item fit into the second-level cache; there are some items per thread, so that none waits long for the last.
  args.item_rows = std::min<int64_t>(args.rows, 16 * kernels().rows_step);
  int64_t threads = std::max<int64_t>(1, pool.num_threads());
  args.item_panels = std::clamp<int64_t>(args.panels / (threads * 16) * 2, 2, 8);  // even: panels go in pairs
  int64_t row_items = (args.rows + args.item_rows - 1) / args.item_rows;
  int64_t panel_items = (args.panels + args.item_panels - 1) / args.item_panels;
  parallel_for(pool, row_items * panel_items, [&](int64_t item) { kernels().matmul(args, item); });
  return ffi::Error::Success();
}

// x [..., E] normalised, times weight [E] -> like x
ffi::Error RmsNorm(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::Result<ffi::AnyBuffer> out, float eps) {
  NormArgs args{};
  if (!float_type(x.element_type(), &args.type) || !float_type(weight.element_type(), &args.weight_type))
    return invalid("rms_norm: x or weight is not of a float type");
  args.x = x.untyped_data();
  args.out = out->untyped_data();
  args.weight = weight.untyped_data();
  args.dim = weight.dimensions()[0];
  if (x.dimensions().back() != args.dim) return invalid("rms_norm: shapes do not fit");
  args.rows = static_cast<int64_t>(x.element_count()) / args.dim;
  args.eps = eps;
  args.item_rows = std::max<int64_t>(1, 32768 / args.dim);  // less is done before another thread is there
  int64_t items = (args.rows + args.item_rows - 1) / args.item_rows;
  parallel_for(pool, items, [&](int64_t item) { kernels().normalise(args, item); });
  return ffi::Error::Success();
}

// k, v [T, K, D] into pools [N, S, K, D] at slots [T]; a slot out of range is dropped.
ffi::Error WriteKV(ffi::AnyBuffer k_cache, ffi::AnyBuffer v_cache, ffi::AnyBuffer k, ffi::AnyBuffer v,
                   ffi::Buffer<ffi::DataType::S32> slots, ffi::Result<ffi::AnyBuffer> k_out, ffi::Result<ffi::AnyBuffer> v_out) {
  if (k_out->untyped_data() != k_cache.untyped_data() || v_out->untyped_data() != v_cache.untyped_data())
    return ffi::Error::Internal("kv_write: the pools are not updated in place");
  if (k.element_type() != k_cache.element_type() || v.element_type() != v_cache.element_type())
    return invalid("kv_write: new keys and values are of another type than the pools");
  int64_t bytes = static_cast<int64_t>(k.size_bytes()) / std::max<int64_t>(1, k.dimensions()[0]);
  int64_t num_slots = k_cache.dimensions()[0] * k_cache.dimensions()[1];
  const int32_t* slot = slots.typed_data();
  for (int64_t t = 0; t < slots.dimensions()[0]; t++) {
    if (slot[t] < 0 || slot[t] >= num_slots) continue;
    memcpy(static_cast<char*>(k_out->untyped_data()) + slot[t] * bytes, static_cast<char*>(k.untyped_data()) + t * bytes, bytes);
    memcpy(static_cast<char*>(v_out->untyped_data()) + slot[t] * bytes, static_cast<char*>(v.untyped_data()) + t * bytes, bytes);
  }
  return ffi::Error::Success();
}

constexpr int64_t kRun = 2048;  // bytes of a token that an item with few queries reads, where it has the choice

// Query tiles of all rows and KV heads. Prompt chunks come last in a step and take longest, so they are handed out first.
//
// A row with few queries takes `heads` KV heads at a time: those of a token lie together, and memory is quickest in long runs.
std::vector<AttentionItem> attention_items(const AttentionArgs& args, int64_t rows, int32_t tile, int32_t heads) {
  std::vector<AttentionItem> items;
  for (int32_t row = static_cast<int32_t>(rows) - 1; row >= 0; row--) {
    int32_t queries = args.query_start[row + 1] - args.query_start[row];
    int32_t step = queries <= kFewQueries ? heads : 1;
    for (int32_t first = (queries - 1) / tile * tile; queries > 0 && first >= 0; first -= tile)
      for (int32_t head = 0; head < args.kv_heads; head += step)
        items.push_back({row, head, std::min(step, static_cast<int32_t>(args.kv_heads) - head), first, std::min(queries - first, tile)});
  }
  return items;
}

// q [T, H, D] over pools [N, S, K, D], with query_start [R + 1], kv_lens [R] and block_tables [R, B] -> like q. Trees come with
// two arrays more: tree [R, Q, words], and how many rows have one [].
ffi::Error PagedAttention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k_cache, ffi::AnyBuffer v_cache,
                          ffi::Buffer<ffi::DataType::S32> query_start, ffi::Buffer<ffi::DataType::S32> kv_lens,
                          ffi::Buffer<ffi::DataType::S32> block_tables, ffi::RemainingArgs trees,
                          ffi::Result<ffi::AnyBuffer> out, float scale, int64_t window, float soft_cap) {
  AttentionArgs args{};
  if (!float_type(q.element_type(), &args.type)) return invalid("paged_attention: q is not of a float type");
  if (!float_type(k_cache.element_type(), &args.kv_type)) return invalid("paged_attention: the pools are not of a float type");
  args.q = q.untyped_data();
  args.out = out->untyped_data();
  args.k = k_cache.untyped_data();
  args.v = v_cache.untyped_data();
  args.query_start = query_start.typed_data();
  args.kv_lens = kv_lens.typed_data();
  args.block_tables = block_tables.typed_data();
  args.heads = q.dimensions()[1];
  args.dim = q.dimensions()[2];
  args.block_size = k_cache.dimensions()[1];
  args.kv_heads = k_cache.dimensions()[2];
  args.max_blocks = block_tables.dimensions()[1];
  args.scale = scale;
  args.window = window;
  args.soft_cap = soft_cap;
  int64_t rows = kv_lens.dimensions()[0];
  if (args.dim % kPanel != 0 || args.heads % args.kv_heads != 0 || k_cache.dimensions()[3] != args.dim)
    return invalid("paged_attention: shapes do not fit");
  if (trees.size() == 2) {
    auto tree = trees.get<ffi::Buffer<ffi::DataType::U32, 3>>(0);
    auto num_trees = trees.get<ffi::BufferR0<ffi::DataType::S32>>(1);
    if (!tree.has_value() || !num_trees.has_value()) return invalid("paged_attention: trees are of another type or shape");
    args.tree = tree->typed_data();
    args.num_trees = *num_trees->typed_data();
    args.tree_queries = tree->dimensions()[1];
    args.tree_words = tree->dimensions()[2];
  }

  // Tokens that no row owns give zeros; rows own the tokens before them.
  int64_t token_bytes = static_cast<int64_t>(q.size_bytes()) / q.dimensions()[0];
  int64_t owned = args.query_start[rows];
  memset(static_cast<char*>(args.out) + owned * token_bytes, 0, (q.dimensions()[0] - owned) * token_bytes);
  // Large tiles repack less; a few rows with few heads are cut smaller, for all threads to have work.
  int32_t tile = kQueryTile, heads = static_cast<int32_t>(std::max<int64_t>(1, kRun / (token_bytes / args.heads)));
  std::vector<AttentionItem> items = attention_items(args, rows, tile, heads);
  while (static_cast<int64_t>(items.size()) < 4 * pool.num_threads() && (heads > 1 || tile > 2 * kFewQueries)) {
    if (heads == 1) tile /= 2;
    heads = 1;
    items = attention_items(args, rows, tile, heads);
  }
  parallel_for(pool, static_cast<int64_t>(items.size()), [&](int64_t i) { kernels().attention(args, items[i]); });
  return ffi::Error::Success();
}

// Tokens of each slot in turns of up to eight, for every part of the product.
std::vector<LoraItem> lora_items(const int32_t* slots, int64_t tokens, int64_t num_slots, int64_t parts, int32_t* order) {
  std::vector<int32_t> ends(num_slots + 1, 0);
  for (int64_t t = 0; t < tokens; t++) ends[slots[t]]++;
  for (int64_t s = 1; s <= num_slots; s++) ends[s] += ends[s - 1];
  for (int64_t t = tokens - 1; t >= 0; t--) order[--ends[slots[t]]] = static_cast<int32_t>(t);  // now where each begins
  std::vector<LoraItem> items;
  for (int32_t slot = static_cast<int32_t>(num_slots); slot >= 0; slot--) {
    int32_t end = slot == num_slots ? static_cast<int32_t>(tokens) : ends[slot + 1];
    for (int32_t part = 0; part < parts; part++)
      for (int32_t first = ends[slot]; first < end; first += 8)
        items.push_back({order + first, std::min(8, end - first), slot, part});
  }
  return items;
}

// About how long the items take one thread, in nanoseconds: 16 products or 10 bytes in each.
int64_t lora_cost(const LoraArgs& args, const std::vector<LoraItem>& items) {
  int64_t products = 0, bytes = 0;
  for (const LoraItem& item : items) {
    int64_t columns = args.columns[item.part];
    int64_t rank = item.slot == 0 ? 0 : args.ranks[((item.slot - 1) * args.layers + args.layer) * args.parts + item.part];
    products += item.count * rank * (args.size_in + columns);
    bytes += bytes_of(args.type, rank * (args.size_in + columns)) + item.count * columns * 4;
  }
  return products / 16 + bytes / 10;
}

// x [T, I], a [n, L, P * R, I], b [n, L, R, O], ranks [n, L, P], slots [T] and which of the L layers [] -> [T, O]
ffi::Error Lora(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer a, ffi::AnyBuffer b,
                ffi::Buffer<ffi::DataType::S32> ranks, ffi::Buffer<ffi::DataType::S32> slots,
                ffi::BufferR0<ffi::DataType::S32> layer, ffi::Result<ffi::Buffer<ffi::DataType::F32>> out,
                ffi::Span<const int64_t> parts) {
  LoraArgs args{};
  Type x_type;
  if (!float_type(x.element_type(), &x_type) || !float_type(a.element_type(), &args.type) || a.element_type() != b.element_type())
    return invalid("lora: x, a or b is of no type that is served");
  int64_t tokens = x.dimensions()[0], num_slots = a.dimensions()[0];
  args.size_in = x.dimensions()[1];
  args.size_out = out->dimensions()[1];
  args.layers = a.dimensions()[1];
  args.max_rank = b.dimensions()[2];
  args.parts = static_cast<int64_t>(parts.size());
  args.columns = parts.begin();
  args.layer = *layer.typed_data();
  args.a = a.untyped_data();
  args.b = b.untyped_data();
  args.ranks = ranks.typed_data();
  args.out = out->typed_data();
  if (a.dimensions()[2] != args.parts * args.max_rank || a.dimensions()[3] != args.size_in || args.max_rank > kMostRank ||
      args.layer < 0 || args.layer >= args.layers)
    return invalid("lora: shapes do not fit, or the rank is too large");
  for (int64_t t = 0; t < tokens; t++)
    if (slots.typed_data()[t] < 0 || slots.typed_data()[t] > num_slots) return invalid("lora: there is no such slot");
  args.x = static_cast<const float*>(x.untyped_data());
  if (x_type != Type::kFloat32) {
    float* wide = scratch<float, Use::kWide>(tokens * args.size_in);
    kernels().widen(x_type, x.untyped_data(), wide, tokens * args.size_in);
    args.x = wide;
  }
  int32_t* order = scratch<int32_t, Use::kOrder>(tokens);
  std::vector<LoraItem> items = lora_items(slots.typed_data(), tokens, num_slots, args.parts, order);
  // What takes so short is done before a thread that has left the core is back.
  if (lora_cost(args, items) < 30000) {
    for (const LoraItem& item : items) kernels().adapt(args, item);
  } else {
    parallel_for(pool, static_cast<int64_t>(items.size()), [&](int64_t i) { kernels().adapt(args, items[i]); });
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

using xla::ffi::AnyBuffer;
using xla::ffi::DataType;
using F16 = xla::ffi::Buffer<DataType::F16>;
using F32 = xla::ffi::Buffer<DataType::F32>;
using S32 = xla::ffi::Buffer<DataType::S32>;

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_matmul, jaxserve::Matmul,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>()
                                  .Arg<F16>()
                                  .Arg<F16>()
                                  .Ret<F32>()
                                  .Attr<int64_t>("activation_bits"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_rms_norm, jaxserve::RmsNorm,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>()
                                  .Ret<AnyBuffer>()
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_lora, jaxserve::Lora,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Arg<xla::ffi::BufferR0<DataType::S32>>()
                                  .Ret<F32>()
                                  .Attr<xla::ffi::Span<const int64_t>>("parts"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_kv_write, jaxserve::WriteKV,
                              xla::ffi::Ffi::Bind()
                                  .Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>()
                                  .Arg<S32>()
                                  .Ret<AnyBuffer>()
                                  .Ret<AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_paged_attention, jaxserve::PagedAttention,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .RemainingArgs()
                                  .Ret<AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("soft_cap"));

// Chooses the kernels; see `use_kernels`. Returns the name of those in use, or null if this CPU does not run them.
extern "C" const char* jaxserve_use_kernels(const char* name) {
  return jaxserve::use_kernels(name) ? jaxserve::kernels().name : nullptr;
}

#pragma GCC visibility pop
