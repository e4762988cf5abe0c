// Attention to the keys with the largest scores (top_keys in Python), without a matrix of all scores: each query keeps
// a list of candidates and the score that a key must exceed to become one.
#pragma once

#include "common/rows.h"
#include "common/simd.h"
#include "common/softmax.h"
#include "common/sums.h"
#include "common/tile.h"
#include "common/widen.h"
#include "top_keys/call.h"

namespace sparing::SPARING_ISA {

template <class T>
struct CausalMask {
  static constexpr bool masks = true;
  const Int<T>* place;  // positions of the keys
  Int<T> first;         // position of the first lane

  SPARING_INLINE IntVec<T> operator()(int64_t c, int r) const { return place[c] <= first + Int<T>(r) + iota<Int<T>>(); }
};

// The candidates of one query, in the order of their index: among equal scores the lower index wins.
template <class T>
struct Candidates {
  T* scores;  // padded to whole vectors, as is `keys`
  Int<T>* keys;
  int64_t count;

  SPARING_INLINE int64_t above(T limit) const {
    IntVec<T> hits{};
    for (int64_t c = 0; c < count; c += lanes<T>) hits -= IntVec<T>(load<T>(scores + c) > limit);
    Int<T> total = 0;
    for (int i = 0; i < lanes<T>; ++i) total += hits[i];
    return total;
  }

  SPARING_INLINE void range(T* low, T* high) const {
    Vec<T> least = all(-kNever<T>), most = all(kNever<T>);
    int64_t c = 0;
    for (; c + lanes<T> <= count; c += lanes<T>) {
      const Vec<T> score = load<T>(scores + c);
      least = score < least ? score : least;
      most = larger<T>(most, score);
    }
    *low = -largest<T>(-least), *high = largest<T>(most);
    for (; c < count; ++c) {
      *low = scores[c] < *low ? scores[c] : *low;
      *high = scores[c] > *high ? scores[c] : *high;
    }
  }

  // Keeps the `wanted` < count largest, and returns the smallest of these.
  T cut(int64_t wanted) {
    for (int64_t c = count; c % lanes<T>; ++c) scores[c] = kNever<T>;
    T low, high;
    range(&low, &high);
    // Bisection: at least `wanted` scores lie above `low`, fewer above `high`, until exactly `wanted` are above `high`,
    // or no number lies between. Then those above `high` stay, and the first ones that are equal to it.
    int64_t over = above(low);
    if (over <= wanted) high = low;
    while (over != wanted) {
      const T middle = low + (high - low) / 2;
      if (!(low < middle && middle < high)) break;
      over = above(middle);
      (over > wanted ? low : high) = middle;
    }
    int64_t equals = wanted - above(high), kept = 0;
    if (equals == 0) {
      for (int64_t c = 0; c < count; ++c) {
        const T score = scores[c];
        scores[kept] = score, keys[kept] = keys[c];
        kept += score > high;
      }
    } else {
      for (int64_t c = 0; c < count; ++c) {
        const T score = scores[c];
        const bool tied = score == high && equals > 0;
        scores[kept] = score, keys[kept] = keys[c];
        kept += score > high || tied, equals -= tied;
      }
    }
    count = kept;
    range(&low, &high);
    return low;
  }

