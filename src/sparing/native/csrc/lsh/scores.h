// Scores of a strip of queries against the keys that they see in one round.
#pragma once

#include "common/simd.h"
#include "common/softmax.h"
#include "common/tile.h"
#include "lsh/call.h"
#include "lsh/gather.h"
#include "lsh/strip.h"

namespace sparing::SPARING_ISA {

template <class T>
struct UnsignedOf;
template <>
struct UnsignedOf<float> {
  using type = uint32_t;
};
template <>
struct UnsignedOf<double> {
  using type = uint64_t;
};

// Arcs of a vector of queries in one round.
template <class T>
struct LaneArcs {
  IntVec<T> from, length;

  SPARING_INLINE IntVec<T> hold(Int<T> place) const {
    typedef Vec<typename UnsignedOf<T>::type> Steps;
    // Negative steps are large as unsigned numbers.
    return reinterpret_cast<Steps>(place - from) < reinterpret_cast<Steps>(length);
  }
};

template <class T>
LaneArcs<T> lane_arcs(const LshStrip<T>& strip, int64_t round, int r) {
  return {load<Int<T>>(strip.from + round * kStrip<T> + r), load<Int<T>>(strip.length + round * kStrip<T> + r)};
}

// Sets the scores of lanes from r on to -inf where a query does not see the key in this round, or saw it in one of N
// rounds from `first` on. Returns the largest scores.
template <class T, int N>
Vec<T> mask_scores(LshStrip<T>& strip, const LshWindow<T>& window, const Lsh<T>& call, int64_t round, int64_t first,
                   int64_t valid, int r) {
  const LaneArcs<T> now = lane_arcs(strip, round, r);
  LaneArcs<T> earlier[N + 1];
  for (int e = 0; e < N; ++e) earlier[e] = lane_arcs(strip, first + e, r);
  const int32_t* place = window.place + first * call.window + (strip.low - window.low);
  Vec<T> top = all(kNever<T>);
  for (int64_t c = 0; c < strip.high - strip.low; ++c) {
    IntVec<T> seen = now.hold(Int<T>(strip.low + c));
    for (int e = 0; e < N; ++e) seen &= ~earlier[e].hold(Int<T>(place[e * call.window + c]));
    if (call.wraps)
      for (int e = 0; e < N; ++e) seen &= ~earlier[e].hold(Int<T>(place[e * call.window + c] - valid));
    T* at = strip.scores + c * kStrip<T> + r;
    const Vec<T> score = seen ? load<T>(at) : all(kNever<T>);
    top = larger<T>(top, score);
    store<T>(at, score);
  }
  return top;
}

// Computes the scores of all keys: -inf where a query does not see the key or, if call.once, saw it in an earlier
// round.
template <class T>
void strip_scores(LshStrip<T>& strip, const LshWindow<T>& window, const Lsh<T>& call, int64_t unit, int64_t round) {
  const int64_t deep = padded<T>(call.depth), valid = call.counts[unit / call.heads];
  strip_dots<T>(window.keys + (strip.low - window.low) * deep, deep, strip.high - strip.low, call.depth, strip.queries,
                strip.scores);
  for (int r = 0; r < kStrip<T>; r += lanes<T>) {
    Vec<T> top;
    if (call.once && round > 0)
      in_tiles<3>(round, [&]<int N>(int64_t e) { top = mask_scores<T, N>(strip, window, call, round, e, valid, r); });
    else
      top = mask_scores<T, 0>(strip, window, call, round, 0, valid, r);
    store<T>(strip.top + r, top);
  }
}

}  // namespace sparing::SPARING_ISA
