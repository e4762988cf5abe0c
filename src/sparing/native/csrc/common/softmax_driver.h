// The passes of softmax attention over all blocks of queries, which attend and window share. They differ in the keys
// that a block sees: tiles(at, spare, visit) finds these and calls visit(places, count, mask) for each tile.
#pragma once

#include "common/simd.h"
#include "common/softmax.h"
#include "common/softmax_call.h"
#include "common/sums.h"
#include "common/tile.h"
#include "common/widen.h"

namespace sparing::SPARING_ISA {

// `count` queries of one head, from `first` on.
struct QueryBlock {
  int64_t item, head, unit, first, count;

  template <class T>
  SPARING_INLINE QueryBlock(const SoftmaxCall<T>& call, int64_t unit, int64_t first)
      : item(unit / call.heads), head(unit % call.heads), unit(unit), first(first) {
    count = call.queries - first < kRows ? call.queries - first : kRows;
  }
};

template <class T>
int64_t softmax_blocks(const SoftmaxCall<T>& call) {  // blocks of queries of one head
  return (call.queries + kRows - 1) / kRows;
}

template <class T>
int64_t softmax_tasks(const SoftmaxCall<T>& call, bool backward) {  // one per block of queries; backward: one per head
  return call.items * call.heads * (backward ? 1 : softmax_blocks(call));
}

// Returns the working memory in entries of T, without the spare memory of tiles(), which comes after it.
template <class T>
int64_t driver_scratch(const SoftmaxCall<T>& call, bool backward) {
  const int64_t grads = backward ? 2 * call.keys * (padded<T>(call.depth) + padded<T>(call.width)) : 0;
  return softmax_scratch<T>(call.depth, call.width, backward) + grads + call.q.room(kRows, call.depth) +
         call.k.room(kKeys, call.depth) + call.v.room(kKeys, call.width);
}

// The rows of the keys and values of a tile.
template <class T>
struct TileRows {
  const T *keys[kKeys], *values[kKeys];

  // Widens rows of 16 bits in `room`.
  template <class Index>
  SPARING_INLINE TileRows(const SoftmaxCall<T>& call, const QueryBlock& at, const Index* places, int64_t count,
                          T* room) {
    T* values_room = room + call.k.room(kKeys, call.depth);
    for (int64_t c = 0; c < count; ++c) {
      keys[c] = row_of(call.k, at.item, at.head, places[c], call.depth, room + call.k.room(c, call.depth));
      values[c] = row_of(call.v, at.item, at.head, places[c], call.width, values_room + call.v.room(c, call.width));
    }
  }
};

template <class T, class Tiles>
SPARING_INLINE void softmax_forward(const SoftmaxCall<T>& call, int64_t begin, int64_t end, T* scratch,
                                    const Tiles& tiles) {
  Block<T> block{};
  block.depth = call.depth, block.width = call.width;
  T* query_room = scratch + lay_out<T>(&block, scratch, false);
  T* tile_room = query_room + call.q.room(kRows, call.depth);
  T* spare = scratch + driver_scratch(call, false);
  const int64_t blocks = softmax_blocks(call);
  for (int64_t task = begin; task < end; ++task) {
    const QueryBlock at(call, task / blocks, task % blocks * kRows);
    const int64_t row = at.unit * call.queries + at.first;
    const T* queries[kRows];
    T* out[kRows];
    for (int64_t r = 0; r < at.count; ++r) {
      queries[r] = row_of(call.q, at.item, at.head, at.first + r, call.depth, query_room + call.q.room(r, call.depth));
      out[r] = call.out + (row + r) * call.width;
    }
    transpose<T>(queries, at.count, call.depth, call.scale, block.queries);
    block.use(at.count);
    start(block);
    tiles(at, spare, [&](const auto* places, int64_t found, const auto& mask) {
      const TileRows<T> rows(call, at, places, found, tile_room);
      absorb(block, rows.keys, rows.values, found, mask);
    });
    finish(block, at.count, out, call.lse + row, call.norm.from(row));
  }
}

template <class T, class Tiles>
SPARING_INLINE void softmax_backward(const SoftmaxCall<T>& call, int64_t begin, int64_t end, T* scratch,
                                     const Tiles& tiles) {
  Block<T> block{};
  block.depth = call.depth, block.width = call.width;
  const int64_t m = call.queries, n = call.keys, deep = padded<T>(call.depth), wide = padded<T>(call.width);
  const int64_t rest = n * (deep + wide);
  T* key_grads = scratch + lay_out<T>(&block, scratch, true);
  T *value_grads = key_grads + n * deep, *spare = key_grads + 2 * rest;
  for (int64_t unit = begin; unit < end; ++unit) {
    clear(key_grads, 2 * rest);
    for (int64_t first = 0; first < m; first += kRows) {
      const QueryBlock at(call, unit, first);
      const int64_t row = unit * m + first;
      const T *queries[kRows], *grads[kRows], *out[kRows];
      for (int64_t r = 0; r < at.count; ++r) {
        queries[r] = call.q.at(at.item, at.head, first + r);
        grads[r] = call.grad.at(at.item, at.head, first + r);
        out[r] = call.out + (row + r) * call.width;
      }
      transpose<T>(queries, at.count, call.depth, call.scale, block.queries);
      block.use(at.count);
      start_backward(block, queries, grads, out, call.norm.from(row), call.lse_grad + row, at.count);
      tiles(at, spare, [&](const auto* places, int64_t found, const auto& mask) {
        const TileRows<T> rows(call, at, places, found, spare);
        T *to_key[kKeys], *to_value[kKeys];
        for (int64_t c = 0; c < found; ++c) {
          to_key[c] = key_grads + places[c] * deep;
          to_value[c] = value_grads + places[c] * wide;
        }
        absorb_backward(block, rows.keys, rows.values, found, mask, to_key, to_value, rest);
      });
      for (int64_t r = 0; r < at.count; ++r) {
        T* to = call.grad_q + (row + r) * call.depth;
        for (int64_t k = 0; k < call.depth; ++k) to[k] = call.scale * block.query_grads[k * kRows + r];
      }
    }
    for (int64_t j = 0; j < n; ++j) {
      T* to_k = call.grad_k + (unit * n + j) * call.depth;
      T* to_v = call.grad_v + (unit * n + j) * call.width;
      for (int64_t k = 0; k < call.depth; ++k) to_k[k] = call.scale * key_grads[j * deep + k];
      for (int64_t e = 0; e < call.width; ++e) to_v[e] = value_grads[j * wide + e];
    }
  }
}

}  // namespace sparing::SPARING_ISA
