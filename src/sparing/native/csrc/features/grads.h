// Gradients of sums through features: phi is computed again, block by block.
#pragma once

#include "common/simd.h"
#include "common/sums.h"
#include "common/tile.h"
#include "features/call.h"
#include "features/maps.h"
#include "features/sums.h"

namespace sparing::SPARING_ISA {

// sums[e][.] += sum_c (rows[c][first + e] - columns[e][.]) weights[c][.] for e < M and one strip: from the differences,
// because nearly equal long vectors cancel
template <class T, int M>
SPARING_INLINE void pull_tile(const T* const* rows, int64_t first, int64_t count, const T* columns, const T* weights,
                              T* out) {
  Vec<T> sums[M][kWide];
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < kWide; ++j) sums[i][j] = load<T>(out + i * kRows + j * lanes<T>);
  for (int64_t k = 0; k < count; ++k) {
    const T* row = rows[k] + first;
    Vec<T> weight[kWide];
    for (int j = 0; j < kWide; ++j) weight[j] = load<T>(weights + k * kRows + j * lanes<T>);
    for (int i = 0; i < M; ++i) {
      const Vec<T> x = all(row[i]);
      for (int j = 0; j < kWide; ++j) sums[i][j] += (x - load<T>(columns + i * kRows + j * lanes<T>)) * weight[j];
    }
  }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < kWide; ++j) store<T>(out + i * kRows + j * lanes<T>, sums[i][j]);
}

template <class T>
void pull(const T* const* rows, int64_t count, int64_t depth, const T* columns, const T* weights, T* sums) {
  for (int64_t r = 0; r < kRows; r += kStrip<T>)
    in_tiles<kDeep>(depth, [&]<int M>(int64_t e) {
      pull_tile<T, M>(rows, e, count, columns + e * kRows + r, weights + r, sums + e * kRows + r);
    });
}

// sums[c][e] += sum_r weights[c][r] (tokens[r][e] - rows[c][e]) for c < M and one strip of entries; `tokens` are padded
template <class T, int M>
SPARING_INLINE void push_tile(const T* weights, const T* tokens, int64_t stride, const T* const* rows, T* const* out) {
  Vec<T> sums[M][kWide] = {};
  for (int64_t r = 0; r < kRows; ++r) {
    Vec<T> token[kWide];
    for (int j = 0; j < kWide; ++j) token[j] = load<T>(tokens + r * stride + j * lanes<T>);
    for (int i = 0; i < M; ++i) {
      const Vec<T> weight = all(weights[i * kRows + r]);
      for (int j = 0; j < kWide; ++j) sums[i][j] += (token[j] - load<T>(rows[i] + j * lanes<T>)) * weight;
    }
  }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < kWide; ++j) add_to<T>(out[i] + j * lanes<T>, 0, sums[i][j]);
}

template <class T>
void push(const T* weights, int64_t count, const T* tokens, int64_t stride, const T* const* rows, T* const* sums) {
  for (int64_t e = 0; e < stride; e += kStrip<T>)
    in_tiles<kDeep>(count, [&]<int M>(int64_t c) {
      const T* points[M];
      T* to[M];
      for (int i = 0; i < M; ++i) points[i] = rows[c + i] + e, to[i] = sums[c + i] + e;
      push_tile<T, M>(weights + c * kRows, tokens + e, stride, points, to);
    });
}

// Copies rows to padded ones, each times a factor; rows from `count` on are zeros.
template <class T>
void pad_rows(const T* const* rows, int64_t count, int64_t total, int64_t width, const T* factors, T* to) {
  const int64_t wide = padded<T>(width);
  for (int64_t r = 0; r < total; ++r)
    for (int64_t e = 0; e < wide; ++e)
      to[r * wide + e] = r < count && e < width ? (factors ? factors[r] * rows[r][e] : rows[r][e]) : T(0);
}

// The scratch memory of gradients.
template <class T>
struct GradBlock {
  T* left;         // [width][kRows]
  T* left_rows;    // [kRows][padded width], only if mixing
  T* slopes;       // [kKeys][kRows] derivatives of the loss with respect to phi, then times phi
  T* grad_left;    // [width][kRows], only if not mixing
  T* grad_x;       // [depth][kRows]
  T* mass;         // [features][lanes], only if mixing
  T* token_rows;   // [kRows][padded depth], only for gaussian
  T* point_rows;   // [features][padded depth], only for gaussian
  T share[kRows];  // factor of phi in each lane
  T scale[kRows];  // factor of `left`
  T unit[kRows];   // the factor of the mass, as `left` is that of the sums
};

template <class T>
GradBlock<T> grad_block(Supply<T>& supply, const FeatureGrads<T>& call) {
  const bool gaussian = call.from.map == FeatureMap::gaussian;
  GradBlock<T> block;
  block.left = supply.take(call.width * kRows);
  block.left_rows = supply.take(call.mixing ? padded<T>(call.width) * kRows : 0);
  block.slopes = supply.take(kKeys * kRows);
  block.grad_left = supply.take(call.mixing ? 0 : call.width * kRows);
  block.grad_x = supply.take(call.from.depth * kRows);
  block.mass = supply.take(call.mixing ? call.from.features * lanes<T> : 0);
  block.token_rows = supply.take(gaussian ? padded<T>(call.from.depth) * kRows : 0);
  block.point_rows = supply.take(gaussian ? padded<T>(call.from.depth) * call.from.features : 0);
  return block;
}

