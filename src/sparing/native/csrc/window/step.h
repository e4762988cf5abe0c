// Decoding over a window: a query reads its own key, `left` before it and the first `first` keys. Entries of a row
// are in the lanes and may have 16 bits.
#pragma once

#include "common/gathered.h"
#include "common/softmax.h"
#include "window/call.h"

namespace sparing::SPARING_ISA {

template <class E>
struct WindowStepMemory {
  using T = Wide<E>;
  T *query, *weight, *total;  // [depth]; [rows] logits, then weights; [width] the output
  const E **key, **value;     // [rows]

  int64_t lay_out(const WindowStep<E>& call, T* memory) {
    int64_t used = 0;
    const auto take = [&]<class U>(U** part, int64_t count) {
      if (memory) *part = reinterpret_cast<U*>(memory + used);
      used += (count * int64_t(sizeof(U)) / int64_t(sizeof(T)) + 31) / 16 * 16;
    };
    const int64_t wanted = call.left + 1 + call.first, rows = wanted < call.keys ? wanted : call.keys;
    take(&query, call.depth), take(&weight, rows + lanes<T>), take(&total, call.width);
    take(&key, rows), take(&value, rows);
    return used;
  }
};

template <class E>
int64_t window_step_scratch(const WindowStep<E>& call) {
  return WindowStepMemory<E>{}.lay_out(call, nullptr);
}

template <class E>
void window_step_forward(const WindowStep<E>& call, int64_t begin, int64_t end, Wide<E>* scratch) {
  using T = Wide<E>;
  WindowStepMemory<E> memory{};
  memory.lay_out(call, scratch);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t i = row % call.queries, head = row / call.queries % call.heads,
                  item = row / call.queries / call.heads, kv = head / call.groups;
    const int64_t own = call.keys - call.queries + i, low = own > call.left ? own - call.left : 0;
    int64_t rows = 0;
    const auto look_at = [&](int64_t at) {
      memory.key[rows] = call.k.at(item, kv, at);
      memory.value[rows++] = call.v.at(item, kv, at);
    };
    for (int64_t at = 0; at < call.first && at < low; ++at) look_at(at);
    for (int64_t at = low; at <= own; ++at) look_at(at);
    const E* q = call.q.at(item, head, i);
    for (int64_t d = 0; d < call.depth; ++d) memory.query[d] = widen(q[d]) * call.scale;
    dots_with<E>(memory.query, call.depth, rows, [&](int64_t j) { return memory.key[j]; }, memory.weight);
    T top = kNever<T>;
    for (int64_t j = 0; j < rows; ++j) top = memory.weight[j] > top ? memory.weight[j] : top;
    const T total = sum_in_halves<T>(long_sum<Vec<T>>(rows, lanes<T>, [&](int64_t j) {
      Vec<T> logits = load<T>(memory.weight + j);
      for (int64_t lane = rows - j; lane < lanes<T>; ++lane) logits[lane] = kNever<T>;
      const Vec<T> weight = exponential_below(logits - top);
      store<T>(memory.weight + j, weight);
      return weight;
    }));
    mix<E>(memory.weight, memory.value, rows, call.width, memory.total);
    for (int64_t e = 0; e < call.width; ++e) narrow(memory.total[e] / total, call.out + row * call.width + e);
    call.lse[row] = T(__builtin_log(double(total)) + double(top));
  }
}

template <class E>
constexpr WindowStepKernels<E> window_step_kernels() {
  return {window_step_scratch<E>, window_step_forward<E>};
}

}  // namespace sparing::SPARING_ISA
