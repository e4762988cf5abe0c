#pragma once

#include <cstdint>

namespace sparing {

// The normalisation of each query's softmax, [items][heads][queries], written by the forward pass. The backward pass
// computes a weight as exp(score - top) / total: the log-sum-exp of large scores is rounded to fewer digits than the
// weights have.
template <class T>
struct Normaliser {
  T* top;    // largest score, -inf where a query sees nothing
  T* total;  // sum of exp(score - top), 0 where a query sees nothing

  __attribute__((always_inline)) Normaliser from(int64_t query) const { return {top + query, total + query}; }
};

}  // namespace sparing
