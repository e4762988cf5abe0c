// All kernels for one instruction set. The including file has set SPARING_ISA, SPARING_BYTES and SPARING_REGISTERS,
// included <cstdint> and kernels.h, and switched the compiler to the instruction set.

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sparing::SPARING_ISA {

#include "simd.h"
#include "sums.h"
#include "tile.h"
#include "softmax.h"
#include "window.h"
#include "strip.h"
#include "rows.h"
#include "kmeans.h"
#include "poles.h"
#include "multipole.h"
#include "multipole_step.h"
#include "lsh_hash.h"
#include "lsh.h"
#include "top_keys.h"
#include "product.h"
#include "attend_few.h"
#include "attend.h"
#include "segments.h"
#include "inverse.h"
#include "signs.h"
#include "yoso.h"
#include "feature_maps.h"
#include "feature_sums.h"
#include "feature_grads.h"
#include "received.h"
#include "philox_lanes.h"
#include "projection.h"
#include "feature_causal.h"
#include "feature_causal_grads.h"

template <class T>
constexpr KernelsOf<T> kernels_of() {
  return {
      .attend = attend_kernels<T>(),
      .features = feature_kernels<T>(),
      .inverse = inverse_kernels<T>(),
      .lsh = {rounded_size<T>, round_rotations<T>, hash_scratch<T>, hash_tasks<T>, hash<T>, lsh_scratch<T>,
              lsh_forward<T>, lsh_backward<T>},
      .metric = {metric_scratch<T>, metric_rows<T>},
      .multipole = multipole_kernels<T>(),
      .poles = pole_kernels<T>(),
      .projection = projection_kernels<T>(),
      .received = received_kernels<T>(),
      .segments = segment_kernels<T>(),
      .signs = sign_kernels<T>(),
      .step = step_kernels<T>(),
      .top_keys = top_keys_kernels<T>(),
      .window = {window_scratch<T>, window_tasks<T>, window_forward<T>, window_backward<T>},
      .yoso = yoso_kernels<T>(),
  };
}

inline constexpr Kernels table{SPARING_NAME, {kmeans_scratch, kmeans}, kernels_of<float>(), kernels_of<double>()};

}  // namespace sparing::SPARING_ISA
