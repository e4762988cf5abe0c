// What expanding a cluster is worth to each query, and which clusters it expands.
#pragma once

#include "common/simd.h"
#include "common/softmax.h"
#include "common/tile.h"
#include "key_clusters/block.h"
#include "key_clusters/memory.h"
#include "key_clusters/weights.h"

namespace sparing::SPARING_ISA {

template <class T>
inline void KeyClustersBlock<T>::sound(T* alarm) const {
  int64_t at = call.block ? own[0] / call.block - 1 : 0;
  at = unit * call.means + (at > 0 ? at : 0);
  const T* mean = call.mean + at * call.depth;
  const T spread = call.variance[at] * call.scale * call.scale;
  const T calm = spread >= kNormal<T> ? T(1) / spread : T(0);
  for (int r = 0; r < memory.block.used; r += lanes<T>) {
    Vec<T> total{};
    for (int64_t k = 0; k < call.depth; ++k) {
      const Vec<T> away = load<T>(memory.block.queries + k * kRows + r) - call.scale * mean[k];
      total += away * away;
    }
    store<T>(alarm + r, total * calm);
  }
}

template <class T>
inline void KeyClustersBlock<T>::score() {
  Block<T>& block = memory.block;
  const T* rows[kKeys];
  for (int64_t c = 0; c < shown; c += kKeys) {
    const int64_t some = shown - c < kKeys ? shown - c : kKeys;
    for (int64_t i = 0; i < some; ++i)
      rows[i] = call.pole_keys + (unit * call.clusters + memory.visible[c + i]) * call.depth;
    dots<T>(rows, some, call.depth, block.queries, memory.scores + c * kRows, block.used);
  }
}

template <class T>
inline T KeyClustersBlock<T>::usual_scatter() const {
  T sum = T(0);
  for (int64_t c = 0; c < shown; ++c) sum += memory.sizes[c] * call.scatter[unit * call.clusters + memory.visible[c]];
  return sum / T(members);
}

template <class T>
inline T KeyClustersBlock<T>::bound() const {
  return call.tolerance > T(0) ? call.tolerance * call.tolerance * (call.by_mass ? T(1) : usual_scatter()) : T(0);
}

template <class T>
inline void KeyClustersBlock<T>::value(int r, const T* alarm, T bound, T* shift) {
  constexpr int N = lanes<T>;
  const Vec<T> loud = load<T>(alarm + r);
  const int64_t poles = unit * call.clusters;
  Vec<T> top = all(kNever<T>);
  for (int64_t c = 0; c < shown; ++c) {
    const int64_t at = poles + memory.visible[c];
    T* score = memory.scores + c * kRows + r;
    Vec<T> x = load<T>(score) + call.offset[at];
    if (call.second) {
      const Vec<T> variance = loud * call.spread[at];
      x += T(0.5) * (variance < call.cap ? variance : all(call.cap));
    }
    store<T>(score, x);
    top = larger<T>(top, x);
  }
  const Vec<T> by = top == kNever<T> ? Vec<T>{} : top;
  store<T>(shift + r, by);
  Vec<T> total = load<T>(near_total + r) * exponential(load<T>(near_top + r) - by);
  for (int64_t c = 0; c < shown; ++c) {
    const int64_t at = poles + memory.visible[c];
    T* score = memory.scores + c * kRows + r;
    const int64_t slot = memory.slot[memory.visible[c]];
    Vec<T> f = exponential_below(load<T>(score) - by), mass = f * call.weight[at], left = all(memory.sizes[c]);
    if (slot >= 0) {
      left -= load<T>(memory.gone + slot * kRows + r);
      f = left > T(0) ? f : Vec<T>{};
      mass = left > T(0) ? f * (call.weight[at] - load<T>(memory.gone_weight + slot * kRows + r)) : Vec<T>{};
    }
    store<T>(score, f);
    total += mass;
    store<T>(memory.left + c * N, left);
    const Vec<T> worth = mass * mass / (left > T(1) ? left : all(T(1)));
    store<T>(memory.worth + c * N, call.by_mass ? worth : worth * error_factor(at, loud));
  }
  store<T>(least + r, bound > T(0) ? total * total * bound : Vec<T>{});  // the square may overflow
  store<T>(light + r, total * light_share(call.tolerance, shown));
  for (int64_t c = shown; c < shown + kChains; ++c) store<T>(memory.worth + c * N, all(T(-1)));
}

template <class T>
SPARING_INLINE Vec<T> KeyClustersBlock<T>::error_factor(int64_t at, Vec<T> loud) const {
  const Vec<T> variance = loud * call.spread[at];
  return surplus<T>(variance < call.cap ? variance : all(call.cap)) * call.scatter[at];
}

template <class T>
SPARING_INLINE IntVec<T> KeyClustersBlock<T>::best_fit(Vec<T> budget, Vec<T> least) const {
  constexpr int N = lanes<T>;
  const int64_t part = (shown + kChains - 1) / kChains;
  Vec<T> best[kChains];
  IntVec<T> which[kChains], at{};
  for (int j = 0; j < kChains; ++j) best[j] = least, which[j] = Int<T>(-1) - IntVec<T>{};
  for (int64_t i = 0; i < part; ++i, at += 1)
    for (int j = 0; j < kChains; ++j) {
      const int64_t c = (j * part + i) * N;
      const Vec<T> worth = load<T>(memory.worth + c);
      const IntVec<T> better = (worth > best[j]) & (load<T>(memory.left + c) <= budget);
      best[j] = better ? worth : best[j];
      which[j] = better ? at : which[j];
    }
  for (int j = 1; j < kChains; ++j) {
    const IntVec<T> better = best[j] > best[0];
    best[0] = better ? best[j] : best[0];
    which[0] = better ? which[j] + Int<T>(j * part) : which[0];
  }
  return which[0];
}

template <class T>
inline int64_t KeyClustersBlock<T>::choose(int r, int64_t pairs, int64_t first_in_task, const T* alarm, T* missed,
                                           int64_t* read, int64_t* summaries) {
  constexpr int N = lanes<T>;
  const auto expand = [&](int64_t c, int lane) {
    memory.scores[c * kRows + r + lane] = T(0);
    memory.worth[c * N + lane] = T(-1);
    memory.pair_query[pairs] = Int<T>(first_in_task + r + lane);
    memory.pair_cluster[pairs++] = memory.visible[c];
  };
  Vec<T> near{};
  for (int64_t s = 0; s < slots; ++s) near += load<T>(memory.gone + s * kRows + r);
  Vec<T> budget = all(T(call.budget)), opened{};
  for (int lane = 0; lane < N; ++lane) {
    if (r + lane >= count) budget[lane] = T(-1);
    if (r + lane >= count || call.tolerance > T(0) || T(members) - near[lane] > T(call.budget)) continue;
    for (int64_t c = 0; c < shown; ++c)
      if (memory.left[c * N + lane] > T(0)) expand(c, lane);
    opened[lane] = T(members) - near[lane];
    budget[lane] = T(-1);
  }
  for (;;) {
    const IntVec<T> which = best_fit(budget, load<T>(least + r));
    const uint32_t found = held<T>(which >= 0);
    if (!found) break;
    for (int lane = 0; lane < N; ++lane) {
      if (!(found >> lane & 1)) continue;
      const T size = memory.left[which[lane] * N + lane];
      budget[lane] -= size, opened[lane] += size;
      expand(which[lane], lane);
    }
  }
  Vec<T> error{}, spared{};
  for (int64_t c = 0; c < shown; ++c) {
    const Vec<T> worth = load<T>(memory.worth + c * N);
    const Vec<T> left = load<T>(memory.left + c * N);
    Vec<T> kept = worth > T(0) ? worth * left : Vec<T>{};
    if (call.by_mass) kept *= error_factor(unit * call.clusters + memory.visible[c], load<T>(alarm + r));
    error += kept;
    if (call.tolerance > T(0)) {
      T* score = memory.scores + c * kRows + r;
      const int64_t slot = memory.slot[memory.visible[c]];
      Vec<T> weight = all(call.weight[unit * call.clusters + memory.visible[c]]);
      if (slot >= 0) weight -= load<T>(memory.gone_weight + slot * kRows + r);
      const Vec<T> f = load<T>(score);
      store<T>(score, f * weight < load<T>(light + r) ? Vec<T>{} : f);
    }
    spared += (worth >= T(0)) & (left > T(0)) ? all(T(1)) : Vec<T>{};
  }
  for (int lane = 0; lane < N && r + lane < count; ++lane) {
    missed[r + lane] = error[lane];
    read[r + lane] = int64_t(opened[lane]);
    summaries[r + lane] = int64_t(spared[lane]);
  }
  return pairs;
}

template <class T>
inline void KeyClustersBlock<T>::revive(int r, const T* alarm, T* shift) {
  constexpr int N = lanes<T>;
  constexpr T kFaded = sizeof(T) == 4 ? T(0x1p-60) : T(0x1p-500);
  Vec<T> most{};
  for (int64_t c = 0; c < shown; ++c) most = larger<T>(most, load<T>(memory.scores + c * kRows + r));
  for (int lane = 0; lane < N && r + lane < count; ++lane) {
    if (most[lane] >= kFaded || light[r + lane] > T(0)) continue;
    T top = kNever<T>;
    for (int64_t c = 0; c < shown; ++c) {
      if (memory.worth[c * N + lane] < T(0) || !(memory.left[c * N + lane] > T(0))) continue;
      const int64_t at = unit * call.clusters + memory.visible[c];
      const T variance = alarm[r + lane] * call.spread[at];
      T score = call.offset[at] + (call.second ? T(0.5) * (variance < call.cap ? variance : call.cap) : T(0));
      for (int64_t k = 0; k < call.depth; ++k)
        score += memory.block.queries[k * kRows + r + lane] * call.pole_keys[at * call.depth + k];
      memory.scores[c * kRows + r + lane] = score;
      top = score > top ? score : top;
    }
    if (top == kNever<T>) continue;
    shift[r + lane] = top;
    for (int64_t c = 0; c < shown; ++c)
      if (memory.worth[c * N + lane] >= T(0) && memory.left[c * N + lane] > T(0)) {
        T* score = memory.scores + c * kRows + r + lane;
        *score = exponential(all(*score - top))[0];
      }
  }
}

template <class T>
inline void KeyClustersBlock<T>::weigh_exact(const Exact<T>& some) {
  Block<T>& block = memory.block;
  const NearMask<T> near = mask(some.place);
  for (int strip = 0; strip < block.used; strip += kStrip<T>) {
    const Range range = some.joined ? seen_by(strip, some) : Range{0, some.count};
    if (range.begin >= range.end) continue;
    dots_strip<T>(some.keys + range.begin, range.end - range.begin, block.depth, block.queries + strip,
                  block.scores + range.begin * kRows + strip);
    for (int r = strip; r < strip + kStrip<T>; r += lanes<T>) {
      const Vec<T> before = load<T>(near_top + r);
      Vec<T> high = before;
      for (int64_t c = range.begin; c < range.end; ++c) {
        T* at = block.scores + c * kRows + r;
        store<T>(at, near(c, r) ? load<T>(at) : all(kNever<T>));
        high = larger<T>(high, load<T>(at));
      }
      const Vec<T> by = high == kNever<T> ? Vec<T>{} : high;
      Vec<T> total = load<T>(near_total + r) * exponential(before - by);
      for (int64_t c = range.begin; c < range.end; ++c)
        total += exponential(load<T>(block.scores + c * kRows + r) - by);
      store<T>(near_top + r, high), store<T>(near_total + r, total);
    }
  }
}

template <class T>
inline void KeyClustersBlock<T>::weigh_near() {
  for (int r = 0; r < kRows; ++r) near_top[r] = kNever<T>;
  visit_near([&](const Exact<T>& some) { weigh_exact(some); });
}

}  // namespace sparing::SPARING_ISA
