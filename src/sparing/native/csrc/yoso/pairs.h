// The gradients of yoso with respect to the unit vectors of queries, u_i, and of keys, w_j, with g the gradient of the
// output and v the values:
//
//   grad u_i = sum over the hashes and the keys j with the code of i    of  (g_i . v_j) slope(u_i . w_j) w_j
//   grad w_j = sum over the hashes and the queries i with the code of j of  (g_i . v_j) slope(u_i . w_j) u_i
//
// where the slope is 1, or, if `exact`, that of the collision probability. Hash by hash, tokens are sorted by code, and
// each bucket is processed at once, so that the rows of its r queries and c keys are loaded once, not once per pair.
// Where a bucket is so full that its pairs cost more than the outer products v_j^T w_j and g_i^T u_i, these are summed
// first and then multiplied by each g_i and v_j: never more than O((r + c) e d). Where the order of the tokens matters,
// a bucket is cut, from its first token on, into blocks: tokens of a block are multiplied pair by pair, those of
// earlier or later blocks through a running sum of outer products. The order of the sums of token i then does not
// depend on tokens that i may not see. The exact slope needs every pair.
#pragma once

#include "common/simd.h"
#include "common/sums.h"
#include "common/tile.h"
#include "common/tokens.h"
#include "yoso/call.h"
#include "yoso/hash.h"
#include "yoso/pair_memory.h"
#include "yoso/unit_rows.h"

namespace sparing::SPARING_ISA {

namespace yoso {

inline constexpr int32_t kTile = 32;       // tokens whose outer products are summed at once: with the sum, they fill L1
inline constexpr int64_t kRowsAhead = 32;  // rows that are prefetched before their bucket is processed

// Whether summing outer products beats `queries` x `keys` pairs. A pair multiplies and adds `pair` times, the outer
// products `outer` times for each token; operations of a pair take longer, because of sums across lanes and scattered
// rows.
inline bool is_full(int64_t queries, int64_t keys, int64_t pair, int64_t outer) {
  return queries * keys * pair * 3 > (queries + keys) * outer * 2;
}

// The gradients of one head.
template <class T>
struct Pairs {
  const PairSums<T>& call;
  const PairWork<T>& work;
  const PairSide<T>&queries, &keys;
  int64_t item, head, unit, buckets;
  int bits;

  Pairs(const PairSums<T>& call, PairWork<T>& work, int64_t unit)
      : call(call), work(work), queries(work.queries), keys(work.keys), unit(unit) {
    item = unit / call.heads, head = unit % call.heads;
    bits = call.bits[item], buckets = int64_t(1) << bits;
    const auto set = [&](PairSide<T>& side, const Coded& coded, T* grads) {
      side.count = coded.counts[item], side.places = coded.places + item * coded.tokens;
      side.grads = grads ? grads + unit * coded.tokens * call.depth : nullptr;
    };
    set(work.queries, call.queries, call.grad_q), set(work.keys, call.keys, call.grad_k);
  }

  SPARING_INLINE T* row(const PairSide<T>& side, int64_t token) const { return side.rows + token * work.stride; }
  SPARING_INLINE T* grad(const PairSide<T>& side, int64_t token) const {
    return row(side, token) + work.wide + work.deep;
  }

  void gather_rows(const PairSide<T>& side, const Values<T>& lefts, const StoredTokens<T>& points) const {
    for (int64_t j = 0; j < side.count; ++j) {
      T* to = row(side, j);
      read_values(lefts, item, head, side.places[j], 0, call.width, to);
      for (int64_t e = call.width; e < work.wide; ++e) to[e] = T(0);
      const T* point = points.at(item, head, side.places[j]);
      const Shrink unit_of = to_unit(point, call.depth, kNoDirection);
      for (int64_t k = 0; k < work.deep; ++k) to[work.wide + k] = k < call.depth ? T(unit_of(double(point[k]))) : T(0);
      clear(grad(side, j), 2 * work.deep);
      if (side.grads && call.add)
        for (int64_t k = 0; k < call.depth; ++k) grad(side, j)[k] = side.grads[side.places[j] * call.depth + k];
    }
  }

