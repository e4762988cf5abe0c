// The last queries of a sequence, each for itself: the entries of a row are in the lanes, and may have 16 bits.
#pragma once

#include "common/gathered.h"
#include "common/softmax.h"
#include "skip/call.h"

namespace sparing::SPARING_ISA {

template <class E>
struct SkipStepMemory {
  using T = Wide<E>;
  T *query, *score, *weight, *total;  // [depth]; [keys] each; [width] the output
  const E** value;                    // [keys] those that are read

  int64_t lay_out(const SkipStep<E>& call, T* memory) {
    int64_t used = 0;
    const auto take = [&]<class U>(U** part, int64_t count) {
      if (memory) *part = reinterpret_cast<U*>(memory + used);
      used += (count * int64_t(sizeof(U)) / int64_t(sizeof(T)) + 31) / 16 * 16;
    };
    take(&query, call.depth), take(&score, call.keys + lanes<T>), take(&weight, call.keys + lanes<T>);
    take(&total, call.width), take(&value, call.keys);
    return used;
  }
};

template <class E>
int64_t skip_step_scratch(const SkipStep<E>& call) {
  return SkipStepMemory<E>{}.lay_out(call, nullptr);
}

// Computes one query of one head.
template <class E>
void skip_row(const SkipStep<E>& call, int64_t item, int64_t head, int64_t i, SkipStepMemory<E>& memory) {
  using T = Wide<E>;
  const int64_t kv = head / call.groups, seen = call.seen[item * call.queries + i];
  const int64_t row = (item * call.heads + head) * call.queries + i;
  const int64_t* place = call.place ? call.place + item * call.keys : nullptr;
  const auto at = [&](int64_t j) { return place ? place[j] : j; };
  const E* q = call.q.at(item, head, i);
  for (int64_t d = 0; d < call.depth; ++d) memory.query[d] = widen(q[d]) * call.scale;
  dots_with<E>(memory.query, call.depth, seen, [&](int64_t j) { return call.k.at(item, kv, at(j)); }, memory.score);
  for (int j = 0; j < lanes<T>; ++j) memory.score[seen + j] = kNever<T>;
  T top = kNever<T>;
  for (int64_t j = 0; j < seen; ++j) top = memory.score[j] > top ? memory.score[j] : top;
  const T total = sum_in_halves<T>(long_sum<Vec<T>>(seen, lanes<T>, [&](int64_t j) {
    const Vec<T> weight = exponential_below(load<T>(memory.score + j) - top);
    store<T>(memory.weight + j, weight);
    return weight;
  }));
  const T least = T(__builtin_log(double(call.threshold)));
  T highest = kNever<T>, left = T(0), lost = T(0);
  int64_t listed = 0;  // read keys overwrite the weights of those before them
  for (int64_t begin = 0; begin < seen; begin += kAttendKeys) {
    const int64_t end = begin + kAttendKeys < seen ? begin + kAttendKeys : seen;
    for (int64_t j = begin; j < end; ++j) highest = memory.score[j] > highest ? memory.score[j] : highest;
    const auto stands = [&](int64_t j) { return (j - begin) % call.stride == call.stride - 1; };
    T rest = T(0), stand = T(0);
    for (int64_t j = begin; j < end; ++j) {
      const T weight = memory.score[j] >= highest + least ? T(0) : memory.weight[j];
      rest += weight;
      if (stands(j)) stand += weight;
    }
    const bool enough = stand * kMostGrowth<T> >= rest && stand > kLeastStanding<T>;
    const T growth = enough ? rest / stand : T(0);
    left += rest, lost += enough ? T(0) : rest;
    for (int64_t j = begin; j < end; ++j) {
      const bool read = memory.score[j] >= highest + least;
      const T weight = read ? memory.weight[j] : stands(j) ? memory.weight[j] * growth : T(0);
      memory.weight[listed] = weight, memory.value[listed] = call.v.at(item, kv, at(j));
      listed += weight > T(0);
    }
  }
  mix<E>(memory.weight, memory.value, listed, call.width, memory.total);
  const T whole = total - lost, inverse = whole > T(0) ? T(1) / whole : T(0);
  for (int64_t e = 0; e < call.width; ++e) narrow(memory.total[e] * inverse, call.out + row * call.width + e);
  call.lse[row] = log_sum_exp(top, total);
  call.left[row] = total > T(0) ? left / total : T(0), call.touched[row] = T(listed);
}

template <class E>
void skip_step_forward(const SkipStep<E>& call, int64_t begin, int64_t end, Wide<E>* scratch) {
  SkipStepMemory<E> memory{};
  memory.lay_out(call, scratch);
  for (int64_t row = begin; row < end; ++row)
    skip_row(call, row / call.queries / call.heads, row / call.queries % call.heads, row % call.queries, memory);
}

template <class E>
constexpr SkipStepKernels<E> skip_step_kernels() {
  return {skip_step_scratch<E>, skip_step_forward<E>};
}

}  // namespace sparing::SPARING_ISA
