// k-means on rows of integers (kmeans in Python). Entries fit 16 bits, and sums of products fit 32, so that the
// result does not depend on the order of summation. Rows are in the lanes, two of their entries in each.
#pragma once

#include "common/simd.h"
#include "common/tile.h"
#include "key_clusters/call.h"

namespace sparing::SPARING_ISA {

struct KMeansMemory {
  int32_t* columns;       // [pairs][kRows]
  int32_t* lesson;        // [blocks of taught rows][pairs][kRows]
  int32_t* packed;        // [lanes][pairs]
  int32_t* centres;       // [centres][pairs]
  int32_t* norms;         // [centres] |centre|^2
  double *sums, *counts;  // [centres][depth], [centres]
};

inline int64_t pairs_of(const KMeans& call) { return (call.depth + 1) / 2; }

inline int64_t lay_out(const KMeans& call, float* memory, KMeansMemory* parts) {
  int64_t used = 0;
  const auto take = [&]<class U>(U** part, int64_t count) {
    if (memory) *part = reinterpret_cast<U*>(memory + used);
    used += (count * int64_t(sizeof(U) / sizeof(float)) + 15) / 16 * 16;
  };
  const int64_t pairs = pairs_of(call);
  take(&parts->columns, pairs * kRows);
  take(&parts->lesson, (call.taught + kRows - 1) / kRows * pairs * kRows);
  take(&parts->packed, lanes<float> * pairs);
  take(&parts->centres, call.centres * pairs);
  take(&parts->norms, call.centres);
  take(&parts->sums, call.centres * call.depth);
  take(&parts->counts, call.centres);
  return used;
}

inline int64_t kmeans_scratch(const KMeans& call) {
  KMeansMemory parts{};
  return lay_out(call, nullptr, &parts);
}

SPARING_INLINE int32_t pair_of(int32_t a, int32_t b) { return int32_t(uint32_t(b) << 16 | (uint32_t(a) & 0xffffu)); }

// packed[p] = the entries 2p and 2p + 1 of a row
template <class X>
SPARING_INLINE void pack(const X* row, int64_t depth, int32_t* packed) {
  for (int64_t p = 0; p < depth / 2; ++p) packed[p] = pair_of(int32_t(row[2 * p]), int32_t(row[2 * p + 1]));
  if (depth % 2) packed[depth / 2] = pair_of(int32_t(row[depth - 1]), 0);
}

// columns[p][r] = the entries 2p and 2p + 1 of row r < count; zero for the other lanes
inline void pack_columns(const KMeans& call, const KMeansMemory& parts, const float* const* rows, int64_t count,
                         int32_t* columns) {
  constexpr int N = lanes<float>;
  const int64_t pairs = pairs_of(call);
  for (int64_t first = 0; first < kRows; first += N) {
    for (int64_t r = 0; r < N; ++r) {
      int32_t* packed = parts.packed + r * pairs;
      if (first + r < count)
        pack(rows[first + r], call.depth, packed);
      else
        for (int64_t p = 0; p < pairs; ++p) packed[p] = 0;
    }
    int64_t p = 0;
    for (; p + N <= pairs; p += N) {
      Vec<float> square[N];
      for (int r = 0; r < N; ++r) square[r] = reinterpret_cast<Vec<float>>(load<int32_t>(parts.packed + r * pairs + p));
      turn<float>(square);
      for (int r = 0; r < N; ++r)
        store<int32_t>(columns + (p + r) * kRows + first, reinterpret_cast<Vec<int32_t>>(square[r]));
    }
    for (; p < pairs; ++p)
      for (int r = 0; r < N; ++r) columns[p * kRows + first + r] = parts.packed[r * pairs + p];
  }
}

// The largest 2 x.c - c.c so far, the first of equals, and its centre.
struct Nearest {
  Vec<int32_t> best[kWide], which[kWide];
};

// Compares M centres with a strip of rows.
template <int M>
SPARING_INLINE void meet_centres(const int32_t* centres, const int32_t* norms, int64_t pairs, const int32_t* columns,
                                 int64_t first, Nearest& nearest) {
  Vec<int32_t> sums[M][kWide] = {};
  for (int64_t p = 0; p < pairs; ++p) {
    Vec<int32_t> column[kWide];
    for (int j = 0; j < kWide; ++j) column[j] = load<int32_t>(columns + p * kRows + j * lanes<float>);
    for (int i = 0; i < M; ++i) {
      const Vec<int32_t> x = all(centres[i * pairs + p]);
      for (int j = 0; j < kWide; ++j) sums[i][j] += pair_products(x, column[j]);
    }
  }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < kWide; ++j) {
      const Vec<int32_t> score = sums[i][j] + sums[i][j] - norms[i];
      const Vec<int32_t> nearer = score > nearest.best[j];
      nearest.best[j] = nearer ? score : nearest.best[j];
      nearest.which[j] = nearer ? all(int32_t(first + i)) : nearest.which[j];
    }
}

