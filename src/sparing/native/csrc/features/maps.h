// The features of a block of tokens, which exist only in scratch memory.
#pragma once

#include "common/simd.h"
#include "common/softmax.h"
#include "common/tile.h"
#include "common/widen.h"
#include "features/call.h"

namespace sparing::SPARING_ISA {

// The features of a block of up to kRows tokens; parts of the scratch memory.
template <class T>
struct FeatureBlock {
  T* columns;  // [depth][kRows] the tokens
  T* phi;      // [features][kRows]
  T* log;      // [kRows]
  T* one;      // [kRows] what represents 1 in phi; set by elu
  T* room;     // [kRows][depth] tokens of 16 bits, widened
};

// Hands out scratch memory; with memory == nullptr it only counts.
template <class T>
struct Supply {
  T* memory;
  int64_t used = 0;

  T* take(int64_t count) {
    T* part = memory ? memory + used : nullptr;
    used += (count + 15) / 16 * 16;
    return part;
  }
};

template <class T>
FeatureBlock<T> feature_block(Supply<T>& supply, const Featured<T>& from) {
  return {supply.take(from.depth * kRows), supply.take(from.features * kRows), supply.take(kRows), supply.take(kRows),
          supply.take(from.x.room(kRows, from.depth))};
}

// Returns token j as row r of a block.
template <class T>
SPARING_INLINE const T* token_of(const Featured<T>& from, int64_t item, int64_t head, int64_t j, int64_t r,
                                 const FeatureBlock<T>& block) {
  return row_of(from.x, item, head, j, from.depth, block.room + from.x.room(r, from.depth));
}

// Calls visit(first feature, how many) for tiles of features that fit the L1 cache together with their block.
template <class Visit>
SPARING_INLINE void in_feature_tiles(int64_t features, const Visit& visit) {
  for (int64_t f = 0; f < features; f += kKeys) visit(f, features - f < kKeys ? features - f : int64_t(kKeys));
}

// out[i][lane] = |rows[i] - columns[.][lane]|^2 for i < M, from the differences: nothing cancels
template <class T, int M>
SPARING_INLINE void distance_tile(const T* const* rows, int64_t depth, const T* columns, T* out) {
  Vec<T> sums[M][kWide] = {};
  const T* row[M];
  for (int i = 0; i < M; ++i) row[i] = rows[i];
  for (int64_t k = 0; k < depth; ++k) {
    Vec<T> column[kWide];
    for (int j = 0; j < kWide; ++j) column[j] = load<T>(columns + k * kRows + j * lanes<T>);
    for (int i = 0; i < M; ++i) {
      const Vec<T> x = all(row[i][k]);
      for (int j = 0; j < kWide; ++j) {
        const Vec<T> apart = column[j] - x;
        sums[i][j] += apart * apart;
      }
    }
  }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < kWide; ++j) store<T>(out + i * kRows + j * lanes<T>, sums[i][j]);
}

template <class T>
void distances(const T* const* rows, int64_t count, int64_t depth, const T* columns, T* out) {
  for (int64_t r = 0; r < kRows; r += kWide * lanes<T>)
    in_tiles<kDeep>(count,
                    [&]<int M>(int64_t c) { distance_tile<T, M>(rows + c, depth, columns + r, out + c * kRows + r); });
}

template <class T>
void gaussian_features(const Featured<T>& from, int64_t item, int64_t head, FeatureBlock<T>& block) {
  in_feature_tiles(from.features, [&](int64_t f, int64_t count) {
    const T* points[kKeys];
    for (int64_t c = 0; c < count; ++c) points[c] = from.points.at(item, head, f + c);
    T* phi = block.phi + f * kRows;
    distances<T>(points, count, from.depth, block.columns, phi);
    for (int64_t i = 0; i < count * kRows; i += lanes<T>)
      store<T>(phi + i, exponential(load<T>(phi + i) * from.factor));
  });
  for (int r = 0; r < kRows; ++r) block.log[r] = T(0);
}

