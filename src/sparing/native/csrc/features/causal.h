// Causal attention through features: queries are multiplied with the keys of their own block pair by pair, and with
// all earlier keys through a running state. Row i is divided by exp(level_i), level_i the largest log of a key that it
// sees, so that nothing in row i depends on a later key.
#pragma once

#include "common/simd.h"
#include "common/softmax.h"
#include "common/tile.h"
#include "common/widen.h"
#include "features/call.h"
#include "features/maps.h"
#include "features/sums.h"

namespace sparing::SPARING_ISA {

// A block of queries, and the valid keys at the same positions.
template <class T>
struct CausalBlock {
  FeatureBlock<T> q, k;
  FeatureState<T> state;
  T* pairs;   // [kRows][kRows]
  T* sums;    // [width][kRows]
  T* masses;  // [features]
  T* level;   // [kRows]
  T* room;    // [kRows][width] values of 16 bits, widened
  int64_t first, queries, keys;
  int64_t places[kRows];  // positions of the keys, counted from `first`
  const T *query[kRows], *key[kRows], *value[kRows];
};

template <class T>
CausalBlock<T> causal_block(Supply<T>& supply, const FeatureCausal<T>& call) {
  CausalBlock<T> block;
  block.q = feature_block(supply, call.q);
  block.k = feature_block(supply, call.k);
  block.state = feature_state<T>(supply, call.q.features, call.width, nullptr);
  block.pairs = supply.take(kRows * kRows);
  block.sums = supply.take(call.width * kRows);
  block.masses = supply.take(call.q.features);
  block.level = supply.take(kRows);
  block.room = supply.take(call.values.room(kRows, call.width));
  return block;
}

// Finds the tokens of the block from position `first` on, and their features.
template <class T>
void load_block(const FeatureCausal<T>& call, int64_t item, int64_t head, int64_t first, CausalBlock<T>& block) {
  const int64_t n_q = call.q.tokens, n_k = call.k.tokens;
  block.first = first, block.keys = 0;
  block.queries = n_q - first < kRows ? n_q - first : kRows;
  for (int64_t r = 0; r < block.queries; ++r) {
    const int64_t j = first + r;
    block.query[r] = token_of(call.q, item, head, j, r, block.q);
    if (j >= n_k || (call.keep && !call.keep[item * n_k + j])) continue;
    const int64_t c = block.keys++;
    block.places[c] = r;
    block.key[c] = token_of(call.k, item, head, j, c, block.k);
    block.value[c] = row_of(call.values, item, head, j, call.width, block.room + call.values.room(c, call.width));
  }
  features_of(call.q, item, head, block.query, block.queries, block.q);
  if (block.keys) features_of(call.k, item, head, block.key, block.keys, block.k);
}

// level_i of the block's rows, given the level of all earlier keys.
template <class T>
void find_levels(CausalBlock<T>& block, T before) {
  int64_t c = 0;
  for (int64_t r = 0; r < kRows; ++r) {
    for (; c < block.keys && block.places[c] <= r; ++c)
      if (block.k.log[c] > before) before = block.k.log[c];
    block.level[r] = before;
  }
}

template <class T>
SPARING_INLINE Vec<T> finite_level(Vec<T> level) {
  return level == kNever<T> ? Vec<T>{} : level;
}

// pairs[c][i] *= exp(log_c - level_i) where query i sees key c, else 0
template <class T>
void weigh_pairs(CausalBlock<T>& block) {
  for (int64_t c = 0; c < block.keys; ++c)
    for (int r = 0; r < kRows; r += lanes<T>) {
      const Vec<T> row = iota<T>() + T(r), level = finite_level<T>(load<T>(block.level + r));
      T* at = block.pairs + c * kRows + r;
      const Vec<T> weight = load<T>(at) * exponential(block.k.log[c] - level);
      store<T>(at, row >= T(block.places[c]) ? weight : Vec<T>{});
    }
}

// sums[e][lane] = sum_f phi[f][lane] rows[f][e]
template <class T>
void mix_rows(const T* rows, int64_t stride, int64_t features, int64_t width, const T* phi, T* sums) {
  clear(sums, width * kRows);
  in_feature_tiles(features, [&](int64_t f, int64_t some) {
    const T* tile[kKeys];
    for (int64_t c = 0; c < some; ++c) tile[c] = rows + (f + c) * stride;
    weighted_sums<T>(tile, some, width, phi + f * kRows, sums);
  });
}

// columns[e][lane] *= factors[lane]
template <class T>
void scale_lanes(T* columns, int64_t count, const T* factors) {
  for (int64_t e = 0; e < count; ++e)
    for (int r = 0; r < kRows; r += lanes<T>) {
      T* at = columns + e * kRows + r;
      store<T>(at, load<T>(at) * load<T>(factors + r));
    }
}

// factors[r] = exp(log - level_r): the factor of the state in each row.
template <class T>
void state_factors(const CausalBlock<T>& block, T log, T* factors) {
  for (int r = 0; r < kRows; r += lanes<T>)
    store<T>(factors + r, exponential(log - finite_level<T>(load<T>(block.level + r))));
}

template <class T>
void reduce_masses(CausalBlock<T>& block) {
  for (int64_t f = 0; f < block.state.features; ++f) block.masses[f] = sum<T>(load<T>(block.state.mass + f * lanes<T>));
}

template <class T>
int64_t feature_causal_scratch(const FeatureCausal<T>& call) {
  Supply<T> supply{nullptr};
  causal_block(supply, call);
  return supply.used;
}

template <class T>
void feature_causal(const FeatureCausal<T>& call, int64_t begin, int64_t end, T* scratch) {
  Supply<T> supply{scratch};
  CausalBlock<T> block = causal_block(supply, call);
  FeatureState<T>& state = block.state;
  const int64_t features = call.q.features;
  for (int64_t unit = begin; unit < end; ++unit) {
    clear(state);
    for (int64_t first = 0; first < call.q.tokens; first += kRows) {
      load_block(call, unit / call.q.heads, unit % call.q.heads, first, block);
      find_levels(block, state.level);
      T factors[kRows], totals[kRows];
      state_factors(block, state.level, factors);
      mix_rows<T>(state.sums, padded<T>(call.width), features, call.width, block.q.phi, block.sums);
      scale_lanes<T>(block.sums, call.width, factors);
      mix_rows<T>(block.k.phi, kRows, block.keys ? features : 0, block.keys, block.q.phi, block.pairs);
      weigh_pairs(block);
      weighted_sums<T>(block.value, block.keys, call.width, block.pairs, block.sums);
      reduce_masses(block);
      for (int r = 0; r < kRows; r += lanes<T>) {
        Vec<T> total{};
        for (int64_t f = 0; f < features; ++f) total += block.masses[f] * load<T>(block.q.phi + f * kRows + r);
        total *= load<T>(factors + r);
        for (int64_t c = 0; c < block.keys; ++c) total += load<T>(block.pairs + c * kRows + r);
        store<T>(totals + r, total);
        store<T>(factors + r, call.divide ? inverse_total<T>(total) : all(T(1)));
      }
      const int64_t at = unit * call.q.tokens + first;
      write_rows<T>(block.sums, call.width, block.queries, factors, call.out + at * call.width);
      for (int64_t r = 0; r < block.queries; ++r) call.total[at + r] = totals[r];
      absorb_keys(state, block.k, block.value, block.keys);
    }
  }
}

}  // namespace sparing::SPARING_ISA