  // Prefetches the rows of a bucket.
  SPARING_INLINE void fetch(const PairSide<T>& side, Span span) const {
    for (int32_t t = 0; t < span.count && t < kBlock; ++t) {
      const char* at = reinterpret_cast<const char*>(row(side, span.tokens[t]));
      for (int64_t line = 0; line < work.stride * int64_t(sizeof(T)); line += 64) __builtin_prefetch(at + line, 1);
    }
  }

  SPARING_INLINE void add_to_grad(T* to, Vec<T> x) const { add_to<T>(to, work.deep, x); }

  // products += left^T point for some tokens
  void add_products(const PairSide<T>& side, Span span) const {
    const int64_t deep = work.deep;
    for (int32_t first = 0; first < span.count; first += kTile) {
      const Span some = span.part(first, first + kTile);
      const T* rows[kTile];
      for (int32_t t = 0; t < some.count; ++t) rows[t] = row(side, some.tokens[t]);
      for (int64_t k = 0; k < deep; k += kWide * lanes<T>)
        in_tiles<kDeep>(call.width, [&]<int M>(int64_t e) {
          Vec<T> sums[M][kWide] = {};
          for (int32_t t = 0; t < some.count; ++t) {
            Vec<T> point[kWide];
            for (int p = 0; p < kWide; ++p) point[p] = load<T>(rows[t] + work.wide + k + p * lanes<T>);
            for (int i = 0; i < M; ++i)
              for (int p = 0; p < kWide; ++p) sums[i][p] += all(rows[t][e + i]) * point[p];
          }
          for (int i = 0; i < M; ++i)
            for (int p = 0; p < kWide; ++p)
              add_to<T>(work.products + (e + i) * deep + k + p * lanes<T>, call.width * deep, sums[i][p]);
        });
    }
  }

  // gradient += left products for some tokens
  void multiply(const PairSide<T>& side, Span span) const {
    const int64_t deep = work.deep;
    in_tiles<kDeep>(span.count, [&]<int M>(int64_t first) {
      const T* left[M];
      for (int i = 0; i < M; ++i) left[i] = row(side, span.tokens[first + i]);
      for (int64_t k = 0; k < deep; k += kWide * lanes<T>) {
        Vec<T> sums[M][kWide] = {};
        for (int64_t e = 0; e < call.width; ++e) {
          Vec<T> product[kWide];
          for (int p = 0; p < kWide; ++p) product[p] = load<T>(work.products + e * deep + k + p * lanes<T>);
          for (int i = 0; i < M; ++i)
            for (int p = 0; p < kWide; ++p) sums[i][p] += all(left[i][e]) * product[p];
        }
        for (int i = 0; i < M; ++i)
          for (int p = 0; p < kWide; ++p)
            add_to_grad(grad(side, span.tokens[first + i]) + k + p * lanes<T>, sums[i][p]);
      }
    });
  }

  void clear_products() const { clear(work.products, 2 * call.width * work.deep); }

  // weights[m] = the dot product of `mine` and theirs[m] over `width` entries from `offset` on, for m < M
  template <int M>
  SPARING_INLINE void dot_rows(const T* mine, const T* const* theirs, int64_t offset, int64_t width, T* weights) const {
    Vec<T> sums[M] = {};
    for (int64_t e = offset; e < offset + width; e += lanes<T>) {
      const Vec<T> x = load<T>(mine + e);
      for (int m = 0; m < M; ++m) sums[m] += x * load<T>(theirs[m] + e);
    }
    for (int m = 0; m < M; ++m) weights[m] = folded<T>(sums[m]);
  }

  // to += sum over `count` rows of weight * unit vector; weights are `step` apart
  SPARING_INLINE void weigh(const T* const* rows, int32_t count, const T* weights, int64_t step, T* to) const {
    in_tiles<8>(work.deep / lanes<T>, [&]<int M>(int64_t part) {
      const int64_t k = part * lanes<T>;
      Vec<T> sums[M] = {};
      for (int32_t t = 0; t < count; ++t) {
        const Vec<T> weight = all(weights[t * step]);
        for (int m = 0; m < M; ++m) sums[m] += weight * load<T>(rows[t] + work.wide + k + m * lanes<T>);
      }
      for (int m = 0; m < M; ++m) add_to_grad(to + k + m * lanes<T>, sums[m]);
    });
  }

