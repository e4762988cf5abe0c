// The arguments that attend, window and lsh share. Plain data only; see kernels.h.
#pragma once

#include "common/normaliser.h"
#include "common/tokens.h"

namespace sparing {

template <class T>
struct SoftmaxCall {
  StoredTokens<T> q, k, v;  // 16 bits in the forward pass only
  const uint8_t* keep;      // [items][keys], 0 for padded keys; null: all are valid
  int64_t items, heads, queries, keys, depth, width;
  int64_t groups;  // query heads for each head of k and v; above 1 only in the forward pass of attend
  T scale;
  T* out;  // [items][heads][queries][width], written by the forward pass, read by the backward pass
  Normaliser<T> norm;
  T* lse;  // [items][heads][queries] log-sum-exp, forward only
  // backward
  Tokens<const T> grad;
  const T* lse_grad;            // [items][heads][queries]
  T *grad_q, *grad_k, *grad_v;  // contiguous
};

}  // namespace sparing
