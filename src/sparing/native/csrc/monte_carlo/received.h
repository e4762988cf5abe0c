// The largest weight that each key receives in softmax attention (monte_carlo in Python). The scores of a block of
// queries against all keys are held at once, so that none is computed twice: memory grows with the keys alone.
#pragma once

#include "common/simd.h"
#include "common/softmax.h"
#include "common/sums.h"
#include "common/tile.h"
#include "common/widen.h"
#include "monte_carlo/call.h"

namespace sparing::SPARING_ISA {

template <class T>
int64_t received_scratch(const Received<T>& call) {
  return call.depth * kRows + call.keys * (kRows + 1) + 2 * kRows + call.q.room(kRows, call.depth) +
         call.k.room(kKeys, call.depth);
}

template <class T>
void received_block(const Received<T>& call, int64_t item, int64_t head, int64_t first, int64_t count,
                    const Int<T>* place, int64_t found, T* columns, T* scores, T* room, T* largest_weight) {
  T* key_room = room + call.q.room(kRows, call.depth);
  const T *queries[kRows], *keys[kKeys];
  for (int64_t r = 0; r < count; ++r)
    queries[r] = row_of(call.q, item, head, first + r, call.depth, room + call.q.room(r, call.depth));
  transpose<T>(queries, count, call.depth, call.scale, columns);
  for (int64_t c = 0; c < found; c += kKeys) {
    const int64_t some = found - c < kKeys ? found - c : kKeys;
    for (int64_t i = 0; i < some; ++i)
      keys[i] = row_of(call.k, item, head, place[c + i], call.depth, key_room + call.k.room(i, call.depth));
    dots<T>(keys, some, call.depth, columns, scores + c * kRows);
  }
  T share[kRows];  // the factor of the weights: 1 / total, or 0 for queries that do not count
  for (int r = 0; r < kRows; r += lanes<T>) {
    Vec<T> top = all(kNever<T>);
    for (int64_t c = 0; c < found; ++c) top = larger<T>(top, load<T>(scores + c * kRows + r));
    const Vec<T> total = long_sum<Vec<T>>(found, 1, [&](int64_t c) {
      const Vec<T> weight = exponential(load<T>(scores + c * kRows + r) - top);
      store<T>(scores + c * kRows + r, weight);
      return weight;
    });
    for (int i = 0; i < lanes<T>; ++i) {
      share[r + i] = T(0);
      if (r + i >= count) continue;
      const int64_t query = first + r + i;
      const bool sees = found > 0;
      call.lse[(item * call.heads + head) * call.queries + query] = log_sum_exp<T>(top[i], total[i]);
      if (sees && (!call.counted || call.counted[item * call.queries + query])) share[r + i] = T(1) / total[i];
    }
  }
  for (int64_t c = 0; c < found; ++c) {
    Vec<T> most{};
    for (int r = 0; r < kRows; r += lanes<T>)
      most = larger<T>(most, load<T>(scores + c * kRows + r) * load<T>(share + r));
    const T weight = largest<T>(most);
    T* to = largest_weight + place[c];
    *to = weight > *to ? weight : *to;
  }
}

template <class T>
void received_forward(const Received<T>& call, int64_t begin, int64_t end, T* scratch) {
  T* columns = scratch;
  T* scores = columns + call.depth * kRows;
  Int<T>* place = reinterpret_cast<Int<T>*>(scores + call.keys * kRows);
  T* room = reinterpret_cast<T*>(place + call.keys);
  const int64_t blocks = (call.queries + kRows - 1) / kRows;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t unit = task / call.parts, part = task % call.parts;
    const int64_t item = unit / call.heads, head = unit % call.heads;
    int64_t found = 0;
    for (int64_t j = 0; j < call.keys; ++j)
      if (!call.keep || call.keep[item * call.keys + j]) place[found++] = Int<T>(j);
    T* largest_weight = call.largest + task * call.keys;
    for (int64_t j = 0; j < call.keys; ++j) largest_weight[j] = T(0);
    for (int64_t b = part; b < blocks; b += call.parts) {
      const int64_t first = b * kRows, count = call.queries - first < kRows ? call.queries - first : kRows;
      received_block(call, item, head, first, count, place, found, columns, scores, room, largest_weight);
    }
  }
}

template <class T>
constexpr ReceivedKernels<T> received_kernels() {
  return {received_scratch<T>, received_forward<T>};
}

}  // namespace sparing::SPARING_ISA
