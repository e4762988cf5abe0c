// All kernels for one instruction set. The including file has set SPARING_ISA, SPARING_BYTES and SPARING_REGISTERS,
// included <cstdint> and kernels.h, and switched the compiler to the instruction set.

namespace sparing::SPARING_ISA {

#include "simd.h"
#include "tile.h"
#include "softmax.h"
#include "window.h"

template <class T>
constexpr KernelsOf<T> kernels_of() {
  return {
      .window_scratch = window_scratch<T>,
      .window_tasks = window_tasks<T>,
      .window_forward = window_forward<T>,
      .window_backward = window_backward<T>,
  };
}

inline constexpr Kernels table{SPARING_NAME, kernels_of<float>(), kernels_of<double>()};

}  // namespace sparing::SPARING_ISA
