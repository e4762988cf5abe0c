#pragma once

#include "tokens.h"

namespace sparing {

// k-means on rows of whole numbers, small enough that every sum is exact.
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

// One way to cut the keys into chunks with clusters of their own.
template <class T>
struct Level {
  const int64_t* labels;  // [items][heads][keys] numbered through all chunks, -1 for none
  const T* shares;        // [items][heads][keys] weight of a key in its cluster
  int64_t size, clusters;  // keys and clusters of a chunk
  int64_t base, total;     // first cluster of the level among all, and how many there are
  const int32_t* members;  // [items][heads][keys] keys sorted by cluster
};

// Attention to few keys and to summaries of the others. Keys are numbered by rank, valid ones first.
template <class T>
struct Multipole {
  Tokens<const T> q, k, v;
  int64_t items, heads, queries, keys, depth, width;
  int64_t clusters;          // of all levels
  const int64_t *seen, *own;  // [items][queries]
  const T* alarm;            // [items][heads][queries]
  const T *pole_keys, *pole_values;  // [items][heads][clusters][depth], [...][width]; values times weight
  const T *offset, *weight, *spread, *scatter;  // [items][heads][clusters]
  Level<T> level[2];
  int64_t levels;
  const int32_t* bounds;  // [items][heads][clusters + 1] where a cluster's members begin
  int64_t before, after;  // exact neighbours; -1: none, not even the query's own key
  int64_t sinks, block, budget;  // block: causal, keys of a query's own block; 0 if not causal
  bool second, by_mass;
  T cap, scale;
  T *out, *lse, *error;  // [items][heads][queries][width], [items][heads][queries]
  int64_t* touched;      // [items][heads][queries]
};

template <class T>
struct MultipoleKernels {
  int64_t (*scratch)(const Multipole<T>&);  // entries of T
  int64_t (*tasks)(const Multipole<T>&);
  void (*forward)(const Multipole<T>&, int64_t begin, int64_t end, T* scratch);
};

}  // namespace sparing
