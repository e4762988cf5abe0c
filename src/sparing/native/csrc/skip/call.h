// Softmax attention that leaves out the values of keys of small weight. Included by kernels.h.
#pragma once

#include "attend/call.h"
#include "common/half.h"

namespace sparing {

inline constexpr int64_t kSkipGroup = 32;  // queries that read the same keys

// A stand-in's weight grows to at most this times itself; what no stand-in can represent is lost.
template <class T>
inline constexpr T kMostGrowth = T(0x1p20);

// Stand-ins that weigh less represent nothing: dividing by their weight is not safe.
template <class T>
inline constexpr T kLeastStanding = sizeof(T) == 4 ? T(1e-30) : T(1e-300);

template <class T>
struct Skip : Attend<T> {
  T threshold;                   // a key of this weight, relative to the largest that the query has seen, is read
  int64_t stride;                // one of so many keys of a tile stands for those that are left out
  uint32_t stands[kAttendKeys];  // not zero for these keys of a tile
  const int64_t* order;          // [items][queries] positions of the queries, in the order of blocks; null: ascending
  T *left, *touched;             // [items][heads][queries] share of the weight that is left out; number of values used
};

template <class T>
struct SkipKernels {
  int64_t (*scratch)(const Skip<T>&);  // entries of T
  void (*forward)(const Skip<T>&, int64_t begin, int64_t end, T* scratch);
};

// The same for the last queries of sequences, each for itself.
template <class E>
struct SkipStep {
  using T = Wide<E>;
  Tokens<const E> q, k, v;
  int64_t items, heads, groups, queries, keys, depth, width;  // groups: query heads per key head
  const int64_t* place;                                       // [items][keys] positions of valid keys; null: all are
  const int64_t* seen;                                        // [items][queries] valid keys that a query sees
  int64_t stride;
  T threshold, scale;
  E* out;                   // [items][heads][queries][width]
  T *lse, *left, *touched;  // [items][heads][queries]
};

template <class E>
struct SkipStepKernels {
  int64_t (*scratch)(const SkipStep<E>&);  // entries of Wide<E>
  void (*forward)(const SkipStep<E>&, int64_t begin, int64_t end, Wide<E>* scratch);
};

}  // namespace sparing
