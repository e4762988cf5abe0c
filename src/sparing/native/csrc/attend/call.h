// Exact softmax attention of every query over all valid keys. Included by kernels.h.
#pragma once

#include "common/softmax_call.h"

namespace sparing {

inline constexpr int64_t kAttendBlock = 128;  // most queries of a block
inline constexpr int kAttendKeys = 128;       // keys of a tile, whose weighted values are summed without compensation

// Queries that are computed together: `count` of them from `first` on, which see keys from `start` to `stop`, not
// included. Positions are rows of the tensors; query i of a causal call sees keys up to i.
struct AttendBlock {
  int64_t item, start, stop, first, count;
};

template <class T>
struct Attend : SoftmaxCall<T> {
  const T* bias;                // [items][keys], added to the scores; -inf hides a key; null: none
  bool causal = false;          // forward only, as are several sequences
  const AttendBlock* blocks;    // of all items and sequences; a task is one of them for one head
  int64_t block_count;          // how many there are
  const int64_t* valid;         // [items][keys] positions of the keys that are visible, ascending; null: all are
  const int64_t* valid_before;  // [items][keys + 1] how many of these are before a position; null as well

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
