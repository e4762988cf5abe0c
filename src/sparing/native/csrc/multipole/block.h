// One block of queries of multipole.h: what it is, and what is done with it.
#pragma once

#include "common/simd.h"
#include "common/softmax.h"
#include "common/tile.h"
#include "multipole/call.h"
#include "multipole/memory.h"

namespace sparing::SPARING_ISA {

// Keys that every lane of a block looks at, or only some.
template <class T>
struct NearMask {
  static constexpr bool masks = true;
  const Int<T>* place;                // of the keys
  const Int<T>*own, *seen;            // of the lanes
  Int<T> before, after, sinks, tail;  // tail: last keys that all lanes look at
  Int<T> from;                        // all keys from here on; causal

  SPARING_INLINE IntVec<T> operator()(int64_t c, int r) const {
    const IntVec<T> mine = load<Int<T>>(own + r), end = load<Int<T>>(seen + r);
    const IntVec<T> key = place[c] - IntVec<T>{};
    const IntVec<T> near = (key >= mine - before) & (key <= mine + after);
    return (key < end) & (near | (key < sinks) | (key >= from) | (key >= end - tail));
  }
};

// Keys that a block looks at.
template <class T>
struct Exact {
  int64_t count = 0;
  bool joined = false;  // neighbours of each other, all but sinks and last keys
  Int<T> place[kKeys];
  const T *keys[kKeys], *values[kKeys];
  int64_t row[kKeys];  // of the scores of the summary that stands for a key; -1: there is none
  T share[kKeys];
};

// The number of the level that a cluster belongs to.
template <class T>
SPARING_INLINE int level_with(const Multipole<T>& call, int64_t cluster) {
  int level = 0;
  while (level + 1 < call.levels && cluster >= call.level[level + 1].base) ++level;
  return level;
}

// One block of queries against all summaries and the keys near by.
template <class T>
struct MultipoleBlock {
  const Multipole<T>& call;
  MultipoleMemory<T>& memory;
  int64_t item, head, unit, first, count;  // first query
  Int<T> own[kRows] = {}, seen[kRows] = {};
  int64_t shown = 0;                               // clusters that the block sees
  int64_t members = 0;                             // and how many keys are in them
  int64_t slots = 0;                               // clusters that have members near by
  int64_t low = 0, high = -1;                      // keys near by
  Int<T> from = 0;                                 // causal: all keys from here on are exact
  T near_top[kRows] = {}, near_total[kRows] = {};  // of the keys near by, if there is a tolerance
  T least[kRows] = {};                             // what a cluster must be worth to be expanded
  T light[kRows] = {};                             // summaries of less mass are left out

  // What the block sees; see view.h.
  const Level<T>& level_of(int64_t key) const;
  // The cluster that stands for a key, or -1.
  int64_t cluster_of(int64_t key) const;
  T share_of(int64_t key) const;
  int64_t size_of(int64_t cluster) const;
  void show(int64_t begin, int64_t end);
  // Which clusters and which keys near by the block looks at.
  void look_around();
  NearMask<T> mask(const Int<T>* place) const;
  // Members of clusters that lie near by: counted, and weighed, per lane.
  void count_near();
  // Which of some neighbouring keys a strip of lanes may see.
  Range seen_by(int strip, const Exact<T>& some) const;
  // The keys near by, the sinks and, if not causal, the last keys, some at a time.
  template <class Visit>
  void visit_near(const Visit& visit) const;

  // Which clusters each query expands; see choose.h.
  // How far the queries are from their mean: |q - mean|^2 over the mean of that.
  void sound(T* alarm) const;
  // Scores of all summaries, in memory.scores.
  void score();
  // The mean scatter of the keys in clusters.
  T usual_scatter() const;
  // What a cluster must be worth per key, in units of the squared mass of all keys.
  T bound() const;
  // exp(score - shift) in memory.scores, what expanding a cluster is worth per key and how many keys it takes in
  // memory.worth and memory.left, for the lanes from r on.
  void value(int r, const T* alarm, T bound, T* shift);
  SPARING_INLINE Vec<T> error_factor(int64_t at, Vec<T> loud) const;
  // Of the clusters that fit, for each lane the one that is worth most, of equal ones the first; -1 if there is none.
  SPARING_INLINE IntVec<T> best_fit(Vec<T> budget, Vec<T> least) const;
  // Expands the clusters that are worth most to the lanes from r on, and returns the number of expansions so far.
  int64_t choose(int r, int64_t pairs, int64_t first_in_task, const T* alarm, T* missed, int64_t* read,
                 int64_t* summaries);
  // A cluster that nobody reads may have had a score so far above all others that nothing is left of theirs: for such
  // lanes, exp(score - shift) again, with the largest score that is left as shift. What is too light stays away.
  void revive(int r, const T* alarm, T* shift);
  // The mass of some exact keys, in near_top and near_total.
  void weigh_exact(const Exact<T>& some);
  void weigh_near();

  // Attention to summaries and to the keys near by; see absorb.h.
  // Starts the block with what the summaries add, without the members that lie near by.
  void absorb_summaries(const T* shift);
  // Absorbs some exact keys, and takes back what the summaries said for them; adds to `met`, the keys that a lane saw.
  void absorb_exact(const Exact<T>& some, const T* shift, Int<T>* met);
  void absorb_near(const T* shift, int64_t* read);
};

}  // namespace sparing::SPARING_ISA
