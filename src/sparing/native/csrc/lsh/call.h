#pragma once

#include "common/softmax_call.h"
#include "common/tokens.h"

namespace sparing {

// Arguments of the kernels of hash-bucket attention (lsh in Python). Included by kernels.h.

// The largest norms over the rows of a rotation, after the scaling that precedes rounding.
struct RotationBounds {
  double norm;   // norm of a row
  double error;  // norm of the rounding error of a row
  double part;   // norm of a part of a rounded row; parts are summed in 16 bits (see rounding.h)
};

// argmax([-R x; R x]) for several rotations R.
template <class T>
struct RotationHash {
  StoredTokens<T> x;
  const double* rotations;  // [heads][rows][rounds][depth]
  const int64_t* used;      // [items] how many of the rows an item uses
  int64_t items, heads, tokens, depth, rows, rounds;
  int32_t* rounded;        // [heads][rounds][rounded_size] the rotations in 8 bits, four entries per word
  RotationBounds* bounds;  // [heads][rounds]
  T* near;                 // [heads][rounds][rows][depth] the scaled rotations before rounding
  int32_t* out;            // [rounds][items][heads][tokens]
};

// The keys that the queries of one head see in one round: those at the places from, from + 1, ... of the list of keys
// sorted by bucket. A negative place counts from the end of the list.
struct Arcs {
  int32_t* order;   // [keys] the key at each place
  int32_t* place;   // [keys] the place of each key
  int32_t* sorted;  // [queries] the queries in an order in which neighbours look at almost the same keys
  int32_t* from;    // [queries]
  int32_t* length;  // [queries]
};

// Softmax over the keys that a query sees in some round. Between rounds, `out` is not yet divided by the total.
template <class T>
struct Lsh : SoftmaxCall<T> {
  const int64_t* counts;  // [items] valid keys
  int64_t rounds;
  int64_t span, window;  // places that the queries of a strip, and those of the strips that share copies, may cover
  int64_t tile;          // keys whose terms are summed without compensation; see sums.h
  bool in_turn;          // terms are added one by one, without compensation
  bool once;             // a key that is seen in several rounds counts once
  bool wraps;            // arcs may start before the first place
  bool itself;           // a query that sees no key in any round sees its own
};

template <class T>
struct LshKernels {
  int64_t (*rounded_size)(const RotationHash<T>&);
  // Rounds the rotations of tasks `begin` to `end`; a task is one round of one head.
  void (*round_rotations)(const RotationHash<T>&, int64_t begin, int64_t end);
  int64_t (*hash_scratch)(const RotationHash<T>&);  // in entries of int32
  int64_t (*hash_tasks)(const RotationHash<T>&);
  void (*hash)(const RotationHash<T>&, int64_t begin, int64_t end, int32_t* scratch);
  int64_t (*scratch)(const Lsh<T>&, bool backward);  // in entries of T
  // Computes one round of one head for the sorted queries `first` to `last`; rounds must be computed in order. `arcs`
  // holds the arcs of all rounds of the head.
  void (*forward)(const Lsh<T>&, const Arcs* arcs, int64_t unit, int64_t round, int64_t first, int64_t last,
                  T* scratch);
  // Computes the gradients of one head, over all rounds.
  void (*backward)(const Lsh<T>&, const Arcs* arcs, int64_t unit, T* scratch);
};

}  // namespace sparing
