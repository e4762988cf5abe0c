// Exact softmax attention over all valid keys (attend in Python). Where the keys are few, they stand in the lanes
// (attend_few.h); else the queries do, and the keys pass by in tiles.
#pragma once

#include "attend/call.h"
#include "attend/few_keys.h"
#include "common/softmax.h"
#include "common/sums.h"
#include "common/tile.h"

namespace sparing::SPARING_ISA {

template <class T>
bool attend_by_keys(const Attend<T>& call) {
  return call.bias || (call.keys <= kManyQueries && call.keys <= call.queries);
}

template <class T>
int64_t attend_blocks(const Attend<T>& call) {
  return (call.queries + kRows - 1) / kRows;
}

template <class T>
int64_t attend_tasks(const Attend<T>& call, bool backward) {
  const int64_t units = call.items * call.heads;
  if (backward) return units;
  return units * (attend_by_keys(call) ? (call.queries + kManyQueries - 1) / kManyQueries : attend_blocks(call));
}

template <class T>
int64_t attend_scratch(const Attend<T>& call, bool backward) {
  if (attend_by_keys(call)) return FewKeys<T>{}.lay_out(call, nullptr, backward);
  const int64_t grads = backward ? 2 * call.keys * (padded<T>(call.depth) + padded<T>(call.width)) : 0;
  return softmax_scratch<T>(call.depth, call.width, backward) + grads;
}

// Calls visit(places, keys, values, count) for each tile of valid keys of a head.
template <class T, class Visit>
SPARING_INLINE void attend_visit(const Attend<T>& call, int64_t item, int64_t head, const Visit& visit) {
  int64_t places[kKeys];
  const T *keys[kKeys], *values[kKeys];
  for (int64_t next = 0; next < call.keys;) {
    int64_t count = 0;
    for (; next < call.keys && count < kKeys; ++next) {
      if (!call.sees(item, next)) continue;
      places[count] = next;
      keys[count] = call.k.at(item, head, next);
      values[count] = call.v.at(item, head, next);
      ++count;
    }
    if (count) visit(places, keys, values, count);
  }
}

template <class T>
void attend_forward(const Attend<T>& call, int64_t begin, int64_t end, T* scratch) {
  if (attend_by_keys(call)) return attend_few_forward(call, begin, end, scratch);
  Block<T> block{};
  block.depth = call.depth, block.width = call.width;
  lay_out<T>(&block, scratch, false);
  const int64_t blocks = attend_blocks(call);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t unit = task / blocks, first = task % blocks * kRows;
    const int64_t item = unit / call.heads, head = unit % call.heads;
    const int64_t count = call.queries - first < kRows ? call.queries - first : kRows;
    const T* queries[kRows];
    T* out[kRows];
    for (int64_t r = 0; r < count; ++r) {
      queries[r] = call.q.at(item, head, first + r);
      out[r] = call.out + (unit * call.queries + first + r) * call.width;
    }
    transpose<T>(queries, count, call.depth, call.scale, block.queries);
    block.use(count);
    start(block);
    attend_visit(call, item, head, [&](const int64_t*, const T* const* keys, const T* const* values, int64_t found) {
      absorb(block, keys, values, found, SeesAll{});
    });
    const int64_t row = unit * call.queries + first;
    finish(block, count, out, call.lse + row, call.norm.from(row));
  }
}

template <class T>
void attend_backward(const Attend<T>& call, int64_t begin, int64_t end, T* scratch) {
  if (attend_by_keys(call)) return attend_few_backward(call, begin, end, scratch);
  Block<T> block{};
  block.depth = call.depth, block.width = call.width;
  const int64_t m = call.queries, n = call.keys, deep = padded<T>(call.depth), wide = padded<T>(call.width);
  const int64_t rest = n * (deep + wide);
  T* key_grads = scratch + lay_out<T>(&block, scratch, true);
  T* value_grads = key_grads + n * deep;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t item = unit / call.heads, head = unit % call.heads;
    clear(key_grads, 2 * rest);
    for (int64_t first = 0; first < m; first += kRows) {
      const int64_t count = m - first < kRows ? m - first : kRows;
      const T *queries[kRows], *grads[kRows], *out[kRows];
      for (int64_t r = 0; r < count; ++r) {
        queries[r] = call.q.at(item, head, first + r);
        grads[r] = call.grad.at(item, head, first + r);
        out[r] = call.out + (unit * m + first + r) * call.width;
      }
      transpose<T>(queries, count, call.depth, call.scale, block.queries);
      block.use(count);
      start_backward(block, queries, grads, out, call.norm.from(unit * m + first), call.lse_grad + unit * m + first,
                     count);
      attend_visit(call, item, head,
                   [&](const int64_t* places, const T* const* keys, const T* const* values, int64_t found) {
                     T *to_key[kKeys], *to_value[kKeys];
                     for (int64_t c = 0; c < found; ++c) {
                       to_key[c] = key_grads + places[c] * deep;
                       to_value[c] = value_grads + places[c] * wide;
                     }
                     absorb_backward(block, keys, values, found, SeesAll{}, to_key, to_value, rest);
                   });
      for (int64_t r = 0; r < count; ++r) {
        T* to = call.grad_q + (unit * m + first + r) * call.depth;
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

template <class T>
constexpr AttendKernels<T> attend_kernels() {
  return {attend_scratch<T>, attend_tasks<T>, attend_forward<T>, attend_backward<T>};
}

}  // namespace sparing::SPARING_ISA