template <class T>
int64_t feature_grads_scratch(const FeatureGrads<T>& call) {
  Supply<T> supply{nullptr};
  feature_block(supply, call.from);
  grad_block(supply, call);
  return supply.used;
}

// Sets share, scale and unit of each of the `count` tokens; zero in the other lanes.
template <class T>
void weigh_lanes(const FeatureGrads<T>& call, int64_t unit, const int64_t* places, const T* const* left, int64_t count,
                 const FeatureBlock<T>& features, GradBlock<T>& block) {
  for (int r = 0; r < kRows; ++r) block.share[r] = block.scale[r] = block.unit[r] = T(1);
  if (!call.mixing) {
    const T level = call.level[unit];
    for (int r = 0; r < kRows; r += lanes<T>) store<T>(block.share + r, exponential(load<T>(features.log + r) - level));
  } else if (call.mass) {
    for (int64_t r = 0; r < count; ++r) {
      const int64_t at = unit * call.from.tokens + places[r];
      const T* out = call.out + at * call.width;
      T delta = T(0);
      for (int64_t e = 0; e < call.width; ++e) delta += out[e] * left[r][e];
      block.scale[r] = inverse_total<T>(all(call.total[at]))[0];
      block.unit[r] = -delta * block.scale[r];
    }
  }
  for (int64_t r = count; r < kRows; ++r) block.share[r] = block.scale[r] = block.unit[r] = T(0);
}

// The gradients of one block of tokens; those of features are added to the parts of the chunk.
template <class T>
void grads_of_block(const FeatureGrads<T>& call, int64_t task, const int64_t* places, int64_t count,
                    FeatureBlock<T>& features, GradBlock<T>& block) {
  const Featured<T>& from = call.from;
  const int64_t unit = task / call.chunks, item = unit / from.heads, head = unit % from.heads;
  const int64_t wide = padded<T>(call.width), deep = padded<T>(from.depth);
  const bool gaussian = from.map == FeatureMap::gaussian, by_entry = from.points.data == nullptr;
  const T *x[kRows], *left[kRows];
  for (int64_t r = 0; r < count; ++r) {
    x[r] = from.x.at(item, head, places[r]);
    left[r] = call.left.at(item, head, places[r]);
  }
  features_of(from, item, head, x, count, features);
  weigh_lanes(call, unit, places, left, count, features, block);
  transpose<T>(left, count, call.width, T(1), block.left);
  for (int64_t e = 0; call.mixing && e < call.width; ++e)
    for (int r = 0; r < kRows; r += lanes<T>) {
      T* at = block.left + e * kRows + r;
      store<T>(at, load<T>(at) * load<T>(block.scale + r));
    }
  if (call.mixing) pad_rows<T>(left, count, kRows, call.width, block.scale, block.left_rows);
  if (gaussian) pad_rows<T>(x, count, kRows, from.depth, nullptr, block.token_rows);
  for (int64_t i = 0; !call.mixing && i < call.width * kRows; ++i) block.grad_left[i] = T(0);
  for (int64_t i = 0; i < from.depth * kRows; ++i) block.grad_x[i] = T(0);
  Vec<T> pulled[kRows / lanes<T>] = {};  // sum_f of the slopes

  in_feature_tiles(from.features, [&](int64_t f, int64_t some) {
    const T *right[kKeys], *points[kKeys];
    for (int64_t c = 0; c < some; ++c) {
      right[c] = call.right.at(item, head, f + c);
      points[c] = gaussian ? block.point_rows + (f + c) * deep : by_entry ? nullptr : from.points.at(item, head, f + c);
    }
    const T* phi = features.phi + f * kRows;
    if (call.mixing) {
      T* sums[kKeys];
      for (int64_t c = 0; c < some; ++c) sums[c] = call.part_right + (task * from.features + f + c) * wide;
      spread<T>(phi, some, block.left_rows, wide, sums);
    } else {
      weighted_sums<T>(right, some, call.width, phi, block.grad_left);
    }
    dots<T>(right, some, call.width, block.left, block.slopes);
    for (int64_t c = 0; c < some; ++c) {
      const T mass = call.mass ? call.mass[unit * from.features + f + c] : T(0);
      Vec<T> weighed{};
      for (int r = 0; r < kRows; r += lanes<T>) {
        const Vec<T> weight = load<T>(phi + c * kRows + r) * load<T>(block.share + r);
        const Vec<T> partner = load<T>(block.unit + r);
        T* at = block.slopes + c * kRows + r;
        Vec<T> slope = load<T>(at) + mass * partner;
        weighed += weight * partner;
        if (by_entry) {
          const Vec<T> token = load<T>(features.columns + (f + c) * kRows + r);
          const Vec<T> steep = load<T>(features.one + r) * load<T>(block.share + r);
          store<T>(block.grad_x + (f + c) * kRows + r, slope * (token > T(0) ? steep : weight));
        } else {
          slope *= weight;
          store<T>(at, slope);
          pulled[r / lanes<T>] += slope;
        }
      }
      if (call.mixing) add_to<T>(block.mass + (f + c) * lanes<T>, 0, weighed);
    }
    if (gaussian) {
      pull<T>(points, some, from.depth, features.columns, block.slopes, block.grad_x);
      T* sums[kKeys];
      for (int64_t c = 0; c < some; ++c) sums[c] = call.part_points + (task * from.features + f + c) * deep;
      push<T>(block.slopes, some, block.token_rows, deep, points, sums);
    } else if (!by_entry) {
      weighted_sums<T>(points, some, from.depth, block.slopes, block.grad_x);
    }
  });

  // The term -|y|^2 / 2 of the exponent, which cancels in a quotient.
  if (from.map == FeatureMap::exponential && !call.mixing)
    for (int64_t k = 0; k < from.depth; ++k)
      for (int r = 0; r < kRows; r += lanes<T>) {
        T* at = block.grad_x + k * kRows + r;
        store<T>(at, load<T>(at) - load<T>(features.columns + k * kRows + r) * pulled[r / lanes<T>]);
      }
  const T factor = gaussian ? -2 * from.factor : by_entry ? T(1) : from.factor;
  for (int64_t r = 0; r < count; ++r) {
    const int64_t at = unit * from.tokens + places[r];
    for (int64_t k = 0; k < from.depth; ++k) call.grad_x[at * from.depth + k] = factor * block.grad_x[k * kRows + r];
    for (int64_t e = 0; !call.mixing && e < call.width; ++e)
      call.grad_left[at * call.width + e] = block.share[r] * block.grad_left[e * kRows + r];
  }
}

