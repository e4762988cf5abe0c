// Softmax over a band of keys around each query, and over shared keys that every query sees. Included by kernels.h.
#pragma once

#include "common/half.h"
#include "common/softmax_call.h"

namespace sparing {

template <class T>
struct Window : SoftmaxCall<T> {  // with as many keys as queries
  const int64_t* shared;          // [items][shared_count] positions, -1 for none
  int64_t shared_count;
  int64_t left, right;  // keys on each side of the query
  bool causal;          // shared keys are seen from their own position on
};

template <class T>
struct WindowKernels {
  // Working memory in entries of T, the number of tasks, and the work from task `begin` to `end`.
  int64_t (*scratch)(const Window<T>&, bool backward);
  int64_t (*tasks)(const Window<T>&, bool backward);
  void (*forward)(const Window<T>&, int64_t begin, int64_t end, T* scratch);
  void (*backward)(const Window<T>&, int64_t begin, int64_t end, T* scratch);
};

// Attention of the last queries of a sequence. A query reads its own key, `left` keys before it and the first ones.
template <class E>
struct WindowStep {
  using T = Wide<E>;
  Tokens<const E> q, k, v;
  int64_t items, heads, groups, queries, keys, depth, width;  // groups: query heads per key head
  int64_t left, first;
  T scale;
  E* out;  // [items][heads][queries][width]
  T* lse;  // [items][heads][queries]
};

template <class E>
struct WindowStepKernels {
  int64_t (*scratch)(const WindowStep<E>&);  // entries of Wide<E>
  void (*forward)(const WindowStep<E>&, int64_t begin, int64_t end, Wide<E>* scratch);
};

}  // namespace sparing
