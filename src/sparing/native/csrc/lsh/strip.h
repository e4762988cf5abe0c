// Softmax attention of a strip of queries: as many as fit into the lanes of a tile. Where few neighbours see the same
// keys, the larger blocks of softmax.h would mostly compute scores that are masked.
//
// What a lane computes does not depend on the other lanes of the strip, nor on which keys they see: all sums run over
// the keys in order, in tiles that end at the same places, and a key that a lane does not see adds exactly zero.
#pragma once

#include "common/isa.h"
#include "common/simd.h"
#include "common/sums.h"
#include "common/tile.h"
#include "common/widen.h"

namespace sparing::SPARING_ISA {

// Rows that mix_tile() sums at once.
inline constexpr int kMixed = SPARING_REGISTERS == 32 ? 8 : 4;

// scores[c][lane] = rows[c] . columns[.][lane] for c < M
template <class T, int M>
SPARING_INLINE void strip_dot_tile(const T* rows, int64_t stride, int64_t depth, const T* columns, T* scores) {
  Vec<T> sums[M][kWide] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Vec<T> column[kWide];
    for (int j = 0; j < kWide; ++j) column[j] = load<T>(columns + k * kStrip<T> + j * lanes<T>);
    for (int i = 0; i < M; ++i) {
      const Vec<T> x = all(rows[i * stride + k]);
      for (int j = 0; j < kWide; ++j) sums[i][j] += x * column[j];
    }
  }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < kWide; ++j) store<T>(scores + i * kStrip<T> + j * lanes<T>, sums[i][j]);
}

// scores[c][lane] = rows[c] . columns[.][lane] for c < count
template <class T>
void strip_dots(const T* rows, int64_t stride, int64_t count, int64_t depth, const T* columns, T* scores) {
  in_tiles<kDeep>(count, [&]<int M>(int64_t c) {
    strip_dot_tile<T, M>(rows + c * stride, stride, depth, columns, scores + c * kStrip<T>);
  });
}

// Calls visit(begin, end) for tiles of `tile` keys from place `low` on. They end at the same places for every strip, so
// that the order in which a query sums does not depend on the other queries of its strip.
template <class Visit>
SPARING_INLINE void in_places(int64_t low, int64_t count, int64_t tile, const Visit& visit) {
  for (int64_t begin = 0, end; begin < count; begin = end) {
    end = begin + tile - ((low + begin) % tile + tile) % tile;
    end = end < count ? end : count;
    visit(begin, end);
  }
}

// to[i] += sum_c weights[i * across + c * along] from[c] for i < M; all rows are padded to `stride` entries. With
// `rest`, the terms are summed first, and their sum is added to `to` with compensation; without, they are added to `to`
// one by one, and the result does not depend on the tiles.
template <class T, int M>
SPARING_INLINE void mix_tile(const T* weights, int64_t across, int64_t along, const T* from, int64_t count,
                             int64_t stride, T* to, int64_t rest) {
  for (int64_t e = 0; e < stride; e += kWide * lanes<T>) {
    Vec<T> sums[M][kWide] = {};
    for (int i = 0; !rest && i < M; ++i)
      for (int j = 0; j < kWide; ++j) sums[i][j] = load<T>(to + i * stride + e + j * lanes<T>);
    for (int64_t c = 0; c < count; ++c) {
      Vec<T> point[kWide];
      for (int j = 0; j < kWide; ++j) point[j] = load<T>(from + c * stride + e + j * lanes<T>);
      for (int i = 0; i < M; ++i) {
        const Vec<T> x = all(weights[i * across + c * along]);
        for (int j = 0; j < kWide; ++j) sums[i][j] += x * point[j];
      }
    }
    for (int i = 0; i < M; ++i)
      for (int j = 0; j < kWide; ++j) {
        T* at = to + i * stride + e + j * lanes<T>;
        rest ? add_to<T>(at, rest, sums[i][j]) : store<T>(at, sums[i][j]);
      }
  }
}

// to[lane] += sum_c weights[c][lane] from[c] for c < count, at the places from `low` on, in tiles; the weights of
// lane i are zero outside first[i / kMixed] to last[i / kMixed]
template <class T>
void mix_to_lanes(const T* weights, const T* from, const int32_t* first, const int32_t* last, int64_t low,
                  int64_t count, int64_t tile_size, int64_t stride, T* to, int64_t rest) {
  in_places(low, count, tile_size, [&](int64_t tile, int64_t tile_end) {  // few enough to stay in the cache
    for (int i = 0; i < kStrip<T>; i += kMixed) {
      const int64_t begin = first[i / kMixed] > tile ? first[i / kMixed] : tile;
      const int64_t end = last[i / kMixed] < tile_end ? last[i / kMixed] : tile_end;
      if (begin < end)
        mix_tile<T, kMixed>(weights + begin * kStrip<T> + i, 1, kStrip<T>, from + begin * stride, end - begin, stride,
                            to + i * stride, rest);
    }
  });
}

// to[c] += sum_lane weights[c][lane] from[lane] for c < count
template <class T>
void mix_from_lanes(const T* weights, const T* from, int64_t count, int64_t stride, T* to, int64_t rest) {
  in_tiles<kMixed>(count, [&]<int M>(int64_t c) {
    mix_tile<T, M>(weights + c * kStrip<T>, kStrip<T>, 1, from, kStrip<T>, stride, to + c * stride, rest);
  });
}

// to[e] = factor * row[e] for e < width, then zeros; the entries of `row` may have 16 bits
template <class T, class E>
SPARING_INLINE void copy_row(const E* row, int64_t width, int64_t stride, T* to, T factor = T(1)) {
  int64_t e = 0;
  for (; e + lanes<T> <= width; e += lanes<T>) store<T>(to + e, factor * load_wide(row + e));
  for (; e < width; ++e) to[e] = factor * widen(row[e]);
  for (; e < stride; ++e) to[e] = T(0);
}

}  // namespace sparing::SPARING_ISA
