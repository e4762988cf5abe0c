// The kernels of attention through features.
#pragma once

#include "common/tile.h"
#include "features/call.h"
#include "features/causal.h"
#include "features/causal_grads.h"
#include "features/grads.h"
#include "features/sums.h"

namespace sparing::SPARING_ISA {

template <class T>
constexpr FeatureKernels<T> feature_kernels() {
  return {
      .padded_width = padded<T>,
      .sums_scratch = feature_sums_scratch<T>,
      .sums = feature_sums<T>,
      .merge = feature_merge<T>,
      .mix_scratch = feature_mix_scratch<T>,
      .mix_tasks = feature_mix_tasks<T>,
      .mix = feature_mix<T>,
      .grads_scratch = feature_grads_scratch<T>,
      .grads = feature_grads<T>,
      .merge_grads = feature_merge_grads<T>,
      .causal_scratch = feature_causal_scratch<T>,
      .causal = feature_causal<T>,
      .causal_grads_scratch = feature_causal_grads_scratch<T>,
      .causal_grads = feature_causal_grads<T>,
  };
}

}  // namespace sparing::SPARING_ISA
