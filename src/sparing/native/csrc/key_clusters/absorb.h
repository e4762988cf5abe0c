// Attention of a block of queries to summaries and to nearby keys.
#pragma once

#include "common/simd.h"
#include "common/softmax.h"
#include "common/sums.h"
#include "common/tile.h"
#include "key_clusters/block.h"
#include "key_clusters/weights.h"

namespace sparing::SPARING_ISA {

template <class T>
inline void KeyClustersBlock<T>::absorb_summaries(const T* shift) {
  Block<T>& block = memory.block;
  const int64_t poles = unit * call.clusters;
  for (int r = 0; r < block.used; r += lanes<T>) {
    Vec<T> any_left{};
    const Vec<T> total = long_sum<Vec<T>>(shown, 1, [&](int64_t c) {
      const int64_t slot = memory.slot[memory.visible[c]];
      const Vec<T> f = load<T>(memory.scores + c * kRows + r);
      Vec<T> weight = all(call.weight[poles + memory.visible[c]]);
      if (slot >= 0) weight -= load<T>(memory.gone_weight + slot * kRows + r);
      any_left = larger<T>(any_left, f);
      return f * weight;
    });
    store<T>(block.total + r, total);
    store<T>(block.top + r, any_left > T(0) ? load<T>(shift + r) : all(kNever<T>));
  }
  const T* rows[kKeys];
  for (int64_t c = 0; c < shown; c += kKeys) {
    const int64_t some = shown - c < kKeys ? shown - c : kKeys;
    for (int64_t i = 0; i < some; ++i) rows[i] = call.pole_values + (poles + memory.visible[c + i]) * call.width;
    weighted_sums<T>(rows, some, call.width, memory.scores + c * kRows, block.sums, block.used, call.width * kRows);
  }
  // From here on, slot holds the row of scores of a cluster.
  for (int64_t c = 0; c < shown; ++c) memory.slot[memory.visible[c]] = Int<T>(c);
}

template <class T>
inline void KeyClustersBlock<T>::absorb_exact(const Exact<T>& some, const T* shift, Int<T>* met) {
  Block<T>& block = memory.block;
  const NearMask<T> near = mask(some.place);
  for (int strip = 0; strip < block.used; strip += kStrip<T>) {
    const Range range = some.joined ? seen_by(strip, some) : Range{0, some.count};
    if (range.begin >= range.end) continue;
    dots_strip<T>(some.keys + range.begin, range.end - range.begin, block.depth, block.queries + strip,
                  block.scores + range.begin * kRows + strip);
    for (int r = strip; r < strip + kStrip<T>; r += lanes<T>) {
      Vec<T> high = all(kNever<T>);
      IntVec<T> hits = load<Int<T>>(met + r);
      for (int64_t c = range.begin; c < range.end; ++c) {
        const IntVec<T> hit = near(c, r);
        const Vec<T> score = hit ? load<T>(block.scores + c * kRows + r) : all(kNever<T>);
        store<T>(block.scores + c * kRows + r, score);
        high = larger<T>(high, score);
        hits -= hit;
      }
      store<Int<T>>(met + r, hits);
      Vec<T> top = load<T>(block.top + r), total{};
      if (held<T>(high > top + kFar<T>)) {
        // Rescale only the lanes that need it, so that no lane's rounding depends on its neighbours.
        const Vec<T> higher = high > top + kFar<T> ? high : top, by = higher == kNever<T> ? Vec<T>{} : higher;
        block.shrink(r, exponential(top - by));
        top = higher;
        store<T>(block.top + r, top);
      }
      const Vec<T> by = top == kNever<T> ? Vec<T>{} : top, fade = exponential(load<T>(shift + r) - by);
      for (int64_t c = range.begin; c < range.end; ++c) {
        T* at = block.scores + c * kRows + r;
        const Vec<T> score = load<T>(at);
        Vec<T> weight = exponential(score - by);
        total += weight;
        if (some.row[c] >= 0) {
          const Vec<T> said = fade * some.share[c] * load<T>(memory.scores + some.row[c] * kRows + r);
          weight = score == kNever<T> ? Vec<T>{} : weight - said;
        }
        store<T>(at, weight);
      }
      add_to<T>(block.total + r, kRows, total);
    }
    weighted_sums_strip<T>(some.values + range.begin, range.end - range.begin, block.width,
                           block.scores + range.begin * kRows + strip, block.sums + strip, block.width * kRows);
  }
}

template <class T>
inline void KeyClustersBlock<T>::absorb_near(const T* shift, int64_t* read) {
  Int<T> met[kRows] = {};
  visit_near([&](const Exact<T>& some) { absorb_exact(some, shift, met); });
  for (int64_t r = 0; r < count; ++r) read[r] += met[r];
}

}  // namespace sparing::SPARING_ISA
