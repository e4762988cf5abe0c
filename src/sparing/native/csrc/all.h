// All kernels, compiled for one instruction set, and the table of them.
#pragma once

#include "attend/attend.h"
#include "common/isa.h"
#include "features/features.h"
#include "kernels.h"
#include "linformer/signs.h"
#include "lsh/lsh.h"
#include "monte_carlo/projection.h"
#include "monte_carlo/received.h"
#include "multipole/kmeans.h"
#include "multipole/metric.h"
#include "multipole/multipole.h"
#include "multipole/poles.h"
#include "multipole/step.h"
#include "nystrom/inverse.h"
#include "segments/segments.h"
#include "sketch/sketch.h"
#include "top_keys/top_keys.h"
#include "window/window.h"
#include "yoso/yoso.h"

namespace sparing::SPARING_ISA {

template <class T>
constexpr KernelsOf<T> kernels_of() {
  return {
      .attend = attend_kernels<T>(),
      .features = feature_kernels<T>(),
      .inverse = inverse_kernels<T>(),
      .lsh = lsh_kernels<T>(),
      .metric = metric_kernels<T>(),
      .multipole = multipole_kernels<T>(),
      .poles = pole_kernels<T>(),
      .projection = projection_kernels<T>(),
      .received = received_kernels<T>(),
      .segments = segment_kernels<T>(),
      .signs = sign_kernels<T>(),
      .step = step_kernels<T>(),
      .top_keys = top_keys_kernels<T>(),
      .window = window_kernels<T>(),
      .yoso = yoso_kernels<T>(),
  };
}

inline constexpr Kernels table{
    SPARING_NAME,
    kmeans_kernels(),
    kernels_of<float>(),
    kernels_of<double>(),
    sketch_kernels<float>(),
    sketch_kernels<double>(),
    sketch_kernels<BFloat16>(),
    sketch_kernels<Float16>(),
};

}  // namespace sparing::SPARING_ISA
