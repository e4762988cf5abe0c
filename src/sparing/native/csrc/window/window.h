// Sliding-window attention (window in Python).
#pragma once

#include "common/simd.h"
#include "common/softmax.h"
#include "common/sums.h"
#include "common/tile.h"
#include "window/call.h"

namespace sparing::SPARING_ISA {

// The keys that a block of queries looks at: the stretch that its windows cover, and shared keys outside it.
template <class T>
struct WindowKeys {
  const Window<T>& call;
  int64_t item, first, low, high;  // first query; stretch low..high
  uint8_t* special;                // [high - low + 1], which keys of the stretch are shared
  int64_t next_shared = 0, next;   // where to go on

  WindowKeys(const Window<T>& call, int64_t item, int64_t first, int64_t count, uint8_t* special)
      : call(call), item(item), first(first), special(special) {
    low = first - call.left > 0 ? first - call.left : 0;
    high = first + count - 1 + call.right;
    high = high < call.tokens - 1 ? high : call.tokens - 1;
    for (int64_t j = low; j <= high; ++j) special[j - low] = 0;
    for (int64_t s = 0; s < call.shared_count; ++s) {
      const int64_t j = call.shared[item * call.shared_count + s];
      if (j >= low && j <= high) special[j - low] = 1;
    }
    next = low;
  }

  // The next tile: positions of its keys and whether they are shared. Padded keys are left out.
  int64_t tile(Int<T>* place, Int<T>* is_shared) {
    int64_t count = 0;
    while (count < kKeys && next_shared < call.shared_count) {
      const int64_t j = call.shared[item * call.shared_count + next_shared++];
      if (j < 0 || (j >= low && j <= high)) continue;
      place[count] = Int<T>(j), is_shared[count] = -1, ++count;
    }
    for (; count < kKeys && next <= high; ++next) {
      if (call.keep && !call.keep[item * call.tokens + next]) continue;
      place[count] = Int<T>(next), is_shared[count] = special[next - low] ? -1 : 0, ++count;
    }
    return count;
  }
};

template <class T>
struct WindowMask {
  static constexpr bool masks = true;
  const Int<T>*place, *is_shared;  // of the keys
  Int<T> first;                    // position of the first lane
  Int<T> left, right;
  bool causal;

  SPARING_INLINE IntVec<T> operator()(int64_t c, int r) const {
    const IntVec<T> apart = place[c] - (first + Int<T>(r) + iota<Int<T>>());  // key - query
    const IntVec<T> near = (apart >= -left) & (apart <= right);
    const IntVec<T> far = causal ? IntVec<T>(apart <= 0) : IntVec<T>(apart == apart);
    return near | (far & is_shared[c]);
  }

