// Which of the compiled kernels this CPU runs.
#include <string.h>

#include "kernels.h"

namespace jaxserve {

// Defined in isa.cc, once per instruction set.
#if defined(__x86_64__)
namespace avx512 { extern const Kernels table; }
namespace avx2 { extern const Kernels table; }
#elif defined(__aarch64__)
namespace neon { extern const Kernels table; }
#endif
namespace generic { extern const Kernels table; }

namespace {

struct Choice {
  const Kernels* kernels;
  bool (*runs_here)();
};

// The best first.
const Choice kChoices[] = {
#if defined(__x86_64__)
    {&avx512::table,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
              __builtin_cpu_supports("avx512dq");
     }},
    {&avx2::table,
     [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }},
#elif defined(__aarch64__)
    {&neon::table, [] { return true; }},
#endif
    {&generic::table, [] { return true; }},
};

const Kernels* g_kernels = nullptr;

}  // namespace

bool use_kernels(const char* name) {
  for (const Choice& choice : kChoices) {
    bool wanted = strcmp(name, "auto") == 0 || strcmp(name, choice.kernels->name) == 0;
    if (wanted && choice.runs_here()) {
      g_kernels = choice.kernels;
      return true;
    }
  }
  return false;
}

const Kernels& kernels() { return *g_kernels; }

}  // namespace jaxserve
