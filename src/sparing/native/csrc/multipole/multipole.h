// Attention to few keys that are read, and to copies of few bits of the others (multipole in Python). One query at a
// time: all logits are estimated, then keys whose share of the weight is large are read, and copies give the rest.
#pragma once

#include "common/gathered.h"
#include "common/simd.h"
#include "common/softmax.h"
#include "common/sums.h"
#include "common/widen.h"
#include "multipole/call.h"
#include "multipole/estimate.h"
#include "multipole/values.h"

namespace sparing::SPARING_ISA {

// Weights are corrected for the variance of their logits, up to this variance.
template <class T>
inline constexpr T kMostVariance = T(4);

// A group of keys is left out if its weight is at most this share of the weight of the keys that are read, divided by
// the number of groups.
template <class T>
inline constexpr T kLight = T(0x1p-20);

template <class E>
struct MultipoleMemory {
  using T = Wide<E>;
  T *scaled, *products;     // [depth] the query times the scale, and times the steps of a block
  int8_t *whole, *rounded;  // [depth, rounded up] the query in integers; [16] weights in integers
  T* logits;                // [keys in blocks] estimates; -inf for keys that are read
  T *sigma, *fade;         // [blocks] standard deviation of the errors of logits, and the factor that corrects for them
  T *sums, *total;         // [width, rounded up] products of codes in a block; the output
  T* weight;               // [keys] logits of keys that are read, then weights
  const E **key, **value;  // [keys]

  int64_t lay_out(const MultipoleCall<E>& call, T* memory) {
    int64_t used = 0;
    const auto take = [&]<class U>(U** part, int64_t count) {
      if (memory) *part = reinterpret_cast<U*>(memory + used);
      used += (count * int64_t(sizeof(U)) / int64_t(sizeof(T)) + 31) / 16 * 16;
    };
    take(&scaled, call.depth), take(&products, call.depth);
    take(&whole, chunks(call) * kKeyChannels), take(&rounded, kMultipoleGroup);
    take(&logits, call.blocks * call.block), take(&sigma, call.blocks), take(&fade, call.blocks);
    take(&sums, channels(call)), take(&total, channels(call));
    take(&weight, call.keys + lanes<T>), take(&key, call.keys), take(&value, call.keys);
    return used;
  }

  static int64_t chunks(const MultipoleCall<E>& call) { return (call.depth + kKeyChannels - 1) / kKeyChannels; }
  static int64_t lanes_of_bytes(const MultipoleCall<E>& call) {
    const int64_t each = kValueChannels * 8 / call.bits;
    return (call.width + each - 1) / each;
  }
  static int64_t channels(const MultipoleCall<E>& call) {
    return lanes_of_bytes(call) * kValueChannels * 8 / call.bits;
  }
};

template <class E>
struct MultipoleQuery {
  using T = Wide<E>;
  const MultipoleCall<E>& call;
  MultipoleMemory<E>& memory;
  int64_t item, head, kv, seen, near;
  int64_t blocks;    // blocks that hold keys before `near`
  int64_t rows = 0;  // keys that are read

  void look_at(int64_t rank) {
    const int64_t at = call.place ? call.place[item * call.places + rank] : rank;
    memory.key[rows] = call.k.at(item, kv, at);
    memory.value[rows++] = call.v.at(item, kv, at);
  }

  int64_t unit() const { return item * (call.heads / call.groups) + kv; }

  // Estimates the logits of all keys in blocks, -inf for those that are always read. Returns the largest.
  T estimate() {
    const int64_t chunks = MultipoleMemory<E>::chunks(call), groups = call.block / kMultipoleGroup;
    T top = kNever<T>;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t at = unit() * call.blocks + b;
      const Estimate<T> each =
          round_query<T>(memory.scaled, call.key_low + at * call.depth, call.key_step + at * call.depth, call.depth,
                         memory.products, memory.whole);
      memory.sigma[b] = each.sigma;
      const uint8_t* codes = call.key_codes + at * groups * chunks * 64;
      T* logits = memory.logits + b * call.block;
      Vec<T> tops = all(kNever<T>);
      for (int64_t g = 0; g < groups; ++g) {
        alignas(64) int32_t totals[kMultipoleGroup] = {};
        code_products(codes + g * chunks * 64, memory.whole, chunks, totals);
        for (int i = 0; i < kMultipoleGroup; i += lanes<T>) {
          Vec<T> product{};
          for (int lane = 0; lane < lanes<T>; ++lane) product[lane] = T(totals[i + lane]);
          const Vec<T> logit = each.base + each.unit * product;
          tops = larger<T>(tops, logit);
          store<T>(logits + g * kMultipoleGroup + i, logit);
        }
      }
      const int64_t first = b * call.block;
      if (first < call.sinks || first + call.block > near) {
        tops = all(kNever<T>);
        for (int64_t i = 0; i < call.block; ++i) {
          if (first + i < call.sinks || first + i >= near) logits[i] = kNever<T>;
          tops[0] = logits[i] > tops[0] ? logits[i] : tops[0];
        }
      }
      const T most = largest<T>(tops);
      top = most > top ? most : top;
    }
    return top;
  }

