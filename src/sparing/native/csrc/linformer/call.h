// Products with a matrix of random signs, which is drawn and never stored. Included by kernels.h.
#pragma once

#include "common/tokens.h"

namespace sparing {

// E has entries +-1 / sqrt(slots): the bit (slot % 32) of the word number rank * ceil(slots / 32) + slot / 32 of the
// head's stream, for the token of that rank among the valid ones.
template <class T>
struct Signs {
  Tokens<const T> x;       // tokens forward, the slots' gradients backward
  const uint8_t* keep;     // [items][tokens], 0 for padded tokens; null: all are valid
  const int64_t* streams;  // [heads]
  uint64_t seed;
  uint32_t purpose;
  int64_t items, heads, tokens, width, slots;
  T* out;  // E x [items][heads][slots][width] forward, E^T x [items][heads][tokens][width] backward
};

template <class T>
struct SignKernels {
  // Working memory in entries of T, the number of tasks, and the work from task `begin` to `end`.
  int64_t (*scratch)(const Signs<T>&, bool backward);
  int64_t (*tasks)(const Signs<T>&, bool backward);
  void (*forward)(const Signs<T>&, int64_t begin, int64_t end, T* scratch);
  void (*backward)(const Signs<T>&, int64_t begin, int64_t end, T* scratch);
};

}  // namespace sparing
