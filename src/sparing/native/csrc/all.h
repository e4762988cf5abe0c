// All kernels, compiled for one instruction set, and the table of them.
#pragma once

#include "attend/attend.h"
#include "common/isa.h"
#include "features/features.h"
#include "kernels.h"
#include "key_clusters/key_clusters.h"
#include "key_clusters/kmeans.h"
#include "key_clusters/metric.h"
#include "key_clusters/poles.h"
#include "linformer/signs.h"
#include "lsh/lsh.h"
#include "monte_carlo/projection.h"
#include "monte_carlo/received.h"
#include "multipole/multipole.h"
#include "nystrom/inverse.h"
#include "segments/segments.h"
#include "skip/forward.h"
#include "skip/step.h"
#include "top_keys/top_keys.h"
#include "window/step.h"
#include "window/window.h"
#include "yoso/yoso.h"

namespace sparing::SPARING_ISA {

template <class T>
constexpr KernelsOf<T> kernels_of() {
  return {
      .attend = attend_kernels<T>(),
      .features = feature_kernels<T>(),
      .inverse = inverse_kernels<T>(),
      .key_clusters = key_clusters_kernels<T>(),
      .lsh = lsh_kernels<T>(),
      .metric = metric_kernels<T>(),
      .poles = pole_kernels<T>(),
      .projection = projection_kernels<T>(),
      .received = received_kernels<T>(),
      .segments = segment_kernels<T>(),
      .signs = sign_kernels<T>(),
      .skip = skip_kernels<T>(),
      .top_keys = top_keys_kernels<T>(),
      .window = window_kernels<T>(),
      .yoso = yoso_kernels<T>(),
  };
}

template <class E>
constexpr KernelsOfStored<E> kernels_of_stored() {
  return {
      .multipole = multipole_kernels<E>(),
      .skip_step = skip_step_kernels<E>(),
      .window_step = window_step_kernels<E>(),
  };
}

inline constexpr Kernels table{
    SPARING_NAME,
    kmeans_kernels(),
    kernels_of<float>(),
    kernels_of<double>(),
    kernels_of_stored<float>(),
    kernels_of_stored<double>(),
    kernels_of_stored<BFloat16>(),
    kernels_of_stored<Float16>(),
};

}  // namespace sparing::SPARING_ISA
