// Products of small tiles, accumulated in registers. Queries are in the lanes of the vectors: a tile of scores is
// stored as [key][query], so that a softmax over the keys needs no sum across lanes, keys and values are read as they
// lie in memory (or are gathered through pointers), and only the block of queries is transposed, once.
#pragma once

#include "common/isa.h"
#include "common/simd.h"
#include "common/sums.h"

namespace sparing::SPARING_ISA {

inline constexpr int kRows = 64;  // queries of a block
inline constexpr int kKeys = 48;  // keys of a tile: the scores of a block against it fill 12 KiB in float32

// Accumulators that fit the registers: kDeep x kWide vectors, and registers for their factors.
inline constexpr int kWide = 2;
inline constexpr int kDeep = SPARING_REGISTERS == 32 ? 12 : 6;

// out[i][lane] = sum_k rows[i][k] columns[k][lane] for i < M, for `wide` vectors of lanes
template <class T, int M, int wide = kWide>
SPARING_INLINE void dot_tile(const T* const* rows, int64_t depth, const T* columns, T* out) {
  Vec<T> sums[M][wide] = {};
  const T* row[M];
  for (int i = 0; i < M; ++i) row[i] = rows[i];
  for (int64_t k = 0; k < depth; ++k) {
    Vec<T> column[wide];
    for (int j = 0; j < wide; ++j) column[j] = load<T>(columns + k * kRows + j * lanes<T>);
    for (int i = 0; i < M; ++i) {
      const Vec<T> x = all(row[i][k]);
      for (int j = 0; j < wide; ++j) sums[i][j] += x * column[j];
    }
  }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < wide; ++j) store<T>(out + i * kRows + j * lanes<T>, sums[i][j]);
}

// out[i][lane] += sum_k rows[k][first + i] columns[k][lane] for i < M, for kWide vectors of lanes
template <class T, int M>
SPARING_INLINE void sum_tile(const T* const* rows, int64_t first, int64_t count, const T* columns, T* out,
                             int64_t rest) {
  Vec<T> sums[M][kWide] = {};
  for (int64_t k = 0; k < count; ++k) {
    const T* row = rows[k] + first;
    Vec<T> column[kWide];
    for (int j = 0; j < kWide; ++j) column[j] = load<T>(columns + k * kRows + j * lanes<T>);
    for (int i = 0; i < M; ++i) {
      const Vec<T> x = all(row[i]);
      for (int j = 0; j < kWide; ++j) sums[i][j] += x * column[j];
    }
  }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < kWide; ++j) add_to<T>(out + i * kRows + j * lanes<T>, rest, sums[i][j]);
}

// rows[i][e] += sum_r weights[i][r] points[r][e] for i < M and r < count, for kWide vectors of entries e
template <class T, int M>
SPARING_INLINE void spread_tile(const T* weights, int64_t count, const T* points, int64_t stride, T* const* rows,
                                int64_t rest) {
  Vec<T> sums[M][kWide] = {};
  for (int64_t r = 0; r < count; ++r) {
    Vec<T> point[kWide];
    for (int j = 0; j < kWide; ++j) point[j] = load<T>(points + r * stride + j * lanes<T>);
    for (int i = 0; i < M; ++i) {
      const Vec<T> x = all(weights[i * kRows + r]);
      for (int j = 0; j < kWide; ++j) sums[i][j] += x * point[j];
    }
  }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < kWide; ++j) add_to<T>(rows[i] + j * lanes<T>, rest, sums[i][j]);
}

// Calls tile<M>(i) for i = 0, M, 2M, ... and a smaller one for what remains of `count`.
template <int M, class Tile>
SPARING_INLINE void in_tiles(int64_t count, const Tile& tile) {
  int64_t i = 0;
  for (; i + M <= count; i += M) tile.template operator()<M>(i);
  if constexpr (M > 1) {
    if (i < count) {
      const auto shifted = [&]<int N>(int64_t j) { tile.template operator()<N>(i + j); };
      in_tiles<M / 2>(count - i, shifted);
    }
  }
}

