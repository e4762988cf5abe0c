// Exact softmax attention of every query over all valid keys. Included by kernels.h.
#pragma once

#include "common/normaliser.h"
#include "common/tokens.h"

namespace sparing {

template <class T>
struct Attend {
  Tokens<const T> q, k, v;
  const uint8_t* keep;  // [items][keys], 0 for padded keys; null: all are valid
  const T* bias;        // [items][keys], added to the scores; -inf hides a key; null: none
  int64_t items, heads, queries, keys, depth, width;
  T scale;
  T* out;  // [items][heads][queries][width], written by the forward pass, read by the backward pass
  Normaliser<T> norm;
  T* lse;  // [items][heads][queries] log-sum-exp, forward only
  // backward
  Tokens<const T> grad;
  const T* lse_grad;            // [items][heads][queries]
  T *grad_q, *grad_k, *grad_v;  // contiguous

  __attribute__((always_inline)) bool sees(int64_t item, int64_t key) const {
    return (!keep || keep[item * keys + key]) && (!bias || bias[item * keys + key] != -T(__builtin_inf()));
  }
};

template <class T>
struct AttendKernels {
  // Working memory in entries of T, the number of tasks, and the work from task `begin` to `end`.
  int64_t (*scratch)(const Attend<T>&, bool backward);
  int64_t (*tasks)(const Attend<T>&, bool backward);
  void (*forward)(const Attend<T>&, int64_t begin, int64_t end, T* scratch);
  void (*backward)(const Attend<T>&, int64_t begin, int64_t end, T* scratch);
};

}  // namespace sparing
