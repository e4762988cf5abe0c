// How scores become weights: what multipole.h and step.h share.
#pragma once

#include "common/simd.h"

namespace sparing::SPARING_ISA {

// Scores are taken relative to the largest one, or to one that is not so far below it that exp of the distance matters.
template <class T>
inline constexpr T kFar = T(16);

// exp(x) - 1 for x >= 0
template <class T>
SPARING_INLINE Vec<T> surplus(Vec<T> x) {
  // The difference would lose the digits of a small x.
  const Vec<T> small = x * (T(1) + x * (T(0.5) + x * (T(1) / T(6) + x * (T(1) / T(24)))));
  return x < T(0.03) ? small : exponential(x) - T(1);
}

// Of the mass of all keys: summaries of less are left out, if there is a tolerance.
template <class T>
SPARING_INLINE T light_share(T tolerance, int64_t clusters) {
  const T fair = T(1) / T(clusters > 1 ? clusters : 1);
  return (tolerance < fair ? tolerance : fair) / T(16);
}

}  // namespace sparing::SPARING_ISA
