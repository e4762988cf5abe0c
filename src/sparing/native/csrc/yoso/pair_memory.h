// The working memory of pairs.h: the tokens of both sides, sorted by code.
#pragma once

#include "common/tile.h"
#include "yoso/call.h"

namespace sparing::SPARING_ISA {

namespace yoso {

inline constexpr int32_t kBlock = 64;  // tokens of either side that are multiplied pair by pair at once

// Some tokens of one side, in their order.
struct Span {
  const int32_t* tokens;
  int32_t count;

  SPARING_INLINE Span part(int32_t begin, int32_t end) const {
    return {tokens + begin, (end < count ? end : count) - begin};
  }
};

// Where a bucket is cut: the first query and the first key of a block.
struct Cut {
  int32_t query, key;
};

// The queries or the keys of one head.
template <class T>
struct PairSide {
  int64_t count;
  const int32_t* places;
  T* rows;  // [tokens][stride]: gradient of the output or value, unit vector, gradient of this, its rests
  int32_t *order, *first;  // [tokens] sorted by code, in their order inside each bucket; [2^bits + 1]
  T* grads;                // [tokens][depth], at the places, the result; null where not wanted

  SPARING_INLINE Span bucket(int64_t code) const { return {order + first[code], first[code + 1] - first[code]}; }
  SPARING_INLINE int32_t place(Span span, int32_t at) const { return places[span.tokens[at]]; }

  void sort(const uint16_t* codes, int64_t buckets) const {
    for (int64_t c = 0; c <= buckets; ++c) first[c] = 0;
    for (int64_t j = 0; j < count; ++j) ++first[codes[j]];
    for (int64_t c = 1; c <= buckets; ++c) first[c] += first[c - 1];
    for (int64_t j = count - 1; j >= 0; --j) order[--first[codes[j]]] = int32_t(j);
  }
};

template <class T>
struct PairWork {
  int64_t deep, wide, stride;  // padded entries of a unit vector, of the gradient or value before it, and of a row
  PairSide<T> queries, keys;
  T* weights;      // [kBlock queries][kBlock keys]
  T* products;     // [width][deep] sum of outer products, then their rests
  int32_t* codes;  // [2^bits] codes of the buckets that hold both queries and keys
  Cut* cuts;

  // Points all parts into `memory`, unless it is null, and returns how many entries of T they take.
  int64_t lay_out(const PairSums<T>& call, T* memory) {
    deep = padded<T>(call.depth), wide = padded<T>(call.width), stride = wide + 3 * deep;
    char* base = reinterpret_cast<char*>(memory);
    int64_t used = 0;
    const auto take = [&]<class P>(P*& part, int64_t count) {
      if (memory) part = reinterpret_cast<P*>(base + used);
      used += (count * int64_t(sizeof(P)) + 63) / 64 * 64;
    };
    const int64_t buckets = int64_t(1) << call.most_bits;
    const auto take_side = [&](PairSide<T>& side, int64_t tokens) {
      take(side.rows, tokens * stride), take(side.order, tokens), take(side.first, buckets + 1);
    };
    take_side(queries, call.queries.tokens), take_side(keys, call.keys.tokens);
    take(weights, kBlock * kBlock);
    take(products, 2 * call.width * deep);
    take(codes, buckets);
    take(cuts, (call.queries.tokens + call.keys.tokens) / kBlock + 2);
    return used / int64_t(sizeof(T));
  }
};

}  // namespace yoso

}  // namespace sparing::SPARING_ISA
