// The working memory of a task of key_clusters.h, and how large a task is.
#pragma once

#include "common/simd.h"
#include "common/softmax.h"
#include "common/tile.h"
#include "key_clusters/call.h"

namespace sparing::SPARING_ISA {

inline constexpr int64_t kQueries = 4096;        // largest number of queries in a task
inline constexpr int64_t kExpansions = 1 << 20;  // largest number of expansions in a task
inline constexpr int kChains = 4;                // independent searches, to hide latency

// The sums of some queries so far.
template <class T>
struct Absorbed {
  T *sums, *top, *total;     // [queries][stride], [queries], [queries][lanes]: a total is the sum over lanes
  int64_t stride;            // padded width
  int64_t rest, total_rest;  // distance from sums and totals to their rests, see sums.h
};

template <class T>
struct KeyClustersMemory {
  Block<T> block;
  T* scores;        // [clusters][kRows]
  T *worth, *left;  // [clusters][lanes] what expanding them is worth to some queries, and how many keys that reads
  T *gone, *gone_weight;                              // [stretch][kRows] members of a cluster that are exact already
  Absorbed<T> absorbed;                               // sums of the queries of the task
  T* values;                                          // [kRows][padded width] values of some members of a cluster
  T *shift, *missed;                                  // [queries]
  T* sizes;                                           // [clusters] number of members
  Int<T>* slot;                                       // [clusters] row of `gone`, or -1
  Int<T>* visible;                                    // [clusters]
  Int<T>*pair_query, *pair_cluster, *sorted, *first;  // expansions; [clusters + 1]
};

template <class T>
int64_t key_clusters_expansions(const KeyClusters<T>& call) {  // largest number for one query
  const int64_t most = call.budget < call.clusters ? call.budget : call.clusters;
  return most > 0 ? most : 1;
}

template <class T>
int64_t key_clusters_queries(const KeyClusters<T>& call) {
  int64_t count = kExpansions / key_clusters_expansions(call) / kRows * kRows;
  count = count < kRows ? kRows : count > kQueries ? kQueries : count;
  const int64_t all = (call.queries + kRows - 1) / kRows * kRows;
  return count < all ? count : all;
}

template <class T>
int64_t key_clusters_stretch(const KeyClusters<T>& call) {  // number of keys near a block that may be in clusters
  const int64_t reach = call.before + (call.after > 0 ? call.after : 0) + kRows + 1;
  return reach < call.keys ? reach : call.keys;
}

template <class T>
int64_t lay_out(const KeyClusters<T>& call, T* memory, KeyClustersMemory<T>* parts) {
  parts->block.depth = call.depth, parts->block.width = call.width;
  int64_t used = (lay_out<T>(&parts->block, memory, false) + 15) / 16 * 16;
  const auto take = [&]<class U>(U** part, int64_t count) {
    static_assert(sizeof(U) == sizeof(T));
    if (memory) *part = reinterpret_cast<U*>(memory + used);
    used += (count + 15) / 16 * 16;
  };
  const int64_t queries = key_clusters_queries(call), pairs = queries * key_clusters_expansions(call);
  take(&parts->scores, call.clusters * kRows);
  take(&parts->worth, (call.clusters + kChains) * lanes<T>);
  take(&parts->left, (call.clusters + kChains) * lanes<T>);
  take(&parts->gone, key_clusters_stretch(call) * kRows);
  take(&parts->gone_weight, key_clusters_stretch(call) * kRows);
  parts->absorbed.stride = padded<T>(call.width);
  parts->absorbed.rest = queries * parts->absorbed.stride, parts->absorbed.total_rest = queries * lanes<T>;
  take(&parts->absorbed.sums, 2 * parts->absorbed.rest);
  take(&parts->absorbed.top, queries);
  take(&parts->absorbed.total, 2 * parts->absorbed.total_rest);
  take(&parts->values, kRows * parts->absorbed.stride);
  take(&parts->shift, queries);
  take(&parts->missed, queries);
  take(&parts->sizes, call.clusters);
  take(&parts->slot, call.clusters);
  take(&parts->visible, call.clusters);
  take(&parts->pair_query, pairs);
  take(&parts->pair_cluster, pairs);
  take(&parts->sorted, pairs);
  take(&parts->first, call.clusters + 1);
  return used;
}

template <class T>
int64_t key_clusters_scratch(const KeyClusters<T>& call) {
  KeyClustersMemory<T> parts{};
  return lay_out<T>(call, nullptr, &parts);
}

template <class T>
int64_t key_clusters_tasks(const KeyClusters<T>& call) {
  const int64_t each = key_clusters_queries(call);
  return call.items * call.heads * ((call.queries + each - 1) / each);
}

}  // namespace sparing::SPARING_ISA