inline constexpr int32_t kNoCentre = 1 << 30;  // norm of a centre that is not used; all others are below half of it

// Finds the nearest centre of each of `count` <= kRows rows.
inline void nearest_centres(const KMeans& call, const KMeansMemory& parts, const int32_t* columns, int64_t count,
                            int32_t* nearest) {
  const int64_t pairs = pairs_of(call);
  for (int64_t strip = 0; strip < count; strip += kStrip<float>) {
    Nearest found;
    for (int j = 0; j < kWide; ++j) found.best[j] = all(-kNoCentre / 2), found.which[j] = Vec<int32_t>{};
    in_tiles<kDeep>(call.centres, [&]<int M>(int64_t c) {
      meet_centres<M>(parts.centres + c * pairs, parts.norms + c, pairs, columns + strip, c, found);
    });
    for (int j = 0; j < kWide; ++j) store<int32_t>(nearest + strip + j * lanes<float>, found.which[j]);
  }
}

inline void find_norms(const KMeans& call, const KMeansMemory& parts, const uint8_t* counts) {
  const int64_t pairs = pairs_of(call);
  for (int64_t c = 0; c < call.centres; ++c) {
    int32_t total = 0;
    for (int64_t p = 0; p < pairs; ++p) {
      const int32_t both = parts.centres[c * pairs + p], low = int16_t(both), high = both >> 16;
      total += low * low + high * high;
    }
    parts.norms[c] = counts[c] ? total : kNoCentre;
  }
}

inline void kmeans(const KMeans& call, int64_t begin, int64_t end, float* scratch) {
  KMeansMemory parts{};
  lay_out(call, scratch, &parts);
  const int64_t pairs = pairs_of(call);
  const float* rows[kRows];
  int32_t nearest[kRows];
  for (int64_t unit = begin; unit < end; ++unit) {
    const float* x = call.x + unit * call.rows * call.depth;
    const int64_t* lesson = call.lesson + unit * call.taught;
    const uint8_t* used = call.lesson_used + unit * call.taught;
    const uint8_t* counts = call.start_used + unit * call.centres;
    for (int64_t c = 0; c < call.centres; ++c)
      pack(x + call.start[unit * call.centres + c] * call.depth, call.depth, parts.centres + c * pairs);
    find_norms(call, parts, counts);
    for (int64_t first = 0; first < call.taught && call.steps; first += kRows) {
      const int64_t some = call.taught - first < kRows ? call.taught - first : kRows;
      for (int64_t r = 0; r < some; ++r) rows[r] = x + lesson[first + r] * call.depth;
      pack_columns(call, parts, rows, some, parts.lesson + first * pairs);
    }
    for (int64_t step = 0; step < call.steps; ++step) {
      for (int64_t i = 0; i < call.centres * call.depth; ++i) parts.sums[i] = 0.0;
      for (int64_t c = 0; c < call.centres; ++c) parts.counts[c] = 0.0;
      for (int64_t first = 0; first < call.taught; first += kRows) {
        const int64_t some = call.taught - first < kRows ? call.taught - first : kRows;
        nearest_centres(call, parts, parts.lesson + first * pairs, some, nearest);
        for (int64_t r = 0; r < some; ++r) {
          if (!used[first + r]) continue;
          const float* row = x + lesson[first + r] * call.depth;
          double* sums = parts.sums + nearest[r] * call.depth;
          for (int64_t k = 0; k < call.depth; ++k) sums[k] += double(row[k]);
          parts.counts[nearest[r]] += 1.0;
        }
      }
      for (int64_t c = 0; c < call.centres; ++c) {
        if (parts.counts[c] == 0.0) continue;
        double* sums = parts.sums + c * call.depth;
        for (int64_t k = 0; k < call.depth; ++k) sums[k] = __builtin_rint(sums[k] / parts.counts[c]);
        pack(sums, call.depth, parts.centres + c * pairs);
      }
      find_norms(call, parts, counts);
    }
    int64_t* labels = call.labels + unit * call.rows;
    const uint8_t* valid = call.valid + unit * call.rows;
    for (int64_t first = 0; first < call.rows; first += kRows) {
      const int64_t some = call.rows - first < kRows ? call.rows - first : kRows;
      for (int64_t r = 0; r < some; ++r) rows[r] = x + (first + r) * call.depth;
      pack_columns(call, parts, rows, some, parts.columns);
      nearest_centres(call, parts, parts.columns, some, nearest);
      for (int64_t r = 0; r < some; ++r) labels[first + r] = valid[first + r] ? nearest[r] : -1;
    }
  }
}

inline constexpr KMeansKernels kmeans_kernels() { return {kmeans_scratch, kmeans}; }

}  // namespace sparing::SPARING_ISA
