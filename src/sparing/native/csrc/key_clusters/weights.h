// How scores become weights, shared by key_clusters.h and step.h.
#pragma once

#include "common/simd.h"

namespace sparing::SPARING_ISA {

// Weights are exp(score - shift). A new largest score replaces the shift only if it is larger by this.
template <class T>
inline constexpr T kFar = T(16);

// exp(x) - 1 for x >= 0
template <class T>
SPARING_INLINE Vec<T> surplus(Vec<T> x) {
  // exp(x) - 1 cancels for small x.
  const Vec<T> small = x * (T(1) + x * (T(0.5) + x * (T(1) / T(6) + x * (T(1) / T(24)))));
  return x < T(0.03) ? small : exponential(x) - T(1);
}

// Returns the share of the mass of all keys below which summaries are left out if there is a tolerance.
template <class T>
SPARING_INLINE T light_share(T tolerance, int64_t clusters) {
  const T fair = T(1) / T(clusters > 1 ? clusters : 1);
  return (tolerance < fair ? tolerance : fair) / T(16);
}

}  // namespace sparing::SPARING_ISA
