// Searches among clusters, for step.h.
#pragma once

#include "common/gathered.h"

namespace sparing::SPARING_ISA {

// Terms below this share of the total are left out: all of them together are smaller than its rounding error.
template <class T>
inline constexpr T kFaint = sizeof(T) == 4 ? T(0x1p-34) : T(0x1p-63);

// Among the clusters that fit the budget, returns the one worth most, the first of equals; -1 if none exceeds `least`.
template <class T>
SPARING_INLINE int64_t best_that_fits(const T* worth, const T* left, int64_t clusters, T budget, T least) {
  Vec<T> best = all(least);
  IntVec<T> which = Int<T>(-1) - IntVec<T>{};
  const IntVec<T> lane = iota<Int<T>>();
  for (int64_t c = 0; c < clusters; c += lanes<T>) {
    const Vec<T> x = load<T>(worth + c);
    const IntVec<T> better = (x > best) & (load<T>(left + c) <= budget);
    best = better ? x : best;
    which = better ? lane + Int<T>(c) : which;
  }
  T top = least;
  int64_t found = -1;
  for (int i = 0; i < lanes<T>; ++i)
    if (which[i] >= 0 && (best[i] > top || (best[i] == top && which[i] < found))) top = best[i], found = which[i];
  return found;
}

}  // namespace sparing::SPARING_ISA