  // Shared keys outside the stretch come first in the list, the stretch follows in order.
  SPARING_INLINE Range trim(Range range, int r) const {
    const Int<T> low = first + Int<T>(r) - left, high = first + Int<T>(r + kStrip<T> - 1) + right;
    while (range.begin < range.end && place[range.begin] < low && !is_shared[range.begin]) ++range.begin;
    while (range.begin < range.end && place[range.end - 1] > high && !is_shared[range.end - 1]) --range.end;
    return range;
  }
};

template <class T>
int64_t window_blocks(const Window<T>& call) {
  return (call.tokens + kRows - 1) / kRows;
}

template <class T>
int64_t window_tasks(const Window<T>& call) {
  return call.items * call.heads * window_blocks(call);
}

template <class T>
int64_t window_marks(const Window<T>& call) {  // bytes for WindowKeys::special
  const int64_t reach = call.left + call.right + kRows;
  return reach < call.tokens ? reach : call.tokens;
}

template <class T>
int64_t window_scratch(const Window<T>& call, bool backward) {
  int64_t entries = softmax_scratch<T>(call.depth, call.width, backward) + window_marks(call);
  if (backward) entries += 2 * call.tokens * (padded<T>(call.depth) + padded<T>(call.width));
  return entries;
}

// Calls visit(keys, values, count, mask) for each tile of keys of the block of `count` queries from `first` on.
template <class T, class Visit>
SPARING_INLINE void window_visit(const Window<T>& call, int64_t item, int64_t head, int64_t first, int64_t count,
                                 uint8_t* marks, const Visit& visit) {
  WindowKeys<T> list(call, item, first, count, marks);
  Int<T> place[kKeys], is_shared[kKeys];
  const T *keys[kKeys], *values[kKeys];
  while (const int64_t found = list.tile(place, is_shared)) {
    for (int64_t c = 0; c < found; ++c) {
      keys[c] = call.k.at(item, head, place[c]);
      values[c] = call.v.at(item, head, place[c]);
    }
    const WindowMask<T> mask{place, is_shared, Int<T>(first), Int<T>(call.left), Int<T>(call.right), call.causal};
    // A tile in the middle of everybody's window needs no mask.
    bool open = true;
    for (int64_t c = 0; c < found && open; ++c)
      open = place[c] >= first + count - 1 - call.left && place[c] <= first + call.right;
    if (open)
      visit(keys, values, place, found, SeesAll{});
    else
      visit(keys, values, place, found, mask);
  }
}

template <class T>
void window_forward(const Window<T>& call, int64_t begin, int64_t end, T* scratch) {
  Block<T> block{};
  block.depth = call.depth, block.width = call.width;
  uint8_t* marks = reinterpret_cast<uint8_t*>(scratch + lay_out<T>(&block, scratch, false));
  const int64_t blocks = window_blocks(call);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t unit = task / blocks, first = task % blocks * kRows;
    const int64_t item = unit / call.heads, head = unit % call.heads;
    const int64_t count = call.tokens - first < kRows ? call.tokens - first : kRows;
    const T* queries[kRows];
    T* out[kRows];
    for (int64_t r = 0; r < count; ++r) {
      queries[r] = call.q.at(item, head, first + r);
      out[r] = call.out + (unit * call.tokens + first + r) * call.width;
    }
    transpose<T>(queries, count, call.depth, call.scale, block.queries);
    start(block);
    window_visit(call, item, head, first, count, marks,
                 [&](const T* const* keys, const T* const* values, const Int<T>*, int64_t found, const auto& mask) {
                   absorb(block, keys, values, found, mask);
                 });
    const int64_t row = unit * call.tokens + first;
    finish(block, count, out, call.lse + row, call.norm.from(row));
  }
}

template <class T>
void window_backward(const Window<T>& call, int64_t begin, int64_t end, T* scratch) {
  Block<T> block{};
  block.depth = call.depth, block.width = call.width;
  const int64_t n = call.tokens, deep = padded<T>(call.depth), wide = padded<T>(call.width), rest = n * (deep + wide);
  T* key_grads = scratch + lay_out<T>(&block, scratch, true);
  T* value_grads = key_grads + n * deep;
  uint8_t* marks = reinterpret_cast<uint8_t*>(key_grads + 2 * rest);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t item = unit / call.heads, head = unit % call.heads;
    clear(key_grads, 2 * rest);
    for (int64_t first = 0; first < n; first += kRows) {
      const int64_t count = n - first < kRows ? n - first : kRows;
      const T *queries[kRows], *grads[kRows], *out[kRows];
      for (int64_t r = 0; r < count; ++r) {
        queries[r] = call.q.at(item, head, first + r);
        grads[r] = call.grad.at(item, head, first + r);
        out[r] = call.out + (unit * n + first + r) * call.width;
      }
      transpose<T>(queries, count, call.depth, call.scale, block.queries);
      start_backward(block, queries, grads, out, call.norm.from(unit * n + first), call.lse_grad + unit * n + first,
                     count);
      window_visit(
          call, item, head, first, count, marks,
          [&](const T* const* keys, const T* const* values, const Int<T>* place, int64_t found, const auto& mask) {
            T *to_key[kKeys], *to_value[kKeys];
            for (int64_t c = 0; c < found; ++c) {
              to_key[c] = key_grads + place[c] * deep;
              to_value[c] = value_grads + place[c] * wide;
            }
            absorb_backward(block, keys, values, found, mask, to_key, to_value, rest);
          });
      for (int64_t r = 0; r < count; ++r) {
        T* to = call.grad_q + (unit * n + first + r) * call.depth;
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
constexpr WindowKernels<T> window_kernels() {
  return {window_scratch<T>, window_tasks<T>, window_forward<T>, window_backward<T>};
}

}  // namespace sparing::SPARING_ISA
