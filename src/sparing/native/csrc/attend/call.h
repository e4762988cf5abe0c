// Exact softmax attention of every query over all valid keys. Included by kernels.h.
#pragma once

#include "common/softmax_call.h"

namespace sparing {

template <class T>
struct Attend : SoftmaxCall<T> {
  const T* bias;  // [items][keys], added to the scores; -inf hides a key; null: none

  __attribute__((always_inline)) bool sees(int64_t item, int64_t key) const {
    const int64_t at = item * this->keys + key;
    return (!this->keep || this->keep[at]) && (!bias || bias[at] != -T(__builtin_inf()));
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