template <class T>
void feature_grads(const FeatureGrads<T>& call, int64_t begin, int64_t end, T* scratch) {
  const Featured<T>& from = call.from;
  Supply<T> supply{scratch};
  FeatureBlock<T> features = feature_block(supply, from);
  GradBlock<T> block = grad_block(supply, call);
  const int64_t wide = padded<T>(call.width), deep = padded<T>(from.depth);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t unit = task / call.chunks, item = unit / from.heads, head = unit % from.heads;
    if (call.mixing) {
      for (int64_t i = 0; i < from.features * wide; ++i) call.part_right[task * from.features * wide + i] = T(0);
      for (int64_t i = 0; i < from.features * lanes<T>; ++i) block.mass[i] = T(0);
    }
    if (from.map == FeatureMap::gaussian)
      for (int64_t f = 0; f < from.features; ++f) {
        const T* point = from.points.at(item, head, f);
        pad_rows<T>(&point, 1, 1, from.depth, nullptr, block.point_rows + f * deep);
        for (int64_t k = 0; k < deep; ++k) call.part_points[(task * from.features + f) * deep + k] = T(0);
      }
    const int64_t first = task % call.chunks * call.chunk;
    const int64_t last = first + call.chunk < from.tokens ? first + call.chunk : from.tokens;
    for (int64_t j = first; j < last;) {
      int64_t places[kRows], count = 0;
      for (; j < last && count < kRows; ++j) {
        if (!call.keep || call.keep[item * from.tokens + j]) {
          places[count++] = j;
          continue;
        }
        const int64_t at = unit * from.tokens + j;
        for (int64_t k = 0; k < from.depth; ++k) call.grad_x[at * from.depth + k] = T(0);
        for (int64_t e = 0; e < call.width; ++e) call.grad_left[at * call.width + e] = T(0);
      }
      if (count) grads_of_block(call, task, places, count, features, block);
    }
    for (int64_t f = 0; call.mixing && f < from.features; ++f)
      call.part_mass[task * from.features + f] = sum<T>(load<T>(block.mass + f * lanes<T>));
  }
}

template <class T>
void feature_merge_grads(const FeatureGrads<T>& call, int64_t begin, int64_t end) {
  const int64_t f = call.from.features, d = call.from.depth;
  const int64_t wide = padded<T>(call.width), deep = padded<T>(d);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t parts = unit * call.chunks * f;
    if (call.grad_right)
      merge_rows<T>(call.part_right + parts * wide, nullptr, call.chunks, f, call.width, wide, T(1),
                    call.grad_right + unit * f * call.width);
    if (call.grad_mass)
      merge_rows<T>(call.part_mass + parts, nullptr, call.chunks, f, 1, 1, T(1), call.grad_mass + unit * f);
    if (call.grad_points)
      merge_rows<T>(call.part_points + parts * deep, nullptr, call.chunks, f, d, deep, -2 * call.from.factor,
                    call.grad_points + unit * f * d);
  }
}

}  // namespace sparing::SPARING_ISA
