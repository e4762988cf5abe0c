// Gradients of causal attention through features: queries in one pass from the first block to the last, with the state
// of the forward pass; keys and values in one from the last to the first, with a state that sums over later rows.
#pragma once

#include "common/simd.h"
#include "common/softmax.h"
#include "common/tile.h"
#include "features/call.h"
#include "features/causal.h"
#include "features/grads.h"
#include "features/maps.h"
#include "features/sums.h"

namespace sparing::SPARING_ISA {

template <class T>
struct CausalGrads {
  T* grads;       // [width][kRows] gradients of the rows, divided by their totals
  T* grad_rows;   // [kRows][padded width] the same, transposed
  T* values;      // [width][kRows] values of the keys
  T* slopes;      // [kKeys][kRows]
  T* own_slopes;  // [kKeys][kRows] the share of the block's own keys or queries
  T* turned;      // [kRows][kRows] slopes of pairs, [query][key]
  T* grad_x;      // [depth][kRows]
  T* levels;      // [queries] level_i of the whole head
  T unit[kRows];  // gradient of the total: minus gradient . output / total
};

template <class T>
CausalGrads<T> causal_grads(Supply<T>& supply, const FeatureCausal<T>& call) {
  CausalGrads<T> grads;
  grads.grads = supply.take(call.width * kRows);
  grads.grad_rows = supply.take(padded<T>(call.width) * kRows);
  grads.values = supply.take(call.width * kRows);
  grads.slopes = supply.take(kKeys * kRows);
  grads.own_slopes = supply.take(kKeys * kRows);
  grads.turned = supply.take(kRows * kRows);
  grads.grad_x = supply.take(call.q.depth * kRows);
  grads.levels = supply.take(call.q.tokens);
  return grads;
}

template <class T>
int64_t feature_causal_grads_scratch(const FeatureCausal<T>& call) {
  Supply<T> supply{nullptr};
  causal_block(supply, call);
  causal_grads(supply, call);
  return supply.used;
}

// Loads the gradients of the block's rows.
template <class T>
void load_grads(const FeatureCausal<T>& call, int64_t unit, const CausalBlock<T>& block, CausalGrads<T>& grads) {
  const T* rows[kRows];
  T scale[kRows];
  for (int r = 0; r < kRows; ++r) scale[r] = T(0), grads.unit[r] = T(0);
  for (int64_t r = 0; r < block.queries; ++r) {
    rows[r] = call.grad.at(unit / call.q.heads, unit % call.q.heads, block.first + r);
    scale[r] = T(1);
    if (!call.divide) continue;
    const int64_t at = unit * call.q.tokens + block.first + r;
    T delta = T(0);
    for (int64_t e = 0; e < call.width; ++e) delta += call.out[at * call.width + e] * rows[r][e];
    scale[r] = inverse_total<T>(all(call.total[at]))[0];
    grads.unit[r] = -delta * scale[r];
  }
  transpose<T>(rows, block.queries, call.width, T(1), grads.grads);
  scale_lanes<T>(grads.grads, call.width, scale);
  pad_rows<T>(rows, block.queries, kRows, call.width, scale, grads.grad_rows);
}

// Computes the derivatives with respect to the tokens from those with respect to phi, which slopes_of(f, some, slopes)
// computes.
template <class T, class Slopes>
SPARING_INLINE void pass_to_tokens(const Featured<T>& from, int64_t item, int64_t head, const FeatureBlock<T>& features,
                                   bool square, CausalGrads<T>& grads, const Slopes& slopes_of) {
  const bool by_entry = from.points.data == nullptr;
  clear(grads.grad_x, from.depth * kRows);
  Vec<T> pulled[kRows / lanes<T>] = {};
  in_feature_tiles(from.features, [&](int64_t f, int64_t some) {
    slopes_of(f, some, grads.slopes);
    for (int64_t c = 0; c < some; ++c)
      for (int r = 0; r < kRows; r += lanes<T>) {
        T* at = grads.slopes + c * kRows + r;
        const Vec<T> slope = load<T>(at), phi = load<T>(features.phi + (f + c) * kRows + r);
        if (by_entry) {
          const Vec<T> token = load<T>(features.columns + (f + c) * kRows + r);
          store<T>(grads.grad_x + (f + c) * kRows + r, slope * (token > T(0) ? load<T>(features.one + r) : phi));
        } else {
          store<T>(at, slope * phi);
          pulled[r / lanes<T>] += slope * phi;
        }
      }
    if (by_entry) return;
    const T* points[kKeys];
    for (int64_t c = 0; c < some; ++c) points[c] = from.points.at(item, head, f + c);
    weighted_sums<T>(points, some, from.depth, grads.slopes, grads.grad_x);
  });
  if (by_entry || !square) return;
  for (int64_t k = 0; k < from.depth; ++k)  // the term -|y|^2 / 2 of the exponent; for queries it cancels
    for (int r = 0; r < kRows; r += lanes<T>) {
      T* at = grads.grad_x + k * kRows + r;
      store<T>(at, load<T>(at) - load<T>(features.columns + k * kRows + r) * pulled[r / lanes<T>]);
    }
}

// to[place][k] = factor * columns[k][lane]
template <class T>
void write_grads(const T* columns, int64_t width, int64_t count, const int64_t* places, T factor, T* to) {
  for (int64_t r = 0; r < count; ++r)
    for (int64_t k = 0; k < width; ++k) to[(places ? places[r] : r) * width + k] = factor * columns[k * kRows + r];
}

template <class T>
SPARING_INLINE T token_factor(const Featured<T>& from) {
  return from.points.data ? from.factor : T(1);
}

template <class T>
void query_grads(const FeatureCausal<T>& call, int64_t unit, CausalBlock<T>& block, CausalGrads<T>& grads) {
  const int64_t item = unit / call.q.heads, head = unit % call.q.heads, wide = padded<T>(call.width);
  FeatureState<T>& state = block.state;
  clear(state);
  for (int64_t first = 0; first < call.q.tokens; first += kRows) {
    load_block(call, item, head, first, block);
    load_grads(call, unit, block, grads);
    find_levels(block, state.level);
    for (int64_t r = 0; r < block.queries; ++r) grads.levels[first + r] = block.level[r];
    T factors[kRows];
    state_factors(block, state.level, factors);
    reduce_masses(block);
    dots<T>(block.value, block.keys, call.width, grads.grads, block.pairs);
    for (int64_t c = 0; c < block.keys; ++c)
      for (int r = 0; r < kRows; r += lanes<T>) {
        T* at = block.pairs + c * kRows + r;
        store<T>(at, load<T>(at) + load<T>(grads.unit + r));
      }
    weigh_pairs(block);
    pass_to_tokens(call.q, item, head, block.q, false, grads, [&](int64_t f, int64_t some, T* slopes) {
      const T *rows[kKeys], *own[kKeys];
      for (int64_t c = 0; c < some; ++c) rows[c] = state.sums + (f + c) * wide, own[c] = block.k.phi + (f + c) * kRows;
      dots<T>(rows, some, call.width, grads.grads, slopes);
      dots<T>(own, some, block.keys, block.pairs, grads.own_slopes);
      for (int64_t c = 0; c < some; ++c)
        for (int r = 0; r < kRows; r += lanes<T>) {
          T* at = slopes + c * kRows + r;
          const Vec<T> past = load<T>(at) + block.masses[f + c] * load<T>(grads.unit + r);
          store<T>(at, past * load<T>(factors + r) + load<T>(grads.own_slopes + c * kRows + r));
        }
    });
    write_grads<T>(grads.grad_x, call.q.depth, block.queries, nullptr, token_factor(call.q),
                   call.grad_q + (unit * call.q.tokens + first) * call.q.depth);
    absorb_keys(state, block.k, block.value, block.keys);
  }
}

// Here the keys are in the lanes. The state holds sum_i phi_f(q_i) gradient_i exp(state.level - level_i) over the
// rows of later blocks, where state.level, that of the first of them, is the lowest.
template <class T>
void key_grads(const FeatureCausal<T>& call, int64_t unit, CausalBlock<T>& block, CausalGrads<T>& grads) {
  const int64_t item = unit / call.q.heads, head = unit % call.q.heads, wide = padded<T>(call.width);
  FeatureState<T>& state = block.state;
  clear(state);
  state.level = T(0);
  for (int64_t first = (call.q.tokens - 1) / kRows * kRows; first >= 0; first -= kRows) {
    load_block(call, item, head, first, block);
    load_grads(call, unit, block, grads);
    for (int64_t r = 0; r < kRows; ++r) block.level[r] = grads.levels[first + (r < block.queries ? r : 0)];
    if (block.keys) {
      transpose<T>(block.value, block.keys, call.width, T(1), grads.values);
      T factors[kRows];  // exp(log_c - state.level)
      for (int r = 0; r < kRows; r += lanes<T>)
        store<T>(factors + r, exponential(load<T>(block.k.log + r) - state.level));
      const T* rows[kRows];
      for (int64_t r = 0; r < block.queries; ++r) rows[r] = grads.grad_rows + r * wide;
      mix_rows<T>(block.q.phi, kRows, call.q.features, block.queries, block.k.phi, block.pairs);
      dots<T>(rows, block.queries, call.width, grads.values, grads.turned);
      for (int64_t i = 0; i < block.queries; ++i)
        for (int r = 0; r < kRows; r += lanes<T>) {
          Vec<T> place = all(T(kRows));  // no query sees a lane without a key
          for (int l = 0; l < lanes<T>; ++l)
            if (r + l < block.keys) place[l] = T(block.places[r + l]);
          T *pair = block.pairs + i * kRows + r, *slope = grads.turned + i * kRows + r;
          const T level = block.level[i] == kNever<T> ? T(0) : block.level[i];
          const Vec<T> weight = place <= T(i) ? exponential(load<T>(block.k.log + r) - level) : Vec<T>{};
          store<T>(pair, load<T>(pair) * weight);
          store<T>(slope, (load<T>(slope) + grads.unit[i]) * weight);
        }
      mix_rows<T>(state.sums, wide, call.q.features, call.width, block.k.phi, block.sums);
      scale_lanes<T>(block.sums, call.width, factors);
      weighted_sums<T>(rows, block.queries, call.width, block.pairs, block.sums);
      write_grads<T>(block.sums, call.width, block.keys, block.places, T(1),
                     call.grad_v + (unit * call.k.tokens + first) * call.width);
      reduce_masses(block);
      pass_to_tokens(call.k, item, head, block.k, true, grads, [&](int64_t f, int64_t some, T* slopes) {
        const T *later[kKeys], *own[kKeys];
        for (int64_t c = 0; c < some; ++c)
          later[c] = state.sums + (f + c) * wide, own[c] = block.q.phi + (f + c) * kRows;
        dots<T>(later, some, call.width, grads.values, slopes);
        dots<T>(own, some, block.queries, grads.turned, grads.own_slopes);
        for (int64_t c = 0; c < some; ++c)
          for (int r = 0; r < kRows; r += lanes<T>) {
            T* at = slopes + c * kRows + r;
            const Vec<T> future = (load<T>(at) + block.masses[f + c]) * load<T>(factors + r);
            store<T>(at, future + load<T>(grads.own_slopes + c * kRows + r));
          }
      });
      write_grads<T>(grads.grad_x, call.k.depth, block.keys, block.places, token_factor(call.k),
                     call.grad_k + (unit * call.k.tokens + first) * call.k.depth);
    }
    if (block.level[0] == kNever<T>) return;  // there is no valid key before this block
    const T shrink = first + kRows < call.q.tokens ? exponential_of<T>(block.level[0] - state.level) : T(0);
    state.shrink(shrink);
    state.level = block.level[0];
    T factors[kRows];
    for (int r = 0; r < kRows; r += lanes<T>) {
      const Vec<T> factor = exponential(state.level - load<T>(block.level + r));
      store<T>(factors + r, factor);
      store<T>(grads.unit + r, load<T>(grads.unit + r) * factor);
    }
    for (int64_t r = 0; r < kRows; ++r)
      for (int64_t e = 0; e < wide; ++e) grads.grad_rows[r * wide + e] *= factors[r];
    in_feature_tiles(state.features, [&](int64_t f, int64_t some) {
      T* sums[kKeys];
      for (int64_t c = 0; c < some; ++c) {
        sums[c] = state.sums + (f + c) * wide;
        state.add_mass(f + c, block.q.phi + (f + c) * kRows, grads.unit);
      }
      spread<T>(block.q.phi + f * kRows, some, grads.grad_rows, wide, sums, kRows, state.rest);
    });
  }
}

template <class T>
void feature_causal_grads(const FeatureCausal<T>& call, int64_t begin, int64_t end, T* scratch) {
  Supply<T> supply{scratch};
  CausalBlock<T> block = causal_block(supply, call);
  CausalGrads<T> grads = causal_grads(supply, call);
  for (int64_t unit = begin; unit < end; ++unit) {
    clear(call.grad_k + unit * call.k.tokens * call.k.depth, call.k.tokens * call.k.depth);
    clear(call.grad_v + unit * call.k.tokens * call.width, call.k.tokens * call.width);
    query_grads(call, unit, block, grads);
    key_grads(call, unit, block, grads);
  }
}

}  // namespace sparing::SPARING_ISA
