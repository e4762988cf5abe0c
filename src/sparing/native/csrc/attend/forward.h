// The forward pass of exact attention. Queries are in the lanes: the scores of a tile of keys for a strip of queries,
// [key][query], come from one pass over the keys as they are in memory, a softmax over the keys needs no sum across
// lanes, and the values are read as they are as well. Only queries and results are transposed.
//
// What a query gets depends on its own keys alone, in tiles of kAttendKeys valid ones: not on the other queries of its
// strip or block, for which a key that it does not see has weight zero, nor on padding or other sequences.
#pragma once

#include "attend/call.h"
#include "common/simd.h"
#include "common/softmax.h"
#include "common/sums.h"
#include "common/tile.h"
#include "common/widen.h"

namespace sparing::SPARING_ISA {

inline constexpr int kAttendDeep = SPARING_REGISTERS == 32 ? 8 : 6;  // rows of a tile of products

// Calls tile<N>(i) for parts of `count` with N <= M that are as equal as can be: a tile of few rows waits for its sums.
template <int M, class Tile>
SPARING_INLINE void in_even_tiles(int64_t count, const Tile& tile) {
  const int64_t tiles = (count + M - 1) / M;
  for (int64_t i = 0, left = tiles; left > 0; --left) {
    const int64_t size = (count - i + left - 1) / left;
    const auto choose = [&]<int N>(const auto& again) {
      if constexpr (N > 0) {
        if (size == N) return tile.template operator()<N>(i);
        again.template operator()<N - 1>(again);
      }
    };
    choose.template operator()<M>(choose);
    i += size;
  }
}

// The keys that a strip of queries reads next.
template <class T>
struct AttendTile {
  const T *keys[kAttendKeys], *values[kAttendKeys];
  T bias[kAttendKeys];          // read only if there is one
  int64_t places[kAttendKeys];  // positions, ascending
  int64_t count;
};

// The state of a strip of queries; rows of W * lanes<T> entries are kStrip<T> entries apart.
template <class T>
struct AttendStrip {
  T* queries;  // [depth] scaled
  T* sums;     // [width], then their rests
  T* top;      // [1] largest score so far
  T* total;    // [1] sum of exp(score - top), then its rest
};

// scores[i] = keys[i] . query (+ bias) for i < M, -inf where the position of the key is after that of the query, and
// top = max(top, scores). ahead: how far a key's position is after that of the first query.
template <class T, int M, int W>
SPARING_INLINE void score_tile(const T* const* keys, int64_t depth, const T* queries, const T* bias,
                               const int64_t* places, int64_t first_hidden, T* scores, Vec<T>* top) {
  constexpr int64_t step = kStrip<T>;
  Vec<T> sums[M][W];
  const T* row[M];
  for (int i = 0; i < M; ++i) {
    row[i] = keys[i];
    for (int j = 0; j < W; ++j) sums[i][j] = Vec<T>{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vec<T> column[W];
    for (int j = 0; j < W; ++j) column[j] = load<T>(queries + k * step + j * lanes<T>);
    for (int i = 0; i < M; ++i) {
      const Vec<T> x = all(row[i][k]);
      for (int j = 0; j < W; ++j) sums[i][j] += x * column[j];
    }
  }
  if (bias)
    for (int i = 0; i < M; ++i)
      for (int j = 0; j < W; ++j) sums[i][j] += bias[i];
  if (places[M - 1] >= first_hidden)
    for (int i = 0; i < M; ++i) {
      const int64_t apart = places[i] - first_hidden;
      const Int<T> ahead = Int<T>(apart < 0 ? -1 : apart);
      for (int j = 0; j < W; ++j)
        sums[i][j] = iota<Int<T>>() + Int<T>(j * lanes<T>) > ahead ? sums[i][j] : all(kNever<T>);
    }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < W; ++j) {
      store<T>(scores + i * step + j * lanes<T>, sums[i][j]);
      top[j] = larger<T>(top[j], sums[i][j]);
    }
}

// How a tile's sums meet those of the tiles before.
enum class Meet { alone, first, later };

// out[i] = out[i] * factor + sum_k weights(k) values[k][first + i] for i < M, with rows of weights. The rest of a sum
// is `rest` entries after it.
template <class T, int M, int W, class Weights>
SPARING_INLINE void value_tile(const T* const* values, int64_t first, int64_t count, const Weights& weights, Meet meet,
                               const Vec<T>* factor, T* out, int64_t rest) {
  constexpr int64_t step = kStrip<T>;
  Vec<T> sums[M][W];
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < W; ++j) sums[i][j] = Vec<T>{};
  for (int64_t k = 0; k < count; ++k) {
    const T *value = values[k] + first, *weight = weights(k);
    Vec<T> column[W];
    for (int j = 0; j < W; ++j) column[j] = load<T>(weight + j * lanes<T>);
    for (int i = 0; i < M; ++i) {
      const Vec<T> x = all(value[i]);
      for (int j = 0; j < W; ++j) sums[i][j] += x * column[j];
    }
  }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < W; ++j) {
      T* to = out + i * step + j * lanes<T>;
      if (meet == Meet::later) {
        Running<Vec<T>> sum{rounded(load<T>(to) * factor[j]), rounded(load<T>(to + rest) * factor[j])};
        sum.add(sums[i][j]);
        store<T>(to, sum.sum), store<T>(to + rest, sum.rest);
      } else {
        store<T>(to, sums[i][j]);
        if (meet == Meet::first) store<T>(to + rest, Vec<T>{});
      }
    }
}

