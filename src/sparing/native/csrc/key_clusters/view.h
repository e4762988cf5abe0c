// Which clusters and which nearby keys a block of queries sees.
#pragma once

#include "common/simd.h"
#include "common/softmax.h"
#include "common/tile.h"
#include "key_clusters/block.h"
#include "key_clusters/call.h"

namespace sparing::SPARING_ISA {

template <class T>
inline const Level<T>& KeyClustersBlock<T>::level_of(int64_t key) const {
  // A chunk that is not complete is represented by the clusters of its blocks. The last complete chunk has a level of
  // its own, because its summaries were computed from other queries than those of earlier chunks.
  if (!call.block || call.levels < 2) return call.level[0];
  const int64_t size = call.level[1].size, mine = own[0] / size * size;
  return call.level[key >= mine ? 0 : key >= mine - size ? 1 : 2];
}

template <class T>
inline int64_t KeyClustersBlock<T>::cluster_of(int64_t key) const {
  if (!call.levels || key >= from) return -1;
  const Level<T>& level = level_of(key);
  const int64_t label = level.labels[unit * call.keys + key];
  return label < 0 ? -1 : level.base + label;
}

template <class T>
inline T KeyClustersBlock<T>::share_of(int64_t key) const {
  return level_of(key).shares[unit * call.keys + key];
}

template <class T>
inline int64_t KeyClustersBlock<T>::size_of(int64_t cluster) const {
  const int32_t* bounds = call.bounds + unit * (call.clusters + call.levels);
  const int64_t at = cluster + level_with(call, cluster);
  return bounds[at + 1] - bounds[at];
}

template <class T>
inline void KeyClustersBlock<T>::show(int64_t begin, int64_t end) {
  for (int64_t c = begin; c < end; ++c) {
    const int64_t size = size_of(c);
    if (!size) continue;
    memory.sizes[shown] = T(size);
    memory.visible[shown++] = Int<T>(c);
    members += size;
  }
}

template <class T>
inline void KeyClustersBlock<T>::look_around() {
  const Int<T> mine = own[0], last = own[count - 1];
  from = Int<T>(call.keys);
  if (call.block) {
    from = mine < 0 ? 0 : Int<T>(mine / call.block * call.block);
    if (call.levels && mine >= 0) {
      const Level<T>& fine = call.level[0];
      int64_t old = 0;
      if (call.levels > 1) {
        const Level<T>&last = call.level[1], &before = call.level[2];
        old = mine / last.size;
        if (old > 1) show(before.base, before.base + (old - 1) * before.clusters);
        if (old > 0) show(last.base + (old - 1) * last.clusters, last.base + old * last.clusters);
        old = old * (last.size / fine.size);
      }
      show(old * fine.clusters, mine / fine.size * fine.clusters);
    }
    low = mine - call.before < from ? mine - call.before : from;
    high = last;
  } else {
    if (call.levels) show(0, call.level[0].total);
    if (call.before >= 0) low = mine - call.before, high = last + call.after;
  }
  low = low < 0 ? 0 : low;
  high = high < call.keys - 1 ? high : call.keys - 1;
}

template <class T>
inline NearMask<T> KeyClustersBlock<T>::mask(const Int<T>* place) const {
  return {place,
          own,
          seen,
          Int<T>(call.before),
          Int<T>(call.after),
          Int<T>(call.sinks),
          Int<T>(call.block ? 0 : call.sinks),
          from};
}

template <class T>
inline void KeyClustersBlock<T>::count_near() {
  for (int64_t c = 0; c < shown; ++c) memory.slot[memory.visible[c]] = -1;
  if (!shown) return;
  for (int64_t key = low; key <= high; ++key) {
    const int64_t cluster = cluster_of(key);
    if (cluster < 0) continue;
    Int<T>& slot = memory.slot[cluster];
    if (slot < 0) {
      slot = Int<T>(slots++);
      for (int r = 0; r < kRows; ++r) memory.gone[slot * kRows + r] = T(0), memory.gone_weight[slot * kRows + r] = T(0);
    }
    const Int<T> place = Int<T>(key);
    const NearMask<T> near = mask(&place);
    const T share = share_of(key);
    for (int r = 0; r < kRows; r += lanes<T>) {
      const IntVec<T> hit = near(0, r);
      T *number = memory.gone + slot * kRows + r, *weight = memory.gone_weight + slot * kRows + r;
      store<T>(number, load<T>(number) + (hit ? all(T(1)) : Vec<T>{}));
      store<T>(weight, load<T>(weight) + (hit ? all(share) : Vec<T>{}));
    }
  }
}

template <class T>
inline Range KeyClustersBlock<T>::seen_by(int strip, const Exact<T>& some) const {
  const int last = strip + kStrip<T> - 1;
  const int64_t near = own[strip] - call.before, reach = own[last] + call.after + 1;
  const int64_t begin = near < from ? near : from, end = from < seen[last] || reach > seen[last] ? seen[last] : reach;
  const int64_t first = some.place[0], to = end - first < some.count ? end - first : some.count;
  return {begin > first ? begin - first : 0, to};
}

template <class T>
template <class Visit>
inline void KeyClustersBlock<T>::visit_near(const Visit& visit) const {
  Exact<T> some;
  const auto flush = [&] {
    if (some.count) visit(some);
    some.count = 0;
  };
  const auto range = [&](int64_t begin, int64_t end) {
    for (int64_t key = begin; key < end; ++key) {
      const int64_t i = some.count++, cluster = shown ? cluster_of(key) : -1;
      some.place[i] = Int<T>(key);
      some.keys[i] = call.k.at(item, head, key);
      some.values[i] = call.v.at(item, head, key);
      some.row[i] = cluster < 0 ? -1 : memory.slot[cluster];
      some.share[i] = cluster < 0 ? T(0) : share_of(key);
      if (some.count == kKeys) flush();
    }
  };
  int64_t last = 0;
  for (int64_t r = 0; r < count; ++r) last = seen[r] > last ? seen[r] : last;
  const int64_t sinks = call.sinks < last ? call.sinks : last;
  const int64_t tail = call.block || last - call.sinks > sinks ? last - (call.block ? 0 : call.sinks) : sinks;
  some.joined = false;
  range(0, sinks);
  range(tail, last);
  flush();
  some.joined = true;
  range(low > sinks ? low : sinks, high + 1 < tail ? high + 1 : tail);
  flush();
}

}  // namespace sparing::SPARING_ISA