template <class T>
void exponential_features(const Featured<T>& from, int64_t item, int64_t head, FeatureBlock<T>& block) {
  Vec<T> top[kRows / lanes<T>];
  for (Vec<T>& x : top) x = all(kNever<T>);
  in_feature_tiles(from.features, [&](int64_t f, int64_t count) {
    const T* points[kKeys];
    for (int64_t c = 0; c < count; ++c) points[c] = from.points.at(item, head, f + c);
    T* phi = block.phi + f * kRows;
    dots<T>(points, count, from.depth, block.columns, phi);
    for (int64_t c = 0; c < count; ++c)
      for (int i = 0; i < kRows / lanes<T>; ++i) top[i] = larger<T>(top[i], load<T>(phi + c * kRows + i * lanes<T>));
  });
  for (int i = 0; i < kRows / lanes<T>; ++i) {
    const int r = i * lanes<T>;
    for (int64_t f = 0; f < from.features; ++f) {
      T* at = block.phi + f * kRows + r;
      store<T>(at, exponential(load<T>(at) - top[i]));
    }
    Vec<T> square{};
    for (int64_t k = 0; k < from.depth; ++k) {
      const Vec<T> x = load<T>(block.columns + k * kRows + r);
      square += x * x;
    }
    store<T>(block.log + r, top[i] - square * T(0.5));
  }
}

// Returns 2^-n and log(2^n) for the largest 2^n <= x, for x >= 1.
template <class T>
SPARING_INLINE Vec<T> inverse_power(Vec<T> x, Vec<T>* log) {
  constexpr Int<T> digits = sizeof(T) == 4 ? 23 : 52, bias = sizeof(T) == 4 ? 127 : 1023;
  const IntVec<T> n = (reinterpret_cast<IntVec<T>>(x) >> digits) - bias;
  *log = __builtin_convertvector(n, Vec<T>) * T(0.69314718055994530942);
  return reinterpret_cast<Vec<T>>((bias - n) << digits);
}

// Where all entries are negative, exp(largest entry) is moved to `log`, so that not all of them underflow; where some
// are large, a power of two is.
template <class T, bool shifted>
void elu_features(const Featured<T>& from, FeatureBlock<T>& block) {
  for (int r = 0; r < kRows; r += lanes<T>) {
    Vec<T> below{}, shrink = all(T(1)), log{};
    if constexpr (shifted) {
      Vec<T> top = all(kNever<T>);
      for (int64_t k = 0; k < from.depth; ++k) top = larger<T>(top, load<T>(block.columns + k * kRows + r));
      below = top > T(0) ? Vec<T>{} : top;
      shrink = inverse_power<T>(top > T(0) ? top + T(1) : all(T(1)), &log);
      log += below;
    }
    for (int64_t k = 0; k < from.depth; ++k) {
      const Vec<T> x = load<T>(block.columns + k * kRows + r);
      store<T>(block.phi + k * kRows + r, (x > T(0) ? x + T(1) : exponential(x - below)) * shrink);
    }
    store<T>(block.log + r, log), store<T>(block.one + r, shrink);
  }
}

// The features of `count` tokens. The other lanes hold arbitrary finite numbers.
template <class T>
void features_of(const Featured<T>& from, int64_t item, int64_t head, const T* const* tokens, int64_t count,
                 FeatureBlock<T>& block) {
  const T factor = from.map == FeatureMap::exponential ? from.factor : T(1);
  transpose<T>(tokens, count, from.depth, factor, block.columns);
  switch (from.map) {
    case FeatureMap::gaussian: return gaussian_features(from, item, head, block);
    case FeatureMap::exponential: return exponential_features(from, item, head, block);
    case FeatureMap::elu: return elu_features<T, true>(from, block);
    default: return elu_features<T, false>(from, block);
  }
}

}  // namespace sparing::SPARING_ISA
