// Attention through features: sums over keys for each feature, and sums over features for each query.
#pragma once

#include "common/simd.h"
#include "common/softmax.h"
#include "common/sums.h"
#include "common/tile.h"
#include "common/widen.h"
#include "features/call.h"
#include "features/maps.h"

namespace sparing::SPARING_ISA {

// Sums over keys, to which blocks are added; each weight is divided by exp(level).
template <class T>
struct FeatureState {
  int64_t features, width;
  T* sums;       // [features][padded width]
  T* mass;       // [features][lanes], one number for each lane of the blocks, then their rests
  T* rows;       // [kRows][padded width] weighted values of a block
  T* share;      // [kRows] factor of each lane
  int64_t rest;  // how far after the sums their rests are; 0: no compensation, for few blocks
  T level;

  int64_t summed() const { return features * padded<T>(width) + rest; }  // entries of sums and rests

  SPARING_INLINE void shrink(T factor) {
    for (int64_t i = 0; i < summed(); ++i) sums[i] *= factor;
    for (int64_t i = 0; i < 2 * features * lanes<T>; ++i) mass[i] *= factor;
  }

  // Adds the weights of a block of tokens to the mass of a feature.
  SPARING_INLINE void add_mass(int64_t feature, const T* phi, const T* factors) {
    Vec<T> part{};
    for (int r = 0; r < kRows; r += lanes<T>) part += load<T>(phi + r) * load<T>(factors + r);
    add_to<T>(mass + feature * lanes<T>, features * lanes<T>, part);
  }
};

template <class T>
FeatureState<T> feature_state(Supply<T>& supply, int64_t features, int64_t width, T* sums) {
  const int64_t wide = padded<T>(width), rest = sums ? 0 : features * wide;
  return {features,
          width,
          sums ? sums : supply.take(2 * rest),
          supply.take(2 * features * lanes<T>),
          supply.take(kRows * wide),
          supply.take(kRows),
          rest,
          kNever<T>};
}

template <class T>
void clear(FeatureState<T>& state) {
  clear(state.sums, state.summed());
  clear(state.mass, 2 * state.features * lanes<T>);
  state.level = kNever<T>;
}

template <class T>
SPARING_INLINE T exponential_of(T x) {
  return exponential(all(x))[0];
}

// Raises the level of the state, and scales its sums accordingly.
template <class T>
void raise_level(FeatureState<T>& state, T level) {
  if (level <= state.level) return;
  state.shrink(exponential_of<T>(state.level - level));
  state.level = level;
}

// Adds `count` keys.
template <class T>
void absorb_keys(FeatureState<T>& state, const FeatureBlock<T>& block, const T* const* values, int64_t count) {
  if (!count) return;
  const int64_t wide = padded<T>(state.width);
  T level = state.level;
  for (int64_t r = 0; r < count; ++r)
    if (block.log[r] > level) level = block.log[r];
  raise_level(state, level);
  for (int r = 0; r < kRows; r += lanes<T>) store<T>(state.share + r, exponential(load<T>(block.log + r) - level));
  for (int64_t r = 0; r < kRows; ++r) {
    T* row = state.rows + r * wide;
    const bool seen = r < count;
    if (!seen) state.share[r] = T(0);
    for (int64_t e = 0; e < wide; ++e) row[e] = seen && e < state.width ? state.share[r] * values[r][e] : T(0);
  }
  in_feature_tiles(state.features, [&](int64_t f, int64_t some) {
    T* rows[kKeys];
    for (int64_t c = 0; c < some; ++c) {
      rows[c] = state.sums + (f + c) * wide;
      state.add_mass(f + c, block.phi + (f + c) * kRows, state.share);
    }
    spread<T>(block.phi + f * kRows, some, state.rows, wide, rows, kRows, state.rest);
  });
}

template <class T>
int64_t feature_sums_scratch(const FeatureSums<T>& call) {
  Supply<T> supply{nullptr};
  feature_block(supply, call.from);
  T aside;
  feature_state(supply, call.from.features, call.width, &aside);
  supply.take(call.values.room(kRows, call.width));
  return supply.used;
}

template <class T>
void feature_sums(const FeatureSums<T>& call, int64_t begin, int64_t end, T* scratch) {
  const Featured<T>& from = call.from;
  Supply<T> supply{scratch};
  FeatureBlock<T> block = feature_block(supply, from);
  const int64_t size = from.features * padded<T>(call.width);
  FeatureState<T> state = feature_state(supply, from.features, call.width, call.part_sums);
  T* room = supply.take(call.values.room(kRows, call.width));
  for (int64_t task = begin; task < end; ++task) {
    const int64_t unit = task / call.chunks, item = unit / from.heads, head = unit % from.heads;
    const int64_t first = task % call.chunks * call.chunk;
    const int64_t last = first + call.chunk < from.tokens ? first + call.chunk : from.tokens;
    state.sums = call.part_sums + task * size;
    clear(state);
    for (int64_t j = first; j < last;) {
      const T *keys[kRows], *values[kRows];
      int64_t count = 0;
      for (; j < last && count < kRows; ++j) {
        if (call.keep && !call.keep[item * from.tokens + j]) continue;
        keys[count] = token_of(from, item, head, j, count, block);
        values[count] = row_of(call.values, item, head, j, call.width, room + call.values.room(count, call.width));
        ++count;
      }
      if (!count) continue;
      features_of(from, item, head, keys, count, block);
      absorb_keys(state, block, values, count);
    }
    for (int64_t f = 0; f < from.features; ++f)
      call.part_mass[task * from.features + f] = sum<T>(load<T>(state.mass + f * lanes<T>));
    call.part_level[task] = state.level;
  }
}

// to[i] = factor * the sum of row i over the chunks of a head, each chunk times its share (null: 1)
template <class T>
void merge_rows(const T* parts, const T* shares, int64_t chunks, int64_t rows, int64_t width, int64_t stride, T factor,
                T* to) {
  for (int64_t f = 0; f < rows; ++f)
    for (int64_t e = 0; e < width; ++e) {
      Running<T> total;
      for (int64_t c = 0; c < chunks; ++c) total.add((shares ? shares[c] : T(1)) * parts[(c * rows + f) * stride + e]);
      to[f * width + e] = factor * total.sum;
    }
}

template <class T>
void feature_merge(const FeatureSums<T>& call, int64_t begin, int64_t end) {
  const int64_t features = call.from.features, wide = padded<T>(call.width);
  for (int64_t unit = begin; unit < end; ++unit) {
    T* levels = call.part_level + unit * call.chunks;
    T level = kNever<T>;
    for (int64_t c = 0; c < call.chunks; ++c) level = levels[c] > level ? levels[c] : level;
    if (level == kNever<T>) level = T(0);
    for (int64_t c = 0; c < call.chunks; ++c) levels[c] = exponential_of<T>(levels[c] - level);  // now shares
    const int64_t parts = unit * call.chunks * features;
    merge_rows<T>(call.part_sums + parts * wide, levels, call.chunks, features, call.width, wide, T(1),
                  call.sums + unit * features * call.width);
    merge_rows<T>(call.part_mass + parts, levels, call.chunks, features, 1, 1, T(1), call.mass + unit * features);
    call.level[unit] = level;
  }
}

// out[r][e] = factors[r] * sums[e][r] for r < count
template <class T>
void write_rows(const T* sums, int64_t width, int64_t count, const T* factors, T* out) {
  constexpr int64_t kLine = 64 / sizeof(T);  // entries of a row that share a cache line
  for (int64_t first = 0; first < width; first += kLine) {
    const int64_t last = first + kLine < width ? first + kLine : width;
    for (int64_t r = 0; r < count; ++r)
      for (int64_t e = first; e < last; ++e) out[r * width + e] = factors[r] * sums[e * kRows + r];
  }
}

// One over a total, or zero where it is too small to divide by.
template <class T>
SPARING_INLINE Vec<T> inverse_total(Vec<T> total) {
  constexpr T smallest = sizeof(T) == 4 ? T(1.17549435e-30) : T(2.2250738585072014e-300);
  return total < smallest ? Vec<T>{} : T(1) / total;
}

template <class T>
int64_t feature_mix_tasks(const FeatureMix<T>& call) {
  return call.from.items * call.from.heads * ((call.from.tokens + kRows - 1) / kRows);
}

template <class T>
int64_t feature_mix_scratch(const FeatureMix<T>& call) {
  Supply<T> supply{nullptr};
  feature_block(supply, call.from);
  supply.take(call.width * kRows);
  return supply.used;
}

template <class T>
void feature_mix(const FeatureMix<T>& call, int64_t begin, int64_t end, T* scratch) {
  const Featured<T>& from = call.from;
  Supply<T> supply{scratch};
  FeatureBlock<T> block = feature_block(supply, from);
  T* sums = supply.take(call.width * kRows);
  const int64_t blocks = (from.tokens + kRows - 1) / kRows;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t unit = task / blocks, item = unit / from.heads, head = unit % from.heads;
    const int64_t first = task % blocks * kRows;
    const int64_t count = from.tokens - first < kRows ? from.tokens - first : kRows;
    const T* queries[kRows];
    for (int64_t r = 0; r < count; ++r) queries[r] = token_of(from, item, head, first + r, r, block);
    features_of(from, item, head, queries, count, block);
    for (int64_t i = 0; i < call.width * kRows; ++i) sums[i] = T(0);
    in_feature_tiles(from.features, [&](int64_t f, int64_t some) {
      const T* rows[kKeys];
      for (int64_t c = 0; c < some; ++c) rows[c] = call.table.at(item, head, f + c);
      weighted_sums<T>(rows, some, call.width, block.phi + f * kRows, sums);
    });
    T factors[kRows], totals[kRows];
    for (int r = 0; r < kRows; r += lanes<T>) {
      Vec<T> total{}, factor = all(T(1));
      if (call.mass) {
        const T* mass = call.mass + unit * from.features;
        for (int64_t f = 0; f < from.features; ++f) total += all(mass[f]) * load<T>(block.phi + f * kRows + r);
        factor = inverse_total<T>(total);
      }
      store<T>(factors + r, factor), store<T>(totals + r, total);
    }
    write_rows<T>(sums, call.width, count, factors, call.out + (unit * from.tokens + first) * call.width);
    if (call.mass)
      for (int64_t r = 0; r < count; ++r) call.total[unit * from.tokens + first + r] = totals[r];
  }
}

}  // namespace sparing::SPARING_ISA
