// Attention through features, phi(q) . phi(k). Included by kernels.h.
#pragma once

#include "common/tokens.h"

namespace sparing {

// phi_f(x), the weight that token x gives to feature f, is stored with a factor per token, because some maps have large
// and tiny values: phi_f(x) = entry * exp(log(x)).
enum class FeatureMap : int64_t {
  gaussian,     // exp(factor |x - p_f|^2)
  exponential,  // exp(p_f . y - |y|^2 / 2), y = factor x
  elu,          // 1 + ELU(x_f)
  plain_elu,    // 1 + ELU(x_f), with log(x) = 0
  count,
};

// Tokens and their map.
template <class T>
struct Featured {
  FeatureMap map;
  StoredTokens<T> x;       // 16 bits in forward passes only, as are values
  Tokens<const T> points;  // p_f, [items][heads][features]; not read where the map has none
  int64_t items, heads, tokens, depth, features;
  T factor;
};

// sums[f] = sum_j phi_f(x_j) values[j] and mass[f] = sum_j phi_f(x_j) over the valid tokens, divided by exp(level).
// Chunks of tokens are summed separately, then together in order, so that any number of threads gives the same bits.
template <class T>
struct FeatureSums {
  Featured<T> from;
  StoredTokens<T> values;
  const uint8_t* keep;  // [items][tokens]; null if all are valid
  int64_t width, chunk, chunks;
  T *part_sums, *part_mass, *part_level;  // [items][heads][chunks] of [features][padded width], [features], one
  T *sums, *mass, *level;                 // [items][heads] of [features][width], [features], one
};

// out[i] = sum_f phi_f(x_i) table[f], divided by total[i] = sum_f phi_f(x_i) mass[f]; not divided if mass is null.
template <class T>
struct FeatureMix {
  Featured<T> from;
  Tokens<const T> table;  // [items][heads][features][width]
  const T* mass;          // [items][heads][features]
  int64_t width;
  T *out, *total;  // contiguous
};

// Gradients of FeatureSums (`mixing` false) or FeatureMix. Both pair a row of numbers for each token, `left`, with one
// for each feature, `right`: the values with the gradient of the sums, or the gradient of the output with the table.
template <class T>
struct FeatureGrads {
  Featured<T> from;
  bool mixing;
  Tokens<const T> left, right;
  const T* mass;         // [items][heads][features] gradient of the mass, or the mass; null for none
  const uint8_t* keep;   // only for FeatureSums
  const T* level;        // only for FeatureSums
  const T *out, *total;  // only for FeatureMix
  int64_t width, chunk, chunks;
  T *grad_x, *grad_left;                    // contiguous; grad_left only if not mixing
  T *part_right, *part_mass, *part_points;  // [items][heads][chunks], sums of a chunk; rows are padded
  T *grad_right, *grad_mass, *grad_points;  // the first two only if mixing, the last only for gaussian; may be null
};

// out[i] = sum_{j <= i} w_ij values[j], w_ij = sum_f phi_f(q_i) phi_f(k_j), divided by their sum (`divide`) or, where
// the map has a log, by exp(largest log of a key that row i sees). Query and key i are at the same position.
template <class T>
struct FeatureCausal {
  Featured<T> q, k;  // with the same points
  StoredTokens<T> values;
  const uint8_t* keep;  // [items][tokens of k]; null if all are valid
  int64_t width;
  bool divide;
  T *out, *total;  // contiguous; read by the backward pass
  // backward
  Tokens<const T> grad;
  T *grad_q, *grad_k, *grad_v;  // contiguous
};

template <class T>
struct FeatureKernels {
  int64_t (*padded_width)(int64_t);
  int64_t (*sums_scratch)(const FeatureSums<T>&);
  void (*sums)(const FeatureSums<T>&, int64_t begin, int64_t end, T* scratch);  // a task is a chunk of a head
  void (*merge)(const FeatureSums<T>&, int64_t begin, int64_t end);             // a task is a head
  int64_t (*mix_scratch)(const FeatureMix<T>&);
  int64_t (*mix_tasks)(const FeatureMix<T>&);
  void (*mix)(const FeatureMix<T>&, int64_t begin, int64_t end, T* scratch);
  int64_t (*grads_scratch)(const FeatureGrads<T>&);
  void (*grads)(const FeatureGrads<T>&, int64_t begin, int64_t end, T* scratch);  // a task is a chunk of a head
  void (*merge_grads)(const FeatureGrads<T>&, int64_t begin, int64_t end);        // a task is a head
  int64_t (*causal_scratch)(const FeatureCausal<T>&);
  void (*causal)(const FeatureCausal<T>&, int64_t begin, int64_t end, T* scratch);  // a task is a head
  int64_t (*causal_grads_scratch)(const FeatureCausal<T>&);
  void (*causal_grads)(const FeatureCausal<T>&, int64_t begin, int64_t end, T* scratch);  // a task is a head
};

}  // namespace sparing