// Adds the first `count` keys of a tile to a strip. first_hidden: the first position that not all queries see.
template <class T, int W>
void absorb_tile(const Attend<T>& call, const AttendStrip<T>& strip, const AttendTile<T>& tile, int64_t count,
                 int64_t first_hidden, Meet meet, T* scores) {
  constexpr int64_t step = kStrip<T>;
  Vec<T> before[W], top[W], factor[W], shift[W], total[W];
  for (int j = 0; j < W; ++j) {
    before[j] = meet == Meet::later ? load<T>(strip.top + j * lanes<T>) : all(kNever<T>);
    top[j] = before[j];
  }
  in_even_tiles<kAttendDeep>(count, [&]<int M>(int64_t c) {
    score_tile<T, M, W>(tile.keys + c, call.depth, strip.queries, call.bias ? tile.bias + c : nullptr, tile.places + c,
                        first_hidden, scores + c * step, top);
  });
  for (int j = 0; j < W; ++j) {
    shift[j] = top[j] == kNever<T> ? Vec<T>{} : top[j];
    factor[j] = exponential_below(before[j] - shift[j]);
    total[j] = Vec<T>{};
    store<T>(strip.top + j * lanes<T>, top[j]);
  }
  for (int64_t c = 0; c < count; ++c)
    for (int j = 0; j < W; ++j) {
      T* at = scores + c * step + j * lanes<T>;
      const Vec<T> weight = exponential_below(load<T>(at) - shift[j]);
      store<T>(at, weight);
      total[j] += weight;
    }
  for (int j = 0; j < W; ++j) {
    T* to = strip.total + j * lanes<T>;
    Running<Vec<T>> sum{};
    if (meet == Meet::later) sum = {rounded(load<T>(to) * factor[j]), rounded(load<T>(to + step) * factor[j])};
    sum.add(total[j]);
    store<T>(to, sum.sum), store<T>(to + step, sum.rest);
  }
  in_even_tiles<kAttendDeep>(call.width, [&]<int M>(int64_t e) {
    value_tile<T, M, W>(
        tile.values, e, count, [&](int64_t k) { return scores + k * step; }, meet, factor, strip.sums + e * step,
        call.width * step);
  });
}

// Writes the results of the first `count` queries of a strip to these rows of the outputs. divisor: [1] what their sums
// are divided by.
template <class T>
void finish_strip(const Attend<T>& call, const AttendStrip<T>& strip, int64_t count, const int64_t* rows,
                  const T* divisor) {
  constexpr int N = lanes<T>;
  constexpr int64_t step = kStrip<T>;
  for (int64_t first = 0; first < count; first += N) {
    const int64_t some = count - first < N ? count - first : N;
    const Vec<T> total = load<T>(strip.total + first), whole = load<T>(divisor + first);
    const Vec<T> inverse = whole == T(0) ? Vec<T>{} : T(1) / whole;
    int64_t e = 0;
    for (; e + N <= call.width; e += N) {
      Vec<T> square[N];
      for (int i = 0; i < N; ++i) square[i] = load<T>(strip.sums + (e + i) * step + first) * inverse;
      turn<T>(square);
      for (int r = 0; r < some; ++r) store<T>(call.out + rows[first + r] * call.width + e, square[r]);
    }
    for (; e < call.width; ++e) {
      const Vec<T> entries = load<T>(strip.sums + e * step + first) * inverse;
      for (int64_t r = 0; r < some; ++r) call.out[rows[first + r] * call.width + e] = entries[r];
    }
    const Vec<T> top = load<T>(strip.top + first), found = logarithm(total == T(0) ? all(T(1)) : total) + top;
    const Vec<T> lse = total == T(0) ? all(kNever<T>) : found;
    for (int64_t r = 0; r < some; ++r) {
      const int64_t at = rows[first + r];
      call.lse[at] = lse[r], call.norm.top[at] = top[r], call.norm.total[at] = total[r];
    }
  }
}

template <class T>
int64_t attend_strip_size(const Attend<T>& call) {
  return kStrip<T> * (call.depth + 2 * call.width + 3);
}

