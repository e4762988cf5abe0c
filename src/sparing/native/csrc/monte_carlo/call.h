#pragma once

#include "common/tokens.h"

namespace sparing {

// Where a token is: the row of its hidden state in `x`, and of its value in `out`, `counts` and `ranks`.
struct TokenSlot {
  int64_t token, value;
};

// x W from a few sampled features of x (sampled_projection in Python).
template <class T>
struct SampledProjection {
  const T* x;              // [items][tokens][features]
  const T* weight;         // [heads][width][features]
  const T* bias;           // [heads][width]; null: no bias
  const int64_t* counts;   // [items][heads][tokens] number of samples of a token; `features` means exact
  const int64_t* ranks;    // [items][heads][tokens] index of a token's list of samples
  const int64_t* streams;  // [heads]
  int64_t items, heads, tokens, features, width;
  uint64_t seed;
  uint32_t purpose;
  bool shared, stratified;
  const TokenSlot* order;  // [heads][items * tokens], by decreasing count
  const int64_t* most;     // [heads], the largest count below `features`
  // Prepared for each head: rows of W, and how to draw them.
  T* rows;    // [heads][row_entries]
  T* listed;  // the same for the features of the shared list, divided by their probability; null: each token has a list
  T* inverse;       // [heads][features], 1 / p
  double* ladder;   // [heads][features], p(0) + ... + p(k)
  int32_t* starts;  // [heads][kStarts], where to start the search in it
  int32_t* list;    // [heads][features], the shared list
  T* out;           // [items][heads][tokens][width]
};

// Tokens of one head that one task projects.
struct TokenChunk {
  int64_t head, first, count;  // positions first .. first + count - 1 in the head's order
  int64_t samples;             // samples of the first token, which has the most
};

inline constexpr int64_t kStarts = 4097;

template <class T>
struct ProjectionKernels {
  int64_t chunk;                                        // largest number of tokens in a task
  int64_t (*row_entries)(const SampledProjection<T>&);  // entries of `rows` per head
  int64_t (*scratch)(const SampledProjection<T>&);      // working memory of either step, in entries of T
  void (*prepare)(const SampledProjection<T>&, int64_t first_head, int64_t last_head, T* scratch);
  void (*project)(const SampledProjection<T>&, const TokenChunk*, T* scratch);
};

// Log-sum-exp of each query, and the largest weight that each key receives.
template <class T>
struct Received {
  Tokens<const T> q, k;
  const uint8_t* keep;     // [items][keys], 0 for padded keys; null: all are valid
  const uint8_t* counted;  // [items][queries], 0 for queries whose weights do not count; null: all do
  int64_t items, heads, queries, keys, depth;
  int64_t parts;  // tasks that share the queries of a head
  T scale;
  T* largest;  // [items][heads][parts][keys]
  T* lse;      // [items][heads][queries]
};

template <class T>
struct ReceivedKernels {
  int64_t (*scratch)(const Received<T>&);
  void (*forward)(const Received<T>&, int64_t begin, int64_t end, T* scratch);  // a task per item, head and part
};

}  // namespace sparing
