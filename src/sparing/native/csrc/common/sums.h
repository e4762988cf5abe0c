// Sums over many tokens. One running sum of 10^5 numbers in float32 loses three digits, so every long sum has two
// levels: at most kRun numbers are summed plainly, and the results are added up with compensation (Kahan's algorithm
// with Knuth's TwoSum, which is exact for any magnitudes): what rounding removes from the sum is its rest, which is
// added to the next term. The error then does not grow with the length, and adding zero changes nothing.
#pragma once

#include "common/simd.h"

namespace sparing::SPARING_ISA {

inline constexpr int64_t kRun = 64;

// A running sum in registers, of numbers or of vectors.
template <class V>
struct Running {
  V sum{}, rest{};

  SPARING_INLINE void add(V x) {
    const V wanted = x + rest, next = sum + wanted, added = next - sum;
    rest = (sum - (next - added)) + (wanted - added);
    sum = next;
  }
};

// Adds to a running sum in memory. The rest of a sum is `rest` entries after it; 0: no compensation, for sums of few
// terms.
template <class T>
SPARING_INLINE void add_to(T* sum, int64_t rest, Vec<T> x) {
  if (!rest) return store<T>(sum, load<T>(sum) + x);
  Running<Vec<T>> total{load<T>(sum), load<T>(sum + rest)};
  total.add(x);
  store<T>(sum, total.sum), store<T>(sum + rest, total.rest);
}

// Calls visit(begin, end) for runs of at most `most` indices from 0 to count - 1.
template <class Visit>
SPARING_INLINE void in_runs(int64_t count, int64_t most, const Visit& visit) {
  for (int64_t begin = 0; begin < count; begin += most) visit(begin, begin + most < count ? begin + most : count);
}

// Returns the sum of term(i), a number or a vector, over i = 0, step, 2 step, ... below `count`.
template <class V, class Term>
SPARING_INLINE V long_sum(int64_t count, int64_t step, const Term& term) {
  Running<V> total;
  in_runs(count, kRun * step, [&](int64_t begin, int64_t end) {
    V part{};
    for (int64_t i = begin; i < end; i += step) part += term(i);
    total.add(part);
  });
  return total.sum;
}

template <class T>
SPARING_INLINE void clear(T* numbers, int64_t count) {
  for (int64_t i = 0; i < count; ++i) numbers[i] = T(0);
}

}  // namespace sparing::SPARING_ISA
