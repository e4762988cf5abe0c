#pragma once

#include "common/tokens.h"

namespace sparing {

// Softmax attention of each query to the keys with its largest scores.
template <class T>
struct TopKeys {
  StoredTokens<T> q, k, v;
  const uint8_t* keep;  // [items][keys], 0 for padded keys; null: all are valid
  int64_t items, heads, queries, keys, depth, width;
  int64_t chosen;  // how many keys a query attends to, at most `keys`
  bool causal;     // query i sees keys 0..i
  T scale;
  T* out;      // [items][heads][queries][width]
  T* lse;      // [items][heads][queries] log-sum-exp over the chosen keys
  T* all_lse;  // same shape, over all keys that the query sees; null: not wanted
};

template <class T>
struct TopKeysKernels {
  int64_t (*scratch)(const TopKeys<T>&);  // entries of T
  int64_t (*tasks)(const TopKeys<T>&);
  void (*forward)(const TopKeys<T>&, int64_t begin, int64_t end, T* scratch);
};

}  // namespace sparing
