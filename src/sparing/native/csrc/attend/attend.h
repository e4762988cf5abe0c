// Exact softmax attention over all valid keys (attend in Python). If the keys are few or have a bias, the lanes hold
// keys (few_keys.h); otherwise they hold queries, and the keys are read in tiles.
#pragma once

#include "attend/call.h"
#include "attend/few_keys.h"
#include "common/softmax.h"
#include "common/softmax_driver.h"
#include "common/tile.h"

namespace sparing::SPARING_ISA {

template <class T>
bool attend_by_keys(const Attend<T>& call) {
  return call.bias || (call.keys <= kManyQueries && call.keys <= call.queries);
}

template <class T>
int64_t attend_tasks(const Attend<T>& call, bool backward) {
  if (backward || !attend_by_keys(call)) return softmax_tasks(call, backward);
  return call.items * call.heads * ((call.queries + kManyQueries - 1) / kManyQueries);
}

template <class T>
int64_t attend_scratch(const Attend<T>& call, bool backward) {
  return attend_by_keys(call) ? FewKeys<T>{}.lay_out(call, nullptr, backward) : driver_scratch(call, backward);
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
  if (attend_by_keys(call)) return attend_few_forward(call, begin, end, scratch);
  softmax_forward(call, begin, end, scratch, ValidKeys<T>{call});
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
