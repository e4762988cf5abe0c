#pragma once

#include "common/tokens.h"

namespace sparing {

// k-means on rows of integers, small enough that every sum is exact.
struct KMeans {
  const float* x;             // [units][rows][depth]
  const uint8_t* valid;       // [units][rows]
  const int64_t* start;       // [units][centres] rows that are the first centres
  const uint8_t* start_used;  // [units][centres]
  const int64_t* lesson;      // [units][taught] rows that move the centres
  const uint8_t* lesson_used;
  int64_t units, rows, depth, centres, taught, steps;
  int64_t* labels;  // [units][rows], -1 for rows that are not valid
};

struct KMeansKernels {
  int64_t (*scratch)(const KMeans&);  // entries of float
  void (*run)(const KMeans&, int64_t begin, int64_t end, float* scratch);
};

// Keys in the metric of the queries, in integers: each chunk is scaled so that its largest valid entry
// is `limit`.
template <class T>
struct MetricRows {
  Tokens<const T> k;
  const double*
      factor;  // [items][heads][chunks][depth][depth], transposed: row c holds the factors of entry c, from c on
  const uint8_t* valid;  // [items][chunks][size]; rows of other keys become zeros
  int64_t items, heads, chunks, size, depth, limit;
  float* out;  // [items][heads][chunks][size][depth]
};

template <class T>
struct MetricKernels {
  int64_t (*scratch)(const MetricRows<T>&);  // entries of double
  void (*run)(const MetricRows<T>&, int64_t begin, int64_t end, double* scratch);
};

// Summaries of clusters.
template <class T>
struct Poles {
  Tokens<const T> k, v;
  const int64_t* labels;       // [items][heads][keys], -1 for none
  const T *mean, *covariance;  // mean [items][heads][chunks][depth] and covariance [...][depth][depth] of queries
  int64_t items, heads, keys, depth, width;
  int64_t clusters, chunks;         // clusters per chunk, and chunks
  T scale, faintest, nothing;       // faintest: least log-weight; nothing: smaller spreads are taken to be zero
  const int32_t *members, *bounds;  // keys sorted by cluster, [items][heads][keys], and where clusters begin
  T *pole_keys, *pole_values, *offset, *weight, *spread, *scatter;  // as in KeyClusters
  T* shares;                                                        // [items][heads][keys]
};

template <class T>
struct PoleKernels {
  int64_t (*scratch)(const Poles<T>&);  // entries of T
  void (*run)(const Poles<T>&, int64_t begin, int64_t end, T* scratch);
};

// A division of the keys into chunks, each with its own clusters.
template <class T>
struct Level {
  const int64_t* labels;   // [items][heads][keys] numbered through all chunks, -1 for none
  const T* shares;         // [items][heads][keys] weight of a key in its cluster
  int64_t size, clusters;  // keys and clusters of a chunk
  int64_t base, total;     // first cluster of the level among all, and how many there are
  const int32_t* members;  // [items][heads][keys] keys sorted by cluster
};

// Attention to few keys and to summaries of the others. Keys are numbered by rank, valid ones first.
template <class T>
struct KeyClusters {
  Tokens<const T> q, k, v;
  int64_t items, heads, queries, keys, depth, width;
  int64_t clusters;                             // clusters of all levels
  const int64_t *seen, *own;                    // [items][queries]
  const T *mean, *variance;                     // [items][heads][chunks of level 0][depth], [...] of the queries
  int64_t means;                                // chunks of level 0; 0: no summaries
  const T *pole_keys, *pole_values;             // [items][heads][clusters][depth], [...][width]; values times weight
  const T *offset, *weight, *spread, *scatter;  // [items][heads][clusters]
  Level<T> level[3];
  int64_t levels;
  const int32_t* bounds;         // [items][heads][clusters + levels] where members begin; each level ends with its end
  int64_t before, after;         // exact neighbours; -1: none, not even the query's own key
  int64_t sinks, block, budget;  // block: causal, keys of a query's own block; 0 if not causal
  bool second, by_mass;
  T cap, tolerance, scale;
  T *out, *lse, *error;       // [items][heads][queries][width], [items][heads][queries]
  int64_t *read, *summaries;  // [items][heads][queries] number of keys and of summaries that were read
};

template <class T>
struct KeyClustersKernels {
  int64_t (*scratch)(const KeyClusters<T>&);  // entries of T
  int64_t (*tasks)(const KeyClusters<T>&);
  void (*forward)(const KeyClusters<T>&, int64_t begin, int64_t end, T* scratch);
};

}  // namespace sparing
