// Attention of queries to the members of the clusters that they expanded.
#pragma once

#include "common/rows.h"
#include "common/simd.h"
#include "common/softmax.h"
#include "common/sums.h"
#include "common/tile.h"
#include "key_clusters/block.h"
#include "key_clusters/call.h"
#include "key_clusters/memory.h"
#include "key_clusters/weights.h"

namespace sparing::SPARING_ISA {

inline constexpr int64_t kVisitors = 24;  // queries whose scores with a cluster's members are computed at once

// Copies the sums of the first `count` lanes of a block to those of their queries, which are not yet set.
template <class T>
void hand_over(const Block<T>& block, int64_t count, const Absorbed<T>& to, int64_t query) {
  constexpr int N = lanes<T>;
  for (int64_t first = 0; first < count; first += N) {
    const int64_t some = count - first < N ? count - first : N;
    for (int64_t r = first; r < first + some; ++r) {
      Vec<T> total{};
      total[0] = block.total[r];
      to.top[query + r] = block.top[r];
      store<T>(to.total + (query + r) * N, total);
      store<T>(to.total + to.total_rest + (query + r) * N, Vec<T>{});
    }
    T* rows = to.sums + (query + first) * to.stride;
    clear(rows + to.rest, some * to.stride);
    int64_t e = 0;
    for (; e + N <= block.width; e += N) {
      Vec<T> square[N];
      for (int i = 0; i < N; ++i) square[i] = load<T>(block.sums + (e + i) * kRows + first);
      turn<T>(square);
      for (int64_t r = 0; r < some; ++r) store<T>(rows + r * to.stride + e, square[r]);
    }
    for (; e < to.stride; ++e)
      for (int64_t r = 0; r < some; ++r)
        rows[r * to.stride + e] = e < block.width ? block.sums[e * kRows + first + r] : T(0);
  }
}

// Some members of a cluster, in the lanes, for the queries that expanded it.
template <class T>
struct Members {
  const Int<T>* place;  // ascending
  int64_t count;        // at most kRows

  // Leaves out the members with ranks from `begin` to `end`, which the query reads exactly anyway. next: the first of
  // them; the search starts at that of the query before.
  SPARING_INLINE void leave_out(Int<T> begin, Int<T> end, T* scores, int64_t& next) const {
    while (next > 0 && place[next - 1] >= begin) --next;
    while (next < count && place[next] < begin) ++next;
    for (int64_t i = next; i < count && place[i] < end; ++i) scores[i] = kNever<T>;
  }

