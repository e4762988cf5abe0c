// Products of one query with rows, and searches among clusters, for step.h. The entries of a row are in the lanes.
#pragma once

#include "common/simd.h"
#include "common/sums.h"

namespace sparing::SPARING_ISA {

// The sum of all lanes in log2(lanes) steps.
template <class T>
SPARING_INLINE T sum_in_halves(Vec<T> x) {
  T part[lanes<T>];
  store<T>(part, x);
#pragma GCC unroll 8
  for (int half = lanes<T> / 2; half; half /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) part[i] += part[i + half];
  return part[0];
}

// q.rows[i] for each of `count` rows of `depth` entries.
template <class T, class Row>
SPARING_INLINE void dots_with(const T* q, int64_t depth, int64_t count, const Row& row, T* out) {
  constexpr int64_t kAtOnce = 4, kAhead = 8;
  for (int64_t i = 0; i < count; i += kAtOnce) {
    const T* rows[kAtOnce];
    for (int64_t j = 0; j < kAtOnce; ++j) rows[j] = row(i + j < count ? i + j : count - 1);
    for (int64_t j = i + kAhead; j < i + kAhead + kAtOnce && j < count; ++j) fetch(row(j), depth);
    Vec<T> a{}, b{}, c{}, d{};
    int64_t x = 0;
    for (; x + lanes<T> <= depth; x += lanes<T>) {
      const Vec<T> part = load<T>(q + x);
      a += part * load<T>(rows[0] + x), b += part * load<T>(rows[1] + x);
      c += part * load<T>(rows[2] + x), d += part * load<T>(rows[3] + x);
    }
    const T totals[kAtOnce] = {sum_in_halves<T>(a), sum_in_halves<T>(b), sum_in_halves<T>(c), sum_in_halves<T>(d)};
    for (int64_t j = 0; j < kAtOnce && i + j < count; ++j) {
      T total = totals[j];
      for (int64_t rest = x; rest < depth; ++rest) total += q[rest] * rows[j][rest];
      out[i + j] = total;
    }
  }
}

// Terms below this share of the total are left out: all of them together are smaller than its rounding error.
template <class T>
inline constexpr T kFaint = sizeof(T) == 4 ? T(0x1p-34) : T(0x1p-63);

// Computes entries of the sum of weight[i] * rows[i] from e on, kAtOnce vectors at a time; returns where it stopped.
template <class T, int64_t kAtOnce>
SPARING_INLINE int64_t mix_some(const T* weight, const T* const* rows, int64_t count, int64_t width, int64_t e,
                                T* out) {
  constexpr int64_t kAhead = 6, kEntries = kAtOnce * lanes<T>;
  for (; e + kEntries <= width; e += kEntries) {
    Running<Vec<T>> total[kAtOnce];
    in_runs(count, kRun, [&](int64_t begin, int64_t end) {
      Vec<T> sums[kAtOnce] = {};
      for (int64_t i = begin; i < end; ++i) {
        if (i + kAhead < count) fetch(rows[i + kAhead] + e, kEntries);
        for (int64_t j = 0; j < kAtOnce; ++j) sums[j] += weight[i] * load<T>(rows[i] + e + j * lanes<T>);
      }
      for (int64_t j = 0; j < kAtOnce; ++j) total[j].add(sums[j]);
    });
    for (int64_t j = 0; j < kAtOnce; ++j) store<T>(out + e + j * lanes<T>, total[j].sum);
  }
  return e;
}

// out = sum of weight[i] * rows[i]
template <class T>
SPARING_INLINE void mix(const T* weight, const T* const* rows, int64_t count, int64_t width, T* out) {
  int64_t e = mix_some<T, 8>(weight, rows, count, width, 0, out);
  e = mix_some<T, 4>(weight, rows, count, width, e, out);
  e = mix_some<T, 1>(weight, rows, count, width, e, out);
  for (; e < width; ++e) out[e] = long_sum<T>(count, 1, [&](int64_t i) { return weight[i] * rows[i][e]; });
}

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