  // Writes the softmax-weighted sum of the candidates' values and the log-sum-exp; zeros and -inf without candidates.
  // `sums` is working memory, [2][width].
  template <class E>
  void finish(const E* values, int64_t stride, int64_t width, T* sums, T* out, T* lse) {
    T top = kNever<T>;
    for (int64_t c = 0; c < count; ++c) top = scores[c] > top ? scores[c] : top;
    for (int64_t c = count; c % lanes<T>; ++c) scores[c] = kNever<T>;
    const T total = sum<T>(long_sum<Vec<T>>(count, lanes<T>, [&](int64_t c) {
      const Vec<T> weights = exponential(load<T>(scores + c) - top);
      store<T>(scores + c, weights);
      return weights;
    }));
    const T inverse = inverse_of(total);
    for (int64_t c = 0; c < count; ++c) scores[c] *= inverse;
    clear(sums, 2 * width);
    add_rows<T, E>(scores, keys, count, values, stride, width, sums, width);
    for (int64_t e = 0; e < width; ++e) out[e] = sums[e];
    *lse = log_sum_exp(top, total);
  }
};

// Adds those of `found` keys whose score exceeds a query's limit to the candidates of that query, for a block of
// queries. A full list is cut down to the `wanted` best, whose smallest score is the new limit.
template <class T>
void collect(Candidates<T>* lists, T* limits, int64_t wanted, int64_t room, const T* scores, const Int<T>* place,
             int64_t found) {
  for (int64_t c = 0; c < found; ++c)
    for (int r = 0; r < kRows; r += lanes<T>) {
      const T* at = scores + c * kRows + r;
      for (uint32_t hits = held<T>(load<T>(at) > load<T>(limits + r)); hits; hits &= hits - 1) {
        const int lane = __builtin_ctz(hits);
        Candidates<T>& list = lists[r + lane];
        list.scores[list.count] = at[lane];
        list.keys[list.count++] = place[c];
        if (list.count == room && room > wanted) limits[r + lane] = list.cut(wanted);
      }
    }
}

template <class T>
int64_t top_keys_blocks(const TopKeys<T>& call) {
  return (call.queries + kRows - 1) / kRows;
}

template <class T>
int64_t top_keys_tasks(const TopKeys<T>& call) {
  return call.items * call.heads * top_keys_blocks(call);
}

// Candidates that a query has room for: enough that cutting the list costs no more than filling it.
template <class T>
int64_t top_keys_room(const TopKeys<T>& call) {
  return 2 * call.chosen < call.keys ? 2 * call.chosen : call.keys;
}

template <class T>
int64_t whole_vectors(int64_t count) {
  return (count + lanes<T> - 1) / lanes<T> * lanes<T>;
}

template <class T>
int64_t top_keys_scratch(const TopKeys<T>& call) {
  static_assert(sizeof(Int<T>) == sizeof(T));
  return softmax_scratch<T>(call.depth, 0, false) + kRows * (2 * whole_vectors<T>(top_keys_room(call)) + 1) +
         2 * call.width + call.q.room(kRows, call.depth) + call.k.room(kKeys, call.depth);
}

template <class T>
void top_keys_forward(const TopKeys<T>& call, int64_t begin, int64_t end, T* scratch) {
  Block<T> block{};
  block.depth = call.depth;
  T* limits = scratch + lay_out<T>(&block, scratch, false);
  const int64_t blocks = top_keys_blocks(call), room = top_keys_room(call), step = whole_vectors<T>(room);
  Candidates<T> lists[kRows];
  for (int r = 0; r < kRows; ++r) {
    lists[r].scores = limits + kRows + 2 * r * step;
    lists[r].keys = reinterpret_cast<Int<T>*>(lists[r].scores + step);
  }
  T* sums = limits + kRows + 2 * kRows * step;
  T *query_room = sums + 2 * call.width, *key_room = query_room + call.q.room(kRows, call.depth);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t unit = task / blocks, first = task % blocks * kRows;
    const int64_t item = unit / call.heads, head = unit % call.heads;
    const int64_t count = call.queries - first < kRows ? call.queries - first : kRows;
    const int64_t last = call.causal && first + count < call.keys ? first + count : call.keys;
    const T *queries[kRows], *keys[kKeys];
    for (int64_t r = 0; r < count; ++r)
      queries[r] = row_of(call.q, item, head, first + r, call.depth, query_room + call.q.room(r, call.depth));
    transpose<T>(queries, count, call.depth, call.scale, block.queries);
    start(block);
    // Lanes beyond the queries collect nothing.
    for (int64_t r = 0; r < kRows; ++r) limits[r] = r < count ? kNever<T> : -kNever<T>, lists[r].count = 0;
    Int<T> place[kKeys];
    for (int64_t next = 0; next < last;) {
      int64_t found = 0;
      for (; found < kKeys && next < last; ++next) {
        if (call.keep && !call.keep[item * call.keys + next]) continue;
        place[found] = Int<T>(next);
        keys[found] = row_of(call.k, item, head, next, call.depth, key_room + call.k.room(found, call.depth));
        ++found;
      }
      const auto visit = [&](const auto& mask) {
        for (int strip = 0; strip < kRows; strip += kStrip<T>) masked_scores(block, keys, {0, found}, strip, mask);
        collect<T>(lists, limits, call.chosen, room, block.scores, place, found);
        if (call.all_lse) absorb(block, keys, keys, found, mask);
      };
      if (call.causal && next > first)
        visit(CausalMask<T>{place, Int<T>(first)});
      else
        visit(SeesAll{});
    }
    const int64_t row = unit * call.queries + first;
    for (int64_t r = 0; r < count; ++r) {
      if (lists[r].count > call.chosen) lists[r].cut(call.chosen);
      with_stored(call.v, item, head, 0, [&](const auto* values) {
        lists[r].finish(values, call.v.token_step, call.width, sums, call.out + (row + r) * call.width,
                        call.lse + row + r);
      });
    }
    for (int64_t r = 0; call.all_lse && r < count; ++r)
      call.all_lse[row + r] = log_sum_exp(block.top[r], block.total[r]);
  }
}

template <class T>
constexpr TopKeysKernels<T> top_keys_kernels() {
  return {top_keys_scratch<T>, top_keys_tasks<T>, top_keys_forward<T>};
}

}  // namespace sparing::SPARING_ISA