  // Turns the scores of a query into weights, relative to the largest score so far or one not far below it.
  SPARING_INLINE void weigh(T* scores, int64_t query, const Absorbed<T>& to) const {
    constexpr int N = lanes<T>;
    const int64_t last = (count - 1) / N * N;
    const Vec<T> beyond = iota<T>() < T(count - last) ? load<T>(scores + last) : all(kNever<T>);
    store<T>(scores + last, beyond);
    Vec<T> high = beyond;
    for (int64_t i = 0; i < last; i += N) high = larger<T>(high, load<T>(scores + i));
    if (held<T>(high > to.top[query] + kFar<T>)) {
      const T top = largest<T>(high);
      const Vec<T> factor = exponential(all(to.top[query] - top));
      for (int64_t part = 0; part < 2; ++part) {  // sums and rests
        T *total = to.total + part * to.total_rest + query * N, *sums = to.sums + part * to.rest + query * to.stride;
        store<T>(total, load<T>(total) * factor);
        for (int64_t e = 0; e < to.stride; e += N) store<T>(sums + e, load<T>(sums + e) * factor);
      }
      to.top[query] = top;
    }
    const T shift = to.top[query] == kNever<T> ? T(0) : to.top[query];
    Vec<T> total{};
    for (int64_t i = 0; i <= last; i += N) {
      const Vec<T> weight = exponential(load<T>(scores + i) - shift);
      store<T>(scores + i, weight);
      total += weight;
    }
    add_to<T>(to.total + query * N, to.total_rest, total);
  }
};

// Adds the members of clusters to the queries that expanded them.
template <class T>
void expand_clusters(const KeyClusters<T>& call, KeyClustersMemory<T>& memory, int64_t item, int64_t head,
                     int64_t begin, int64_t pairs) {
  const int64_t unit = item * call.heads + head;
  const int64_t* own = call.own + item * call.queries + begin;
  for (int64_t c = 0; c <= call.clusters; ++c) memory.first[c] = 0;
  for (int64_t p = 0; p < pairs; ++p) ++memory.first[memory.pair_cluster[p] + 1];
  for (int64_t c = 0; c < call.clusters; ++c) memory.first[c + 1] += memory.first[c];
  for (int64_t p = 0; p < pairs; ++p) memory.sorted[memory.first[memory.pair_cluster[p]]++] = memory.pair_query[p];
  const Absorbed<T>& to = memory.absorbed;
  const T *keys[kRows], *queries[kVisitors];
  T* sums[kVisitors];
  Int<T> place[kRows];
  for (int64_t cluster = 0, from = 0; cluster < call.clusters; ++cluster) {
    const int64_t end = memory.first[cluster];  // after sorting, where the cluster's queries end
    if (from == end) continue;
    const int later = level_with(call, cluster);
    const int32_t* bounds = call.bounds + unit * (call.clusters + call.levels) + cluster + later;
    const int32_t* members = call.level[later].members + unit * call.keys;
    const int64_t last = call.level[later].base + call.level[later].total - cluster;
    for (int64_t next = bounds[0]; next < bounds[1]; next += kRows) {
      const int64_t count = bounds[1] - next < kRows ? bounds[1] - next : kRows;
      for (int64_t i = 0; i < count; ++i) {
        place[i] = Int<T>(members[next + i]);
        keys[i] = call.k.at(item, head, place[i]);
        const T* value = call.v.at(item, head, place[i]);
        for (int64_t e = 0; e < to.stride; ++e) memory.values[i * to.stride + e] = e < call.width ? value[e] : T(0);
      }
      T *columns = memory.block.queries, *scores = memory.block.scores;
      transpose<T>(keys, count, call.depth, call.scale, columns);
      const Members<T> here{place, count};
      const int64_t ahead = next + count + kRows < bounds[last] ? next + count + kRows : bounds[last];
      int64_t near = 0;
      for (int64_t first = from; first < end; first += kVisitors) {
        const int64_t some = end - first < kVisitors ? end - first : kVisitors;
        for (int64_t i = 0; i < some; ++i) {
          const int64_t query = memory.sorted[first + i];
          queries[i] = call.q.at(item, head, begin + query);
          sums[i] = to.sums + query * to.stride;
        }
        dots_narrow<T>(queries, some, call.depth, columns, scores, count);
        for (int64_t i = 0; i < some; ++i) {
          const int64_t query = memory.sorted[first + i];
          if (call.before >= 0)
            here.leave_out(Int<T>(own[query] - call.before), Int<T>(own[query] + call.after + 1), scores + i * kRows,
                           near);
          here.weigh(scores + i * kRows, query, to);
          // The members of the next clusters follow in the list: prefetch them.
          if (const int64_t member = next + count + first + i - from; member < ahead) {
            fetch(call.k.at(item, head, members[member]), call.depth);
            fetch(call.v.at(item, head, members[member]), call.width);
          }
          if (first + i + kVisitors >= end) continue;
          // Prefetch the rows of the next group, which are scattered over memory.
          const int64_t coming = memory.sorted[first + i + kVisitors];
          fetch(call.q.at(item, head, begin + coming), call.depth);
          fetch(to.sums + coming * to.stride, to.stride);
          fetch(to.total + coming * lanes<T>, lanes<T>);
        }
        spread<T>(scores, some, memory.values, to.stride, sums, count, to.rest);
      }
    }
    from = end;
  }
}

}  // namespace sparing::SPARING_ISA
