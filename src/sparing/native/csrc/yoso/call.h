// Arguments of the kernels of yoso: hash codes, sums over tokens with equal codes, and rows of unit length. Plain
// data only; see kernels.h.
#pragma once

#include "common/tokens.h"

namespace sparing {

inline constexpr int64_t kHashesAtOnce = 32;  // hashes whose codes exist at the same time, as in hashing.py

// Rows divided by their length, in place.
template <class T>
struct UnitRows {
  T* rows;  // [rows][width]
  int64_t width;
  double smallest;  // a row whose entries are all smaller becomes zeros
  T* inverse;       // [rows] 1 / length; 0 for such rows
};

// Values of tokens, or gradients. If `unit` is given, x are gradients with respect to these rows of unit length, and
// they are read as gradients with respect to the rows before normalisation: (x - unit (unit . x)) / length.
template <class T>
struct Values {
  StoredTokens<T> x;  // 16 bits only without `unit`
  int64_t heads, tokens, width;
  Tokens<const T> unit;  // null: none
  const T* inverse;      // [items][heads][tokens] 1 / length
  double* along;         // same shape: unit . x
};

// The queries or the keys of a call. Only counts[item] of them are valid, at places[item * tokens ...], in order.
struct Coded {
  int64_t tokens;         // tokens per item, including padding
  const int64_t* counts;  // [items]
  const int32_t* places;  // [items][tokens]
  uint16_t* codes;        // [items][heads][hashes][tokens], in the order of the places
};

// Codes of the tokens of the heads `first_head` to `first_head + some_heads - 1`: bit b of code h is the side of the
// b-th hyperplane of hash h.
template <class T>
struct HashCodes {
  StoredTokens<T> x;
  Coded coded;
  int64_t items, heads, depth, hashes;
  int64_t first_head, some_heads;
  const int32_t* bits;  // [items], at most `most_bits`
  int64_t most_bits;
  // Hadamard: hash h is coordinate first + h of rotations of `size` coordinates, by signs +-1.
  int64_t size, first;
  const T* signs;  // [some_heads][most_bits][3][size]; null: Gaussian
  // Gaussian: normal vectors, the same rounded, and how far from zero a rounded product must be to be sure of its sign.
  const double* normals;  // [some_heads][most_bits][hashes][depth]
  const T* rounded;       // same shape
  const T* margins;       // [some_heads][most_bits][hashes]
};

enum class Order : int32_t { all, past, future };  // past: a token sees those at its own position and before

// out_i = factor * sum over the hashes and over the tokens j of `from` with the code of i of values_j
template <class T>
struct TableSums {
  Coded from, to;
  Values<T> values;
  int64_t items, heads, width, hashes;
  const int32_t* bits;
  int64_t most_bits;
  Order order;
  T factor;
  bool add;  // add to `out` instead of overwriting it
  T* out;    // [items][heads][to.tokens][width]
};

// Arguments of pairs.h for one chunk of hashes. Gradients are summed over all chunks; after the last, they are
// multiplied by bits and factor, and converted from unit vectors to the vectors that were given.
template <class T>
struct PairSums {
  Coded queries, keys;
  Values<T> grads, values;  // the gradient of the sums at the queries, and the values of the keys
  StoredTokens<T> q, k;     // rows of `depth` entries, not normalised, not of 16 bits
  int64_t items, heads, depth, width, hashes;
  const int32_t* bits;
  int64_t most_bits;
  bool causal, exact;
  double factor;
  bool add, last;      // add to the gradients instead of overwriting them; the last chunk
  T *grad_q, *grad_k;  // [items][heads][tokens][depth]; null where not wanted
};

template <class T>
struct YosoKernels {
  void (*unit_rows)(const UnitRows<T>&, int64_t begin, int64_t end);
  void (*find_along)(const Values<T>&, int64_t begin, int64_t end);
  // Working memory in entries of T, the number of tasks, and the work from task `begin` to `end`.
  int64_t (*hash_scratch)(const HashCodes<T>&);
  int64_t (*hash_tasks)(const HashCodes<T>&);
  void (*hash_codes)(const HashCodes<T>&, int64_t begin, int64_t end, T* scratch);
  int64_t (*table_scratch)(const TableSums<T>&);
  int64_t (*table_tasks)(const TableSums<T>&);
  void (*table_sums)(const TableSums<T>&, int64_t begin, int64_t end, T* scratch);
  int64_t (*pair_scratch)(const PairSums<T>&);
  void (*pair_sums)(const PairSums<T>&, int64_t begin, int64_t end, T* scratch);  // a task is a head
};

}  // namespace sparing
