// Products of one query with gathered rows, and weighted sums of such rows. Entries may have 16 bits. The
// entries of a row are in the lanes.
#pragma once

#include "common/rows.h"
#include "common/sums.h"
#include "common/widen.h"

namespace sparing::SPARING_ISA {

// Returns lane 0 of join(first half of x, second half), repeated until one lane is left.
template <class T, int half = lanes<T> / 2, class Join>
SPARING_INLINE T in_halves(Vec<T> x, const Join& join) {
  x = join(x, rotated<T, half>(x));
  if constexpr (half > 1)
    return in_halves<T, half / 2>(x, join);
  else
    return x[0];
}

template <class T>
SPARING_INLINE T sum_in_halves(Vec<T> x) {
  return in_halves<T>(x, [](Vec<T> a, Vec<T> b) { return a + b; });
}

template <class T>
SPARING_INLINE T largest_in_halves(Vec<T> x) {
  return in_halves<T>(x, [](Vec<T> a, Vec<T> b) { return larger<T>(a, b); });
}

// out[i] = q.row(i) for each of `count` rows of `depth` entries.
template <class E, class Row>
SPARING_INLINE void dots_with(const Wide<E>* q, int64_t depth, int64_t count, const Row& row, Wide<E>* out) {
  using T = Wide<E>;
  constexpr int64_t kAtOnce = 4, kAhead = 8;
  for (int64_t i = 0; i < count; i += kAtOnce) {
    const E* rows[kAtOnce];
    for (int64_t j = 0; j < kAtOnce; ++j) rows[j] = row(i + j < count ? i + j : count - 1);
    for (int64_t j = i + kAhead; j < i + kAhead + kAtOnce && j < count; ++j) fetch(row(j), depth);
    Vec<T> a{}, b{}, c{}, d{};
    int64_t x = 0;
    for (; x + lanes<T> <= depth; x += lanes<T>) {
      const Vec<T> part = load<T>(q + x);
      a += part * load_wide(rows[0] + x), b += part * load_wide(rows[1] + x);
      c += part * load_wide(rows[2] + x), d += part * load_wide(rows[3] + x);
    }
    const T totals[kAtOnce] = {sum_in_halves<T>(a), sum_in_halves<T>(b), sum_in_halves<T>(c), sum_in_halves<T>(d)};
    for (int64_t j = 0; j < kAtOnce && i + j < count; ++j) {
      T total = totals[j];
      for (int64_t rest = x; rest < depth; ++rest) total += q[rest] * widen(rows[j][rest]);
      out[i + j] = total;
    }
  }
}

// Computes entries of the sum of weight[i] * rows[i] from e on, kAtOnce vectors at a time; returns where it stopped.
template <class E, int64_t kAtOnce>
SPARING_INLINE int64_t mix_some(const Wide<E>* weight, const E* const* rows, int64_t count, int64_t width, int64_t e,
                                Wide<E>* out) {
  using T = Wide<E>;
  constexpr int64_t kAhead = 6, kEntries = kAtOnce * lanes<T>;
  for (; e + kEntries <= width; e += kEntries) {
    Running<Vec<T>> total[kAtOnce];
    in_runs(count, kRun, [&](int64_t begin, int64_t end) {
      Vec<T> sums[kAtOnce] = {};
      for (int64_t i = begin; i < end; ++i) {
        if (i + kAhead < count) fetch(rows[i + kAhead] + e, kEntries);
        for (int64_t j = 0; j < kAtOnce; ++j) sums[j] += weight[i] * load_wide(rows[i] + e + j * lanes<T>);
      }
      for (int64_t j = 0; j < kAtOnce; ++j) total[j].add(sums[j]);
    });
    for (int64_t j = 0; j < kAtOnce; ++j) store<T>(out + e + j * lanes<T>, total[j].sum);
  }
  return e;
}

// out = sum of weight[i] * rows[i]
template <class E>
SPARING_INLINE void mix(const Wide<E>* weight, const E* const* rows, int64_t count, int64_t width, Wide<E>* out) {
  int64_t e = mix_some<E, 8>(weight, rows, count, width, 0, out);
  e = mix_some<E, 4>(weight, rows, count, width, e, out);
  e = mix_some<E, 1>(weight, rows, count, width, e, out);
  for (; e < width; ++e) out[e] = long_sum<Wide<E>>(count, 1, [&](int64_t i) { return weight[i] * widen(rows[i][e]); });
}

}  // namespace sparing::SPARING_ISA
