// Weighted sums of rows that are chosen by a list.
#pragma once

#include "common/simd.h"
#include "common/sums.h"
#include "common/tile.h"
#include "common/widen.h"

namespace sparing::SPARING_ISA {

// Prefetches a row.
template <class T>
SPARING_INLINE void fetch(const T* row, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + i);
}

// sums[e] += sum_c weights[c] rows[list[c]][e] for e < width; rows are `stride` entries apart, rests `rest` entries
// after their sums. The entries of rows may have 16 bits.
template <class T, class E>
SPARING_INLINE void add_rows(const T* weights, const Int<T>* list, int64_t count, const E* rows, int64_t stride,
                             int64_t width, T* sums, int64_t rest) {
  in_runs(count, kRun, [&](int64_t begin, int64_t end) {
    in_tiles<8>(width / lanes<T>, [&]<int M>(int64_t i) {
      const int64_t first = i * lanes<T>;
      Vec<T> total[M] = {};
      for (int64_t c = begin; c < end; ++c) {
        const E* row = rows + list[c] * stride + first;
        const Vec<T> x = all(weights[c]);
        for (int j = 0; j < M; ++j) total[j] += x * load_wide(row + j * lanes<T>);
      }
      for (int j = 0; j < M; ++j) add_to<T>(sums + first + j * lanes<T>, rest, total[j]);
    });
    for (int64_t e = width / lanes<T> * lanes<T>; e < width; ++e) {
      T part = T(0);
      for (int64_t c = begin; c < end; ++c) part += weights[c] * widen(rows[list[c] * stride + e]);
      Running<T> total{sums[e], sums[e + rest]};
      total.add(part);
      sums[e] = total.sum, sums[e + rest] = total.rest;
    }
  });
}

}  // namespace sparing::SPARING_ISA
