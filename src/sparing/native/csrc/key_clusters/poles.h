// Summaries of clusters of keys (summaries in Python).
#pragma once

#include "common/rows.h"
#include "common/simd.h"
#include "common/softmax.h"
#include "common/sums.h"
#include "key_clusters/call.h"
#include "key_clusters/triangle.h"

namespace sparing::SPARING_ISA {

template <class T>
struct PoleMemory {
  Triangle<T> covariance;  // folded: entries above the diagonal are added to those below
  T *away, *turned;        // [kSome][depth] keys minus their cluster's mean, [panels][kSome][kRows] times covariance
  T *key, *value;          // [2][depth], [2][width] sums over a cluster, and their rests

  int64_t lay_out(const Poles<T>& call, T* memory) {
    const int64_t some = Triangle<T>::kSome, entries = Triangle<T>::entries(call.depth);
    covariance = {call.depth, memory};
    away = memory + entries, turned = away + some * call.depth;
    key = turned + Triangle<T>::panels(call.depth) * some * kRows, value = key + 2 * call.depth;
    return entries + some * call.depth + Triangle<T>::panels(call.depth) * some * kRows + 2 * (call.depth + call.width);
  }
};

template <class T>
int64_t poles_scratch(const Poles<T>& call) {
  PoleMemory<T> memory{};
  return memory.lay_out(call, nullptr);
}

template <class T>
SPARING_INLINE T dot(const T* a, const T* b, int64_t count) {
  Vec<T> sums{};
  int64_t i = 0;
  for (; i + lanes<T> <= count; i += lanes<T>) sums += load<T>(a + i) * load<T>(b + i);
  T total = sum<T>(sums);
  for (; i < count; ++i) total += a[i] * b[i];
  return total;
}

// |a - factor * b|^2
template <class T>
SPARING_INLINE T distance(const T* a, const T* b, T factor, int64_t count) {
  Vec<T> sums{};
  int64_t i = 0;
  for (; i + lanes<T> <= count; i += lanes<T>) {
    const Vec<T> away = load<T>(a + i) - factor * load<T>(b + i);
    sums += away * away;
  }
  T total = sum<T>(sums);
  for (; i < count; ++i) total += (a[i] - factor * b[i]) * (a[i] - factor * b[i]);
  return total;
}

// Computes weights, means and offset of one cluster, and the scatter of its values.
template <class T>
void describe_cluster(const Poles<T>& call, const PoleMemory<T>& memory, int64_t item, int64_t head, int64_t cluster,
                      const int32_t* members, int64_t count) {
  const int64_t unit = item * call.heads + head, at = unit * call.clusters * call.chunks + cluster;
  const T* mean = call.mean + (unit * call.chunks + cluster / call.clusters) * call.depth;
  T *key = call.pole_keys + at * call.depth, *value = call.pole_values + at * call.width;
  T* shares = call.shares + unit * call.keys;
  clear(memory.key, 2 * call.depth);
  clear(memory.value, 2 * call.width);
  T top = kNever<T>;
  Running<T> weight;
  for (int64_t i = 0; i < count; ++i) {
    shares[members[i]] = call.scale * dot<T>(call.k.at(item, head, members[i]), mean, call.depth);
    top = shares[members[i]] > top ? shares[members[i]] : top;
  }
  T share[kRun];
  Int<T> list[kRun];
  in_runs(count, kRun, [&](int64_t first, int64_t end) {
    const int64_t some = end - first;
    for (int64_t i = 0; i < kRun; ++i) {
      const T log_share = i < some ? shares[members[first + i]] - top : T(0);
      share[i] = log_share > call.faintest ? log_share : call.faintest;
    }
    for (int64_t i = 0; i < some; i += lanes<T>) store<T>(share + i, exponential(load<T>(share + i)));
    T weighed = T(0);
    for (int64_t i = 0; i < some; ++i) {
      list[i] = Int<T>(members[first + i]);
      shares[list[i]] = share[i];
      weighed += share[i];
    }
    weight.add(weighed);
    add_rows<T>(share, list, some, call.k.at(item, head, 0), call.k.token_step, call.depth, memory.key, call.depth);
    add_rows<T>(share, list, some, call.v.at(item, head, 0), call.v.token_step, call.width, memory.value, call.width);
  });
  const T part = count ? T(1) / weight.sum : T(1);
  for (int64_t k = 0; k < call.depth; ++k) key[k] = part * memory.key[k];
  for (int64_t e = 0; e < call.width; ++e) value[e] = memory.value[e];
  const T scatter = long_sum<T>(count, 1, [&](int64_t i) {
    return shares[members[i]] * distance<T>(call.v.at(item, head, members[i]), value, part, call.width);
  });
  call.weight[at] = weight.sum;
  call.offset[at] = count ? top - call.scale * dot<T>(mean, key, call.depth) : T(0);
  call.scatter[at] = scatter * part;
  call.spread[at] = T(0);
}

// Computes the variance of the members' logits for an average query, many keys at a time.
template <class T>
void add_spreads(const Poles<T>& call, const PoleMemory<T>& memory, int64_t item, int64_t head, int64_t chunk) {
  const int64_t unit = item * call.heads + head, all_clusters = call.clusters * call.chunks, d = call.depth;
  const Triangle<T>& triangle = memory.covariance;
  const int32_t* bounds = call.bounds + unit * (all_clusters + 1);
  const int32_t* members = call.members + unit * call.keys;
  const T* covariance = call.covariance + (unit * call.chunks + chunk) * d * d;
  triangle.fill([&](int64_t k, int64_t c) {
    return k == c ? covariance[k * d + k] : covariance[k * d + c] + covariance[c * d + k];
  });
  int64_t cluster = chunk * call.clusters, owner[Triangle<T>::kSome], summed = -1;
  Running<T> spread;  // spread of the cluster `summed`
  const int64_t end = bounds[(chunk + 1) * call.clusters], step = triangle.kSome * kRows;
  for (int64_t first = bounds[cluster]; first < end; first += triangle.kSome) {
    const int64_t count = end - first < triangle.kSome ? end - first : triangle.kSome;
    for (int64_t r = 0; r < count; ++r) {
      while (bounds[cluster + 1] <= first + r) ++cluster;
      owner[r] = unit * all_clusters + cluster;
      const T *row = call.k.at(item, head, members[first + r]), *mean = call.pole_keys + owner[r] * d;
      for (int64_t k = 0; k < d; ++k) memory.away[r * d + k] = row[k] - mean[k];
    }
    triangle.multiply(memory.away, count, memory.turned, step);
    for (int64_t r = 0; r < count; ++r) {
      T total = T(0);
      for (int64_t c = 0; c < d; c += kRows)
        total += dot<T>(memory.turned + c / kRows * step + r * kRows, memory.away + r * d + c,
                        d - c < kRows ? d - c : kRows);
      if (owner[r] != summed) spread = {}, summed = owner[r];
      spread.add(call.shares[unit * call.keys + members[first + r]] * total);
      call.spread[summed] = spread.sum;
    }
  }
}

template <class T>
void poles(const Poles<T>& call, int64_t begin, int64_t end, T* scratch) {
  PoleMemory<T> memory{};
  memory.lay_out(call, scratch);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t unit = task / call.chunks, chunk = task % call.chunks;
    const int64_t item = unit / call.heads, head = unit % call.heads, every = call.clusters * call.chunks;
    const int32_t* bounds = call.bounds + unit * (every + 1);
    const int32_t* members = call.members + unit * call.keys;
    const int64_t from = chunk * call.clusters, to = from + call.clusters;
    for (int64_t c = from; c < to; ++c)
      describe_cluster(call, memory, item, head, c, members + bounds[c], bounds[c + 1] - bounds[c]);
    add_spreads(call, memory, item, head, chunk);
    for (int64_t c = from; c < to; ++c) {
      const int64_t at = unit * every + c;
      const T spread = call.scale * call.scale * call.spread[at];  // NaN where huge keys overflow
      const bool counts = call.weight[at] > T(0) && spread >= call.nothing * call.weight[at];
      call.spread[at] = counts ? spread / call.weight[at] : T(0);
    }
  }
}

template <class T>
constexpr PoleKernels<T> pole_kernels() {
  return {poles_scratch<T>, poles<T>};
}

}  // namespace sparing::SPARING_ISA