// The columns that a tile works on at once; kRows is a multiple of it.
template <class T>
inline constexpr int kStrip = kWide * lanes<T>;

// scores[c][.] = rows[c] . columns[.][.] for c < count and the columns of one strip
template <class T>
void dots_strip(const T* const* rows, int64_t count, int64_t depth, const T* columns, T* scores) {
  in_tiles<kDeep>(count, [&]<int M>(int64_t c) { dot_tile<T, M>(rows + c, depth, columns, scores + c * kRows); });
}

// sums[e][.] += sum_c rows[c][e] weights[c][.] for e < width and the columns of one strip
template <class T>
void weighted_sums_strip(const T* const* rows, int64_t count, int64_t width, const T* weights, T* sums,
                         int64_t rest = 0) {
  in_tiles<kDeep>(width, [&]<int M>(int64_t e) { sum_tile<T, M>(rows, e, count, weights, sums + e * kRows, rest); });
}

// dots_strip() for the first `used` columns, a multiple of the strip.
template <class T>
void dots(const T* const* rows, int64_t count, int64_t depth, const T* columns, T* scores, int64_t used = kRows) {
  for (int64_t r = 0; r < used; r += kStrip<T>) dots_strip<T>(rows, count, depth, columns + r, scores + r);
}

// dots() for the first `used` columns, rounded up to a vector instead of a strip.
template <class T>
void dots_narrow(const T* const* rows, int64_t count, int64_t depth, const T* columns, T* scores, int64_t used) {
  int64_t r = 0;
  for (; r + kStrip<T> - lanes<T> < used; r += kStrip<T>) dots_strip<T>(rows, count, depth, columns + r, scores + r);
  if (r < used)
    in_tiles<kWide * kDeep>(
        count, [&]<int M>(int64_t c) { dot_tile<T, M, 1>(rows + c, depth, columns + r, scores + c * kRows + r); });
}

template <class T>
void weighted_sums(const T* const* rows, int64_t count, int64_t width, const T* weights, T* sums, int64_t used = kRows,
                   int64_t rest = 0) {
  for (int64_t r = 0; r < used; r += kStrip<T>) weighted_sums_strip<T>(rows, count, width, weights + r, sums + r, rest);
}

// The width of a padded row: whole tiles of spread().
template <class T>
constexpr int64_t padded(int64_t width) {
  constexpr int64_t step = kWide * lanes<T>;
  return (width + step - 1) / step * step;
}

// sums[c] += sum_r weights[c][r] points[r] for c < count, r < used; all rows are padded
template <class T>
void spread(const T* weights, int64_t count, const T* points, int64_t stride, T* const* sums, int64_t used = kRows,
            int64_t rest = 0) {
  for (int64_t e = 0; e < stride; e += kWide * lanes<T>)
    in_tiles<kDeep>(count, [&]<int M>(int64_t c) {
      T* rows[M];
      for (int i = 0; i < M; ++i) rows[i] = sums[c + i] + e;
      spread_tile<T, M>(weights + c * kRows, used, points + e, stride, rows, rest);
    });
}

// columns[k][r] = factor * rows[r][k] for r < count; zero for the other lanes, of `width` in all
template <class T, int64_t width = kRows>
void transpose(const T* const* rows, int64_t count, int64_t depth, T factor, T* columns) {
  constexpr int N = lanes<T>;
  for (int64_t first = 0; first < width; first += N) {
    int64_t k = 0;
    for (; k + N <= depth; k += N) {
      Vec<T> square[N];
      for (int r = 0; r < N; ++r) square[r] = first + r < count ? factor * load<T>(rows[first + r] + k) : Vec<T>{};
      turn<T>(square);
      for (int r = 0; r < N; ++r) store<T>(columns + (k + r) * width + first, square[r]);
    }
    for (; k < depth; ++k)
      for (int r = 0; r < N; ++r)
        columns[k * width + first + r] = first + r < count ? factor * rows[first + r][k] : T(0);
  }
}

}  // namespace sparing::SPARING_ISA
