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
  StoredTokens<T> x;       // one item and one head of items * tokens rows
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
  // What depends on the weight alone, for each head: rows of W, and how to draw them.
  const T* rows;          // [heads][row_entries]
  const T* inverse;       // [heads][features], 1 / p
  const double* ladder;   // [heads][features], p(0) + ... + p(k)
  const int32_t* starts;  // [heads][kStarts], where to start the search in it
  // The shared list; null: each token has a list.
  int32_t* list;  // [heads][features]
  T* listed;      // as `rows`, of the features of the list and divided by their probability
  T* out;         // [items][heads][tokens][width]
};

// What projections of the same weight share (projection_tables in Python).
template <class T>
struct ProjectionTables {
  StoredTokens<T> weight;  // [heads] heads of `width` rows of `features`
  int64_t heads, features, width;
  T* rows;  // as in SampledProjection
  T* inverse;
  double* ladder;
  int32_t* starts;
};

// Tokens of one head that one task projects.
struct TokenChunk {
  int64_t head, first, count;  // positions first .. first + count - 1 in the head's order
  int64_t samples;             // samples of the first token, which has the most
};

inline constexpr int64_t kStarts = 4097;

template <class T>
struct ProjectionKernels {
  int64_t chunk;                                            // largest number of tokens in a task
  int64_t (*row_entries)(int64_t features, int64_t width);  // entries of `rows` per head
  int64_t (*tables_scratch)(const ProjectionTables<T>&);    // working memory of a task, in entries of T
  void (*tables)(const ProjectionTables<T>&, int64_t first_head, int64_t last_head, T* scratch);
  int64_t (*scratch)(const SampledProjection<T>&);  // working memory of either step below
  void (*prepare)(const SampledProjection<T>&, int64_t first_head, int64_t last_head, T* scratch);
  void (*project)(const SampledProjection<T>&, const TokenChunk*, T* scratch);
};

// Log-sum-exp of each query, and the largest weight that each key receives.
template <class T>
struct Received {
  StoredTokens<T> q, k;
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