  T variance(int64_t b) const {
    const T found = memory.sigma[b] * memory.sigma[b];
    return found < kMostVariance<T> ? found : kMostVariance<T>;
  }

  // Returns the sum of exp(logit - top) over all keys in blocks, each block times its factor `fade`, which is set here.
  T weigh_blocks(T top) {
    Running<T> total;
    for (int64_t b = 0; b < blocks; ++b) {
      const T* logits = memory.logits + b * call.block;
      Vec<T> sums{};
      for (int64_t i = 0; i < call.block; i += lanes<T>) sums += exponential_below(load<T>(logits + i) - top);
      memory.fade[b] = exponential_below(all(T(-0.5) * variance(b)))[0];
      total.add(memory.fade[b] * sum_in_halves<T>(sums));
    }
    return total.sum;
  }

  // Turns the logits of the keys that are read into weights, exp(logit - top), and returns their sum.
  T weigh_rows(T top) {
    return sum_in_halves<T>(long_sum<Vec<T>>(rows, lanes<T>, [&](int64_t i) {
      Vec<T> logits = load<T>(memory.weight + i);
      for (int64_t lane = rows - i; lane < lanes<T>; ++lane) logits[lane] = kNever<T>;
      const Vec<T> x = exponential_below(logits - top);
      store<T>(memory.weight + i, x);
      return x;
    }));
  }

  T largest_row() const {
    T top = kNever<T>;
    for (int64_t i = 0; i < rows; ++i) top = memory.weight[i] > top ? memory.weight[i] : top;
    return top;
  }

  // Adds the keys whose estimated logit is at least `bar`, less one standard deviation of its error, to those that are
  // read. Returns the largest estimate of the others.
  T choose(T bar) {
    Vec<T> tops = all(kNever<T>);
    for (int64_t b = 0; b < blocks; ++b) {
      T* logits = memory.logits + b * call.block;
      const T least = bar - memory.sigma[b];
      for (int64_t i = 0; i < call.block; i += lanes<T>) {
        const Vec<T> x = load<T>(logits + i);
        const IntVec<T> taken = (x >= least) & (x > kNever<T>);
        tops = larger<T>(tops, taken ? all(kNever<T>) : x);
        uint32_t bits = held<T>(taken);
        if (!bits) continue;
        store<T>(logits + i, taken ? all(kNever<T>) : x);
        for (; bits; bits &= bits - 1) look_at(b * call.block + i + __builtin_ctz(bits));
      }
    }
    return largest<T>(tops);
  }

  // Adds the copies of the values of a block, with weights fade * exp(logit - top), to `total`, and returns the sum of
  // these weights. Groups of a weight up to `lightest` are left out. Adds the predicted squared error to `missed`.
  template <int bits>
  T add_block(int64_t b, T top, T lightest, T& missed) {
    constexpr T kMiddle = T((1 << bits) - 1) / 2;
    const int64_t lanes_of_bytes = MultipoleMemory<E>::lanes_of_bytes(call), groups = call.block / kMultipoleGroup;
    const int64_t at = unit() * call.blocks + b;
    const T* logits = memory.logits + b * call.block;
    T weight = T(0), squares = T(0), middle = T(0);
    for (int64_t g = 0; g < groups; ++g) {
      Vec<T> tops{}, sums{}, powers{};
      alignas(64) T mass[kMultipoleGroup];
      for (int i = 0; i < kMultipoleGroup; i += lanes<T>) {
        const Vec<T> x = exponential_below(load<T>(logits + g * kMultipoleGroup + i) - top);
        store<T>(mass + i, x);
        tops = larger<T>(tops, x), sums += x, powers += x * x;
      }
      const T sum = sum_in_halves<T>(sums), top = largest<T>(tops);
      if (!(sum * memory.fade[b] > lightest)) continue;
      if (weight == T(0)) clear(memory.sums, MultipoleMemory<E>::channels(call));
      weight += sum, squares += sum_in_halves<T>(powers);
      const T unit = top / T(kMostWeight), inverse = T(kMostWeight) / top;
      int32_t whole = 0;
      for (int i = 0; i < kMultipoleGroup; ++i) {
        const int32_t n = int32_t(__builtin_rint(double(mass[i] * inverse)));
        memory.rounded[i] = int8_t(n), whole += n;
      }
      middle += unit * T(whole);
      add_codes<T, bits>(call.value_codes + (at * groups + g) * lanes_of_bytes * 256, memory.rounded, lanes_of_bytes,
                         unit, memory.sums);
    }
    if (weight == T(0)) return weight;
    const T *low = call.value_low + at * call.width, *step = call.value_step + at * call.width, fade = memory.fade[b];
    T scatter = T(0);
    for (int64_t e = 0; e < call.width; ++e) {
      memory.total[e] += fade * (weight * (low[e] + kMiddle * step[e]) + step[e] * (memory.sums[e] - kMiddle * middle));
      scatter += step[e] * step[e];
    }
    // A copy of 2 bits has steps of one standard deviation, one of 4 bits a fifteenth of the range.
    constexpr T kScatter = bits == 2 ? T(1) : T(18.75), kRounding = bits == 2 ? T(0.12) : T(1) / T(225);
    missed += fade * fade * squares * kScatter * scatter * (variance(b) + kRounding);
    return weight * fade;
  }

