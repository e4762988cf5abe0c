// Means over runs of consecutive valid tokens. Included by kernels.h.
#pragma once

#include "common/tokens.h"

namespace sparing {

template <class T>
struct Segments {
  StoredTokens<T> x;    // tokens in the forward pass, gradients of the means in the backward pass
  const uint8_t* keep;  // [items][tokens], 0 for padded tokens; null: all are valid
  int64_t items, heads, tokens, width, segments;
  T* out;  // [items][heads][segments][width] forward, [items][heads][tokens][width] backward
};

template <class T>
struct SegmentKernels {  // `begin` and `end` count the heads of all items
  int64_t (*scratch)(const Segments<T>&);
  void (*means)(const Segments<T>&, int64_t begin, int64_t end, T* scratch);
  void (*means_backward)(const Segments<T>&, int64_t begin, int64_t end);
};

}  // namespace sparing
