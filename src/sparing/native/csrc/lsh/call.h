#pragma once

#include "common/softmax_call.h"
#include "common/tokens.h"

namespace sparing {

// Arguments of the kernels of hash-bucket attention (lsh in Python). Included by kernels.h.

// The largest norms among the rows of a rotation, scaled to what was rounded.
struct RotationBounds {
  double norm;   // of a row
  double error;  // of what rounding changed
  double part;   // of the part of a rounded row that is summed in 16 bits
};

// argmax([-R x; R x]) for several rotations R.
template <class T>
struct RotationHash {
  Tokens<const T> x;
  const double* rotations;  // [heads][rows][rounds][depth]
  const int64_t* used;      // [items] how many of the rows an item uses
  int64_t items, heads, tokens, depth, rows, rounds;
  int32_t* rounded;        // [heads][rounds][rounded_size] the rotations in 8 bits, four entries in each number
  RotationBounds* bounds;  // [heads][rounds]
  T* near;                 // [heads][rounds][rows][depth] the rotations, scaled as before they were rounded
  int32_t* out;            // [rounds][items][heads][tokens]
};

// Which keys the queries of one head look at in one round: those at the places from, from + 1, ... of the list of keys
// sorted by bucket. A negative place counts from the end of the list.
struct Arcs {
  int32_t* order;   // [keys] the key at each place
  int32_t* place;   // [keys] the place of each key
  int32_t* sorted;  // [queries] the queries in an order in which neighbours look at almost the same keys
  int32_t* from;    // [queries]
  int32_t* length;  // [queries]
};

// Softmax over the keys that some round shows. Between rounds, `out` is not yet divided by the total.
template <class T>
struct Lsh : SoftmaxCall<T> {
  const int64_t* counts;  // [items] valid keys
  int64_t rounds;
  int64_t span, window;  // places that the queries of a strip, and those of the strips that share copies, may cover
  int64_t tile;          // keys that are summed from zero
  bool in_turn;          // each term is added to the sum before it, without a rest
  bool once;             // a key that several rounds show counts once
  bool wraps;            // arcs may start before the first place
  bool itself;           // a query that no round shows a key sees its own
};

template <class T>
struct LshKernels {
  int64_t (*rounded_size)(const RotationHash<T>&);
  // Rounds the rotations of tasks `begin` to `end`: [heads][rounds].
  void (*round_rotations)(const RotationHash<T>&, int64_t begin, int64_t end);
  int64_t (*hash_scratch)(const RotationHash<T>&);  // in entries of int32
  int64_t (*hash_tasks)(const RotationHash<T>&);
  void (*hash)(const RotationHash<T>&, int64_t begin, int64_t end, int32_t* scratch);
  int64_t (*scratch)(const Lsh<T>&, bool backward);  // in entries of T
  // The sorted queries of one head from `first` to `last` in one round; the rounds in their order. `arcs` holds those
  // of the head's rounds.
  void (*forward)(const Lsh<T>&, const Arcs* arcs, int64_t unit, int64_t round, int64_t first, int64_t last,
                  T* scratch);
  // All of one head.
  void (*backward)(const Lsh<T>&, const Arcs* arcs, int64_t unit, T* scratch);
};

}  // namespace sparing
