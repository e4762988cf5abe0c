// Attention to few keys, and to summaries of clusters of the others (key_clusters in Python).
//
// Queries are taken in blocks of neighbours, which see the same clusters. A block scores all summaries, chooses for
// each query the clusters to expand, and attends to the remaining summaries and to nearby keys. Then the members of
// each cluster are added to the queries that expanded it, many queries at a time: a small matrix product per cluster.
#pragma once

#include "common/simd.h"
#include "common/softmax.h"
#include "common/tile.h"
#include "key_clusters/absorb.h"
#include "key_clusters/block.h"
#include "key_clusters/call.h"
#include "key_clusters/choose.h"
#include "key_clusters/expand.h"
#include "key_clusters/memory.h"
#include "key_clusters/view.h"

namespace sparing::SPARING_ISA {

template <class T>
void key_clusters_forward(const KeyClusters<T>& call, int64_t begin_task, int64_t end_task, T* scratch) {
  KeyClustersMemory<T> memory{};
  lay_out<T>(call, scratch, &memory);
  const int64_t each = key_clusters_queries(call), parts = (call.queries + each - 1) / each;
  for (int64_t task = begin_task; task < end_task; ++task) {
    const int64_t unit = task / parts, begin = task % parts * each;
    const int64_t item = unit / call.heads, head = unit % call.heads;
    const int64_t end = begin + each < call.queries ? begin + each : call.queries;
    const int64_t *own = call.own + item * call.queries, *seen = call.seen + item * call.queries;
    int64_t pairs = 0;
    for (int64_t first = begin, count; first < end; first += count) {
      for (count = 1; count < kRows && first + count < end; ++count)
        if (call.block && (own[first + count] + call.block) / call.block != (own[first] + call.block) / call.block)
          break;
      KeyClustersBlock<T> here{call, memory, item, head, unit, first, count};
      T alarm[kRows] = {}, shift[kRows] = {};
      const T* queries[kRows];
      for (int64_t r = 0; r < kRows; ++r) {
        const int64_t query = first + (r < count ? r : count - 1);
        here.own[r] = Int<T>(own[query]), here.seen[r] = Int<T>(seen[query]);
        if (r < count) queries[r] = call.q.at(item, head, query);
      }
      memory.block.use(count);
      transpose<T>(queries, count, call.depth, call.scale, memory.block.queries);
      start(memory.block);
      int64_t* read = call.read + unit * call.queries + first;
      int64_t* summaries = call.summaries + unit * call.queries + first;
      for (int64_t r = 0; r < count; ++r)
        read[r] = summaries[r] = 0, memory.missed[first - begin + r] = memory.shift[first - begin + r] = T(0);
      here.look_around();
      if (here.shown) {
        here.count_near();
        here.sound(alarm);
        here.score();
        if (call.tolerance > T(0)) here.weigh_near();
        const T bound = here.bound();
        for (int r = 0; r < memory.block.used; r += lanes<T>) {
          here.value(r, alarm, bound, shift);
          pairs = here.choose(r, pairs, first - begin, alarm, memory.missed + first - begin, read, summaries);
          for (int64_t i = r; i < r + lanes<T> && i < count; ++i) memory.shift[first - begin + i] = shift[i];
          here.revive(r, alarm, shift);
        }
        here.absorb_summaries(shift);
      }
      here.absorb_near(shift, read);
      hand_over(memory.block, count, memory.absorbed, first - begin);
    }
    expand_clusters(call, memory, item, head, begin, pairs);
    for (int64_t query = begin; query < end; ++query) {
      const int64_t at = query - begin, row = unit * call.queries + query;
      const T total = sum<T>(load<T>(memory.absorbed.total + at * lanes<T>));
      const T inverse = total > T(0) ? T(1) / total : T(0);
      const T* sums = memory.absorbed.sums + at * memory.absorbed.stride;
      for (int64_t e = 0; e < call.width; ++e) call.out[row * call.width + e] = sums[e] * inverse;
      const T lse = total > T(0) ? T(__builtin_log(double(total)) + double(memory.absorbed.top[at])) : kNever<T>;
      call.lse[row] = lse;
      const double missed = __builtin_sqrt(double(memory.missed[at]));
      call.error[row] = missed > 0 ? T(missed * __builtin_exp(double(memory.shift[at]) - double(lse))) : T(0);
    }
  }
}

template <class T>
constexpr KeyClustersKernels<T> key_clusters_kernels() {
  return {key_clusters_scratch<T>, key_clusters_tasks<T>, key_clusters_forward<T>};
}

}  // namespace sparing::SPARING_ISA