  void answer(int64_t row) {
    E* out = call.out + row * call.width;
    rows = 0;
    const int64_t sinks = call.sinks < near ? call.sinks : near;
    for (int64_t rank = 0; rank < sinks; ++rank) look_at(rank);
    for (int64_t rank = near; rank < seen; ++rank) look_at(rank);
    if (near <= sinks) blocks = 0;
    const T top = blocks ? estimate() : kNever<T>;
    dots_with<E>(memory.scaled, call.depth, rows, [&](int64_t i) { return memory.key[i]; }, memory.weight);
    const int64_t sure = rows;
    T last = largest_row();
    if (blocks) {
      const T first = last > top ? last : top, mass = weigh_blocks(first);
      T around = T(0);
      for (int64_t i = 0; i < sure; ++i) around += exponential_below(all(memory.weight[i] - first))[0];
      const T others = choose(first + T(__builtin_log(double(call.tolerance) * double(mass + around))));
      dots_with<E>(
          memory.scaled, call.depth, rows - sure, [&](int64_t i) { return memory.key[sure + i]; },
          memory.weight + sure);
      last = largest_row();
      last = others > last ? others : last;
    }
    T total = weigh_rows(last), missed = T(0);
    mix<E>(memory.weight, memory.value, rows, call.width, memory.total);
    if (blocks) {
      const T lightest = kLight<T> * total / T(blocks * call.block / kMultipoleGroup);
      T rest = T(0);
      for (int64_t b = 0; b < blocks; ++b)
        rest += call.bits == 2 ? add_block<2>(b, last, lightest, missed) : add_block<4>(b, last, lightest, missed);
      total += rest;
    }
    for (int64_t e = 0; e < call.width; ++e) narrow(memory.total[e] / total, out + e);
    call.lse[row] = T(__builtin_log(double(total)) + double(last));
    call.error[row] = T(__builtin_sqrt(double(missed)) / double(total));
    call.read[row] = T(rows);
  }
};

template <class E>
int64_t multipole_scratch(const MultipoleCall<E>& call) {
  return MultipoleMemory<E>{}.lay_out(call, nullptr);
}

template <class E>
void multipole_forward(const MultipoleCall<E>& call, int64_t begin, int64_t end, Wide<E>* scratch) {
  using T = Wide<E>;
  MultipoleMemory<E> memory{};
  memory.lay_out(call, scratch);
  for (int64_t c = 0; c < MultipoleMemory<E>::chunks(call) * kKeyChannels; ++c) memory.whole[c] = 0;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t i = row % call.queries, head = row / call.queries % call.heads,
                  item = row / call.queries / call.heads;
    const int64_t seen = call.seen[item * call.queries + i], near = call.near[item * call.queries + i];
    if (seen <= 0) {
      for (int64_t e = 0; e < call.width; ++e) narrow(T(0), call.out + row * call.width + e);
      call.lse[row] = kNever<T>, call.error[row] = call.read[row] = T(0);
      continue;
    }
    const E* q = call.q.at(item, head, i);
    for (int64_t d = 0; d < call.depth; ++d) memory.scaled[d] = widen(q[d]) * call.scale;
    const int64_t blocks = (near + call.block - 1) / call.block;
    MultipoleQuery<E>{
        call, memory, item, head, head / call.groups, seen, near, blocks < call.blocks ? blocks : call.blocks}
        .answer(row);
  }
}

template <class E>
constexpr MultipoleKernels<E> multipole_kernels() {
  return {multipole_scratch<E>, multipole_forward<E>};
}

}  // namespace sparing::SPARING_ISA
