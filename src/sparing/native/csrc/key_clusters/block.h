// A block of neighbouring queries of key_clusters.h. Its functions are defined in view.h, choose.h and absorb.h.
#pragma once

#include "common/simd.h"
#include "common/softmax.h"
#include "common/tile.h"
#include "key_clusters/call.h"
#include "key_clusters/memory.h"

namespace sparing::SPARING_ISA {

// Which lanes of a block read which keys exactly.
template <class T>
struct NearMask {
  static constexpr bool masks = true;
  const Int<T>* place;                // ranks of the keys
  const Int<T>*own, *seen;            // [kRows] rank of a query's own key, and how many keys it sees
  Int<T> before, after, sinks, tail;  // tail: number of last keys that all lanes read
  Int<T> from;                        // causal: all keys from this rank on are exact

  SPARING_INLINE IntVec<T> operator()(int64_t c, int r) const {
    const IntVec<T> mine = load<Int<T>>(own + r), end = load<Int<T>>(seen + r);
    const IntVec<T> key = place[c] - IntVec<T>{};
    const IntVec<T> near = (key >= mine - before) & (key <= mine + after);
    return (key < end) & (near | (key < sinks) | (key >= from) | (key >= end - tail));
  }
};

// Keys that a block reads exactly.
template <class T>
struct Exact {
  int64_t count = 0;
  bool joined = false;  // consecutive keys, without sinks and last keys
  Int<T> place[kKeys];
  const T *keys[kKeys], *values[kKeys];
  int64_t row[kKeys];  // row of the scores of the key's summary; -1: it has none
  T share[kKeys];
};

// The number of the level that a cluster belongs to.
template <class T>
SPARING_INLINE int level_with(const KeyClusters<T>& call, int64_t cluster) {
  int level = 0;
  while (level + 1 < call.levels && cluster >= call.level[level + 1].base) ++level;
  return level;
}

// One block of queries, with all summaries and the nearby keys.
template <class T>
struct KeyClustersBlock {
  const KeyClusters<T>& call;
  KeyClustersMemory<T>& memory;
  int64_t item, head, unit, first, count;  // first: the first query
  Int<T> own[kRows] = {}, seen[kRows] = {};
  int64_t shown = 0;                               // clusters that the block sees
  int64_t members = 0;                             // keys in these clusters
  int64_t slots = 0;                               // clusters that have members nearby
  int64_t low = 0, high = -1;                      // ranks of the first and the last key nearby
  Int<T> from = 0;                                 // causal: all keys from this rank on are exact
  T near_top[kRows] = {}, near_total[kRows] = {};  // largest score and mass of the keys nearby; with a tolerance only
  T least[kRows] = {};                             // what a cluster must be worth to be expanded
  T light[kRows] = {};                             // summaries of less mass are left out

  // view.h: which clusters and which keys the block sees

  const Level<T>& level_of(int64_t key) const;
  // Returns the cluster of a key, or -1.
  int64_t cluster_of(int64_t key) const;
  T share_of(int64_t key) const;
  int64_t size_of(int64_t cluster) const;
  void show(int64_t begin, int64_t end);
  // Finds the clusters and the nearby keys that the block sees.
  void look_around();
  NearMask<T> mask(const Int<T>* place) const;
  // Counts and weighs the nearby members of clusters, for each lane.
  void count_near();
  // Returns which of some consecutive keys a strip of lanes may see.
  Range seen_by(int strip, const Exact<T>& some) const;
  // Visits the nearby keys, the sinks and, if not causal, the last keys, some at a time.
  template <class Visit>
  void visit_near(const Visit& visit) const;

  // choose.h: which clusters each query expands

  // Sets `alarm` to |q - mean|^2 divided by its mean over the queries.
  void sound(T* alarm) const;
  // Computes the scores of all summaries, in memory.scores.
  void score();
  // Returns the scatter of the clusters that the block sees, averaged over their keys.
  T usual_scatter() const;
  // Returns what a cluster must be worth per key, in units of the squared mass of all keys.
  T bound() const;
  // Computes exp(score - shift) in memory.scores, and in memory.worth and memory.left what expanding a cluster is worth
  // per key and how many keys that reads, for the vector of lanes at r.
  void value(int r, const T* alarm, T bound, T* shift);
  SPARING_INLINE Vec<T> error_factor(int64_t at, Vec<T> loud) const;
  // Returns for each lane the cluster worth most of those that fit its budget, the first of equals; -1 if there is
  // none.
  SPARING_INLINE IntVec<T> best_fit(Vec<T> budget, Vec<T> least) const;
  // Expands the clusters that are worth most to the vector of lanes at r; returns the number of expansions so far.
  int64_t choose(int r, int64_t pairs, int64_t first_in_task, const T* alarm, T* missed, int64_t* read,
                 int64_t* summaries);
  // The score of a cluster that is no longer used may have been so much larger than the others that these underflowed.
  // For such lanes, computes exp(score - shift) again, with the largest score that is left as shift. Clusters that are
  // too light stay left out.
  void revive(int r, const T* alarm, T* shift);
  // Adds the mass of some exact keys to near_top and near_total.
  void weigh_exact(const Exact<T>& some);
  void weigh_near();

  // absorb.h: attention to summaries and to nearby keys

  // Starts the sums of the block with the summaries, without their nearby members.
  void absorb_summaries(const T* shift);
  // Adds some exact keys, and subtracts their share of the summaries; counts in `met` the keys that each lane read.
  void absorb_exact(const Exact<T>& some, const T* shift, Int<T>* met);
  void absorb_near(const T* shift, int64_t* read);
};

}  // namespace sparing::SPARING_ISA