template <class T>
int64_t attend_forward_scratch(const Attend<T>& call) {
  return kAttendBlock / kStrip<T> * attend_strip_size(call) + kAttendKeys * kStrip<T> +
         call.q.room(kStrip<T>, call.depth) + call.k.room(kAttendKeys, call.depth) +
         call.v.room(kAttendKeys, call.width);
}

// Points a tile at the keys from `at` on, positions or ranks among the valid ones, and at their values.
template <class T>
SPARING_INLINE void gather_tile(const Attend<T>& call, int64_t item, int64_t kv_head, int64_t at, int64_t end,
                                T* key_room, T* value_room, AttendTile<T>* tile) {
  const int64_t* valid = call.valid ? call.valid + item * call.keys : nullptr;
  tile->count = end - at < kAttendKeys ? end - at : kAttendKeys;
  for (int64_t c = 0; c < tile->count; ++c) {
    const int64_t place = valid ? valid[at + c] : at + c;
    tile->places[c] = place;
    tile->keys[c] = row_of(call.k, item, kv_head, place, call.depth, key_room + call.k.room(c, call.depth));
    tile->values[c] = row_of(call.v, item, kv_head, place, call.width, value_room + call.v.room(c, call.width));
    if (call.bias) tile->bias[c] = call.bias[item * call.keys + place];
  }
}

// Computes one block of queries of one head.
template <class T>
void attend_block(const Attend<T>& call, const AttendBlock& block, int64_t head, T* scratch) {
  constexpr int64_t step = kStrip<T>;
  static_assert(kAttendBlock % kStrip<T> == 0);
  const int64_t kv_head = head / call.groups, strips = (block.count + step - 1) / step;
  AttendStrip<T> strip[kAttendBlock / kStrip<T>];
  T* memory = scratch;
  for (int64_t s = 0; s < kAttendBlock / step; ++s) {
    strip[s] = {memory, memory + call.depth * step, memory + (call.depth + 2 * call.width) * step,
                memory + (call.depth + 2 * call.width + 1) * step};
    memory += attend_strip_size(call);
  }
  T *scores = memory, *query_room = scores + kAttendKeys * step;
  T* key_room = query_room + call.q.room(step, call.depth);
  T* value_room = key_room + call.k.room(kAttendKeys, call.depth);
  bool seen[kAttendBlock / kStrip<T>] = {};
  for (int64_t s = 0; s < strips; ++s) {
    const T* rows[kStrip<T>];
    const int64_t count = block.count - s * step < step ? block.count - s * step : step;
    for (int64_t r = 0; r < count; ++r)
      rows[r] = row_of(call.q, block.item, head, block.first + s * step + r, call.depth,
                       query_room + call.q.room(r, call.depth));
    transpose<T, kStrip<T>>(rows, count, call.depth, call.scale, strip[s].queries);
  }
  // The keys from `begin` to `end` are those that the block sees: positions, or ranks among the valid ones.
  const int64_t* before = call.valid ? call.valid_before + block.item * (call.keys + 1) : nullptr;
  const auto rank = [&](int64_t place) { return before ? before[place] : place; };
  const int64_t last = block.first + block.count, stop = call.causal && last < block.stop ? last : block.stop;
  const int64_t begin = rank(block.start), end = rank(stop);
  AttendTile<T> tile;
  for (int64_t at = begin; at < end; at += kAttendKeys) {
    gather_tile(call, block.item, kv_head, at, end, key_room, value_room, &tile);
    for (int64_t s = 0; s < strips; ++s) {
      const int64_t first = block.first + s * step, lanes_used = block.count - s * step;
      int64_t count = tile.count, hidden = block.stop;
      if (call.causal) {
        hidden = first + 1;
        const int64_t past = first + (lanes_used < step ? lanes_used : step);
        while (count > 0 && tile.places[count - 1] >= past) --count;
        if (!count) continue;
      }
      seen[s] = true;  // of ascending positions, a strip that sees none of the first tile sees none
      const Meet meet = at != begin ? Meet::later : end - begin > kAttendKeys ? Meet::first : Meet::alone;
      if (lanes_used <= lanes<T>)
        absorb_tile<T, 1>(call, strip[s], tile, count, hidden, meet, scores);
      else
        absorb_tile<T, 2>(call, strip[s], tile, count, hidden, meet, scores);
    }
  }
  for (int64_t s = 0; s < strips; ++s) {
    const int64_t first = block.first + s * step, some = block.count - s * step < step ? block.count - s * step : step;
    if (!seen[s]) {
      clear(strip[s].sums, call.width * step), clear(strip[s].total, step);
      for (int64_t r = 0; r < step; ++r) strip[s].top[r] = kNever<T>;
    }
    int64_t rows[kStrip<T>];
    for (int64_t r = 0; r < some; ++r) rows[r] = (block.item * call.heads + head) * call.queries + first + r;
    finish_strip(call, strip[s], some, rows, strip[s].total);
  }
}

}  // namespace sparing::SPARING_ISA