  // 1 / (pi p sqrt(1 - x^2)) with p = 1 - arccos(x) / pi, as `steepness` in methods/yoso.py
  static double steepness(double x) {
    constexpr double pi = 3.14159265358979323846, steepest = 0.99999950000004166667;  // cos(0.001)
    x = x > steepest ? steepest : x < -steepest ? -steepest : x;
    return 1.0 / ((pi - __builtin_acos(x)) * __builtin_sqrt(1.0 - x * x));
  }

  // Processes at most kBlock queries and kBlock keys pair by pair. A query sees the first `seen` keys, a number that
  // does not decrease from one query to the next.
  void meet(Span some_queries, Span some_keys) const {
    const T *query_rows[kBlock], *key_rows[kBlock];
    int32_t seen[kBlock];
    for (int32_t t = 0; t < some_keys.count; ++t) key_rows[t] = row(keys, some_keys.tokens[t]);
    for (int32_t m = 0; m < some_queries.count; ++m) {
      query_rows[m] = row(queries, some_queries.tokens[m]);
      seen[m] = some_keys.count;
      if (!call.causal) continue;
      seen[m] = m ? seen[m - 1] : 0;
      while (seen[m] < some_keys.count && keys.place(some_keys, seen[m]) <= queries.place(some_queries, m)) ++seen[m];
    }
    for (int32_t m = 0; m < some_queries.count; ++m) {
      T* weights = work.weights + m * kBlock;
      in_tiles<4>(seen[m],
                  [&]<int M>(int64_t t) { dot_rows<M>(query_rows[m], key_rows + t, 0, work.wide, weights + t); });
      if (call.exact)
        for (int32_t t = 0; t < seen[m]; ++t) {
          T x;
          dot_rows<1>(query_rows[m], key_rows + t, work.wide, work.deep, &x);
          weights[t] *= T(steepness(double(x)));
        }
      if (queries.grads && seen[m]) weigh(key_rows, seen[m], weights, 1, grad(queries, some_queries.tokens[m]));
    }
    if (!keys.grads) return;
    int32_t m = 0;  // the first query that sees the key
    for (int32_t t = 0; t < some_keys.count; ++t) {
      while (m < some_queries.count && seen[m] <= t) ++m;
      if (m == some_queries.count) return;
      weigh(query_rows + m, some_queries.count - m, work.weights + m * kBlock + t, kBlock,
            grad(keys, some_keys.tokens[t]));
    }
  }

  // Processes all pairs of a query and a key that it sees.
  void all_pairs(Span some_queries, Span some_keys) const {
    for (int32_t i = 0; i < some_queries.count; i += kBlock)
      for (int32_t j = 0; j < some_keys.count; j += kBlock)
        meet(some_queries.part(i, i + kBlock), some_keys.part(j, j + kBlock));
  }

  void full_bucket(Span some_queries, Span some_keys) const {
    if (queries.grads) {
      clear_products();
      add_products(keys, some_keys);
      multiply(queries, some_queries);
    }
    if (keys.grads) {
      clear_products();
      add_products(queries, some_queries);
      multiply(keys, some_keys);
    }
  }

  // Cuts a bucket where, counted from its first token on, a block has kBlock queries or keys; returns how many blocks.
  int64_t cut(Span some_queries, Span some_keys) const {
    int64_t blocks = 0;
    int32_t i = 0, j = 0;
    while (i < some_queries.count || j < some_keys.count) {
      const Cut start = work.cuts[blocks++] = {i, j};
      while ((i < some_queries.count || j < some_keys.count) && i - start.query < kBlock && j - start.key < kBlock) {
        const bool key_next = i == some_queries.count ||
                              (j < some_keys.count && keys.place(some_keys, j) <= queries.place(some_queries, i));
        key_next ? ++j : ++i;
      }
    }
    work.cuts[blocks] = {i, j};
    return blocks;
  }

