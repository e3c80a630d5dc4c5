// The kernels for one instruction set: compiled several times, with other flags and another JAXSERVE_ISA.
#include "attention.h"
#include "lora.h"
#include "matmul.h"
#include "norm.h"

namespace jaxserve {
namespace JAXSERVE_ISA {
namespace {

template <typename T>
void widen_from(const T* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  for (; i < count; i++) to[i] = scalar(from[i]);
}

// float32 values of `count` values of bfloat16 or float16.
void widen(Type type, const void* from, float* to, int64_t count) {
  if (type == Type::kBFloat16) return widen_from(static_cast<const BFloat16*>(from), to, count);
  widen_from(static_cast<const Float16*>(from), to, count);
}

}  // namespace

#define JAXSERVE_STRING_(x) #x
#define JAXSERVE_STRING(x) JAXSERVE_STRING_(x)

extern const Kernels table;
const Kernels table = {JAXSERVE_STRING(JAXSERVE_ISA), kTileRows, matmul, round_rows, attention, normalise, adapt, widen};

}  // namespace JAXSERVE_ISA
}  // namespace jaxserve
