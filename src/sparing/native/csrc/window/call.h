#pragma once

#include "common/normaliser.h"
#include "common/tokens.h"

namespace sparing {

// Softmax over a band of keys around each query, and over shared keys that every query sees.
template <class T>
struct Window {
  Tokens<const T> q, k, v;
  const uint8_t* keep;    // [items][tokens], 0 for padded keys; null: all are valid
  const int64_t* shared;  // [items][shared_count] positions, -1 for none
  int64_t items, heads, tokens, depth, width, shared_count;
  int64_t left, right;  // keys on each side of the query
  bool causal;          // shared keys are seen from their own position on
  T scale;
  T* out;  // [items][heads][tokens][width], written by the forward pass, read by the backward pass
  Normaliser<T> norm;
  T* lse;  // [items][heads][tokens] log-sum-exp, forward only
  // backward
  Tokens<const T> grad;
  const T* lse_grad;            // [items][heads][tokens]
  T *grad_q, *grad_k, *grad_v;  // contiguous
};

template <class T>
struct WindowKernels {
  // Working memory in entries of T, and the work from task `begin` to `end`.
  int64_t (*scratch)(const Window<T>&, bool backward);
  int64_t (*tasks)(const Window<T>&);  // of the forward pass; the backward pass has one per head
  void (*forward)(const Window<T>&, int64_t begin, int64_t end, T* scratch);
  void (*backward)(const Window<T>&, int64_t begin, int64_t end, T* scratch);
};

}  // namespace sparing
