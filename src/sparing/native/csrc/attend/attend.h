// Exact softmax attention over all valid keys (attend in Python).
#pragma once

#include "attend/call.h"
#include "attend/few_keys.h"
#include "attend/forward.h"
#include "common/softmax.h"
#include "common/softmax_driver.h"
#include "common/tile.h"

namespace sparing::SPARING_ISA {

// Whether the lanes of the backward pass hold keys (few_keys.h); otherwise they hold queries.
template <class T>
bool attend_by_keys(const Attend<T>& call) {
  return call.bias || (call.keys <= kFewKeys && call.keys <= call.queries);
}

template <class T>
int64_t attend_tasks(const Attend<T>& call, bool backward) {
  return backward ? softmax_tasks(call, true) : call.heads * call.block_count;
}

template <class T>
int64_t attend_scratch(const Attend<T>& call, bool backward) {
  if (!backward) return attend_forward_scratch(call);
  return attend_by_keys(call) ? FewKeys<T>{}.lay_out(call, nullptr) : driver_scratch(call, true);
}

// The tiles of valid keys of a head, for softmax_driver.h.
template <class T>
struct ValidKeys {
  const Attend<T>& call;

  template <class Visit>
  SPARING_INLINE void operator()(const QueryBlock& at, T*, const Visit& visit) const {
    int64_t places[kKeys];
    for (int64_t next = 0; next < call.keys;) {
      int64_t count = 0;
      for (; next < call.keys && count < kKeys; ++next) {
        if (call.sees(at.item, next)) places[count++] = next;
      }
      if (count) visit(places, count, SeesAll{});
    }
  }
};

template <class T>
void attend_forward(const Attend<T>& call, int64_t begin, int64_t end, T* scratch) {
  for (int64_t task = begin; task < end; ++task)
    attend_block(call, call.blocks[task % call.block_count], task / call.block_count, scratch);
}

template <class T>
void attend_backward(const Attend<T>& call, int64_t begin, int64_t end, T* scratch) {
  if (attend_by_keys(call)) return attend_few_backward(call, begin, end, scratch);
  softmax_backward(call, begin, end, scratch, ValidKeys<T>{call});
}

template <class T>
constexpr AttendKernels<T> attend_kernels() {
  return {attend_scratch<T>, attend_tasks<T>, attend_forward<T>, attend_backward<T>};
}

}  // namespace sparing::SPARING_ISA