  void causal_bucket(Span some_queries, Span some_keys) const {
    const int64_t blocks = cut(some_queries, some_keys);
    const auto queries_of = [&](int64_t b) { return some_queries.part(work.cuts[b].query, work.cuts[b + 1].query); };
    const auto keys_of = [&](int64_t b) { return some_keys.part(work.cuts[b].key, work.cuts[b + 1].key); };
    for (int64_t b = 0; b < blocks; ++b) meet(queries_of(b), keys_of(b));
    if (queries.grads && blocks > 1) {
      clear_products();
      for (int64_t b = 1; b < blocks; ++b) add_products(keys, keys_of(b - 1)), multiply(queries, queries_of(b));
    }
    if (keys.grads && blocks > 1) {
      clear_products();
      for (int64_t b = blocks - 2; b >= 0; --b) add_products(queries, queries_of(b + 1)), multiply(keys, keys_of(b));
    }
  }

  void bucket(Span some_queries, Span some_keys) const {
    const int64_t wanted = (queries.grads ? 1 : 0) + (keys.grads ? 1 : 0);
    if (call.causal && !call.exact)
      causal_bucket(some_queries, some_keys);
    else if (!call.exact && is_full(some_queries.count, some_keys.count, call.width + wanted * call.depth,
                                    wanted * call.width * call.depth))
      full_bucket(some_queries, some_keys);
    else
      all_pairs(some_queries, some_keys);
  }

  void one_hash(int64_t hash) const {
    const auto codes = [&](const Coded& side) { return side.codes + (unit * call.hashes + hash) * side.tokens; };
    queries.sort(codes(call.queries), buckets);
    keys.sort(codes(call.keys), buckets);
    int64_t used = 0;
    for (int64_t c = 0; c < buckets; ++c) {
      work.codes[used] = int32_t(c);
      used += (queries.first[c] < queries.first[c + 1]) & (keys.first[c] < keys.first[c + 1]);
    }
    int64_t fetched = 0, rows = 0;
    for (int64_t b = 0; b < used; ++b) {
      for (; fetched < used && rows < kRowsAhead; ++fetched) {
        const Span some_queries = queries.bucket(work.codes[fetched]), some_keys = keys.bucket(work.codes[fetched]);
        fetch(queries, some_queries), fetch(keys, some_keys);
        rows += some_queries.count + some_keys.count;
      }
      const Span some_queries = queries.bucket(work.codes[b]), some_keys = keys.bucket(work.codes[b]);
      bucket(some_queries, some_keys);
      rows -= some_queries.count + some_keys.count;
    }
  }

  void finish(const PairSide<T>& side, const StoredTokens<T>& points) const {
    if (!side.grads) return;
    for (int64_t i = 0; i < side.count; ++i) {
      T* to = side.grads + side.places[i] * call.depth;
      if (call.last)  // from the unit vectors to those that were given
        unit_row_backward(points.at(item, head, side.places[i]), grad(side, i), call.depth, kNoDirection,
                          call.factor * bits, to);
      else
        for (int64_t k = 0; k < call.depth; ++k) to[k] = grad(side, i)[k];
    }
  }

  void run() const {
    gather_rows(queries, call.grads, call.q);
    gather_rows(keys, call.values, call.k);
    for (int64_t hash = 0; hash < call.hashes; ++hash) one_hash(hash);
    finish(queries, call.q);
    finish(keys, call.k);
  }
};

template <class T>
int64_t pair_scratch(const PairSums<T>& call) {
  PairWork<T> work{};
  return work.lay_out(call, nullptr);
}

template <class T>
void pair_sums(const PairSums<T>& call, int64_t begin, int64_t end, T* scratch) {
  PairWork<T> work{};
  work.lay_out(call, scratch);
  for (int64_t unit = begin; unit < end; ++unit) Pairs<T>(call, work, unit).run();
}

}  // namespace yoso

}  // namespace sparing::SPARING_ISA
