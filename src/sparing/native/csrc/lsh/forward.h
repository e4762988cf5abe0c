// Forward pass of softmax over the keys that are seen in hash rounds (lsh in Python).
#pragma once

#include "common/simd.h"
#include "common/softmax.h"
#include "common/sums.h"
#include "common/tile.h"
#include "lsh/call.h"
#include "lsh/gather.h"
#include "lsh/scores.h"
#include "lsh/strip.h"

namespace sparing::SPARING_ISA {

// Turns the scores of a round into weights and adds the weighted values to the sums of the queries.
template <class T>
void absorb_strip(LshStrip<T>& strip, const LshWindow<T>& window, const Lsh<T>& call, int64_t unit, bool fresh) {
  const int64_t keys = strip.high - strip.low, wide = padded<T>(call.width);
  T top[kStrip<T>], total[kStrip<T>], factor[kStrip<T>];
  for (int64_t r = 0; r < kStrip<T>; ++r) {
    const bool begun = !fresh && r < strip.count;
    top[r] = begun ? call.norm.top[unit * call.queries + strip.query[r]] : kNever<T>;
    total[r] = begun ? call.norm.total[unit * call.queries + strip.query[r]] : T(0);
  }
  for (int r = 0; r < kStrip<T>; r += lanes<T>) {
    const Vec<T> before = load<T>(top + r);
    const Vec<T> highest = larger<T>(before, load<T>(strip.top + r));
    Running<Vec<T>> sum;
    const Vec<T> shift = highest == kNever<T> ? Vec<T>{} : highest;
    in_places(call.in_turn ? 0 : strip.low, keys, call.in_turn ? keys : call.tile, [&](int64_t begin, int64_t end) {
      Vec<T> part{};
      for (int64_t c = begin; c < end; ++c) {
        T* at = strip.scores + c * kStrip<T> + r;
        const Vec<T> weight = exponential_below(load<T>(at) - shift);
        store<T>(at, weight);
        part += weight;
      }
      sum.add(part);
    });
    const Vec<T> shrink = exponential_below(before - shift);
    store<T>(factor + r, shrink);
    store<T>(top + r, highest);
    store<T>(total + r, load<T>(total + r) * shrink + sum.sum);
  }
  for (int64_t r = 0; r < kStrip<T>; ++r) {
    const bool begun = !fresh && r < strip.count;
    const int64_t query = unit * call.queries + (begun ? strip.query[r] : 0);
    copy_row<T>(call.out + query * call.width, begun ? call.width : 0, wide, strip.sums + r * wide, factor[r]);
  }
  clear(strip.sums + kStrip<T> * wide, kStrip<T> * wide);
  mix_to_lanes<T>(strip.scores, window.values + (strip.low - window.low) * wide, strip.first, strip.last, strip.low,
                  keys, call.tile, wide, strip.sums, call.in_turn ? 0 : kStrip<T> * wide);
  for (int64_t r = 0; r < strip.count; ++r) {
    const int64_t query = unit * call.queries + strip.query[r];
    copy_row<T>(strip.sums + r * wide, call.width, call.width, call.out + query * call.width);
    call.norm.top[query] = top[r], call.norm.total[query] = total[r];
  }
}

// Divides the sums of a query by its total weight. If call.itself, a query that saw no key attends to its own, if that
// is valid.
template <class T>
void finish_query(const Lsh<T>& call, int64_t unit, int64_t i) {
  const int64_t item = unit / call.heads, head = unit % call.heads, query = unit * call.queries + i;
  T *out = call.out + query * call.width, *top = call.norm.top + query, *total = call.norm.total + query;
  if (*total != T(0)) {
    const T inverse = inverse_of(*total);
    for (int64_t e = 0; e < call.width; ++e) out[e] *= inverse;
  } else if (call.itself && (!call.keep || call.keep[item * call.keys + i])) {
    T score = T(0);
    with_stored(call.q, item, head, i, [&](const auto* q) {
      with_stored(call.k, item, head, i, [&](const auto* k) {
        for (int64_t d = 0; d < call.depth; ++d) score += widen(q[d]) * widen(k[d]);
      });
    });
    with_stored(call.v, item, head, i, [&](const auto* v) { copy_row<T>(v, call.width, call.width, out); });
    *top = score * call.scale, *total = T(1);
  }
  call.lse[query] = log_sum_exp(*top, *total);
}

template <class T>
void lsh_forward(const Lsh<T>& call, const Arcs* arcs, int64_t unit, int64_t round, int64_t first, int64_t last,
                 T* scratch) {
  LshWindow<T> window{};
  LshStrip<T> strip{};
  lay_out_lsh<T>(&window, &strip, call, scratch, false);
  for (; first < last; first += strip.count) {
    gather_strip(strip, call, arcs, unit, round, first, last - first);
    slide_window(window, call, arcs, unit, round, strip.low, strip.high);
    fetch_next(window, call, arcs[round], unit, first + strip.count);
    strip_scores(strip, window, call, unit, round);
    absorb_strip(strip, window, call, unit, round == 0);
    if (round + 1 == call.rounds)
      for (int64_t r = 0; r < strip.count; ++r) finish_query(call, unit, strip.query[r]);
  }
}

}  // namespace sparing::SPARING_ISA
