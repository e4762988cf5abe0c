// Sliding-window attention (window in Python).
#pragma once

#include "common/simd.h"
#include "common/softmax.h"
#include "common/softmax_driver.h"
#include "common/tile.h"
#include "window/call.h"

namespace sparing::SPARING_ISA {

// The keys that a block of queries sees: the stretch that its windows cover, and the shared keys outside it.
template <class T>
struct WindowKeys {
  const Window<T>& call;
  int64_t item, first, low, high;  // first query; stretch low..high
  uint8_t* special;                // [high - low + 1], which keys of the stretch are shared
  int64_t next_shared = 0, next;   // where the next tile starts

  WindowKeys(const Window<T>& call, int64_t item, int64_t first, int64_t count, uint8_t* special)
      : call(call), item(item), first(first), special(special) {
    low = first - call.left > 0 ? first - call.left : 0;
    high = first + count - 1 + call.right;
    high = high < call.keys - 1 ? high : call.keys - 1;
    for (int64_t j = low; j <= high; ++j) special[j - low] = 0;
    for (int64_t s = 0; s < call.shared_count; ++s) {
      const int64_t j = call.shared[item * call.shared_count + s];
      if (j >= low && j <= high) special[j - low] = 1;
    }
    next = low;
  }

  // Writes the positions of the next tile's keys and whether they are shared. Padded keys are left out.
  int64_t tile(Int<T>* place, Int<T>* is_shared) {
    int64_t count = 0;
    while (count < kKeys && next_shared < call.shared_count) {
      const int64_t j = call.shared[item * call.shared_count + next_shared++];
      if (j < 0 || (j >= low && j <= high)) continue;
      place[count] = Int<T>(j), is_shared[count] = -1, ++count;
    }
    for (; count < kKeys && next <= high; ++next) {
      if (call.keep && !call.keep[item * call.keys + next]) continue;
      place[count] = Int<T>(next), is_shared[count] = special[next - low] ? -1 : 0, ++count;
    }
    return count;
  }
};

template <class T>
struct WindowMask {
  static constexpr bool masks = true;
  const Int<T>*place, *is_shared;  // for each key of the tile
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
int64_t window_scratch(const Window<T>& call, bool backward) {
  const int64_t reach = call.left + call.right + kRows;
  const int64_t marks = reach < call.keys ? reach : call.keys;  // bytes for WindowKeys::special
  return driver_scratch(call, backward) + marks;
}

template <class T>
int64_t window_tasks(const Window<T>& call, bool backward) {
  return softmax_tasks(call, backward);
}

// The tiles of keys that a block of queries sees, for softmax_driver.h.
template <class T>
struct WindowTiles {
  const Window<T>& call;

  template <class Visit>
  SPARING_INLINE void operator()(const QueryBlock& at, T* spare, const Visit& visit) const {
    WindowKeys<T> list(call, at.item, at.first, at.count, reinterpret_cast<uint8_t*>(spare));
    Int<T> place[kKeys], is_shared[kKeys];
    while (const int64_t found = list.tile(place, is_shared)) {
      const WindowMask<T> mask{place, is_shared, Int<T>(at.first), Int<T>(call.left), Int<T>(call.right), call.causal};
      // A tile that lies in the windows of all queries needs no mask.
      bool open = true;
      for (int64_t c = 0; c < found && open; ++c)
        open = place[c] >= at.first + at.count - 1 - call.left && place[c] <= at.first + call.right;
      if (open)
        visit(place, found, SeesAll{});
      else
        visit(place, found, mask);
    }
  }
};

template <class T>
void window_forward(const Window<T>& call, int64_t begin, int64_t end, T* scratch) {
  softmax_forward(call, begin, end, scratch, WindowTiles<T>{call});
}

template <class T>
void window_backward(const Window<T>& call, int64_t begin, int64_t end, T* scratch) {
  softmax_backward(call, begin, end, scratch, WindowTiles<T>{call});
}

template <class T>
constexpr WindowKernels<T> window_kernels() {
  return {window_scratch<T>, window_tasks<T>, window_forward<T>, window_backward<T>};
}

}  // namespace sparing::SPARING_ISA
