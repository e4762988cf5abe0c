// Attention to few keys that are read, and to copies of few bits of the others (multipole in Python). Queries that
// share their keys are taken together, a tile of rows at a time: all their logits are estimated, then each reads the
// keys whose share of its weight is large, and copies give the rest.
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

// A group of keys is left out if all of it, were it as heavy as its heaviest key, would weigh at most this share of the
// keys that are read, divided by the number of groups.
template <class T>
inline constexpr T kLight = T(0x1p-20);

// One query of a tile.
template <class T>
struct MultipoleRow {
  int64_t out, item, head, query;  // out: number of the row in the output
  int64_t seen, near, blocks;      // blocks: those that hold keys before `near`
  T top;                           // largest logit, estimates included; then the largest that is left
  T total, missed, lightest;
};

template <class E>
struct MultipoleMemory {
  using T = Wide<E>;
  int64_t chunks, groups, lanes_of_bytes, channels;  // groups: of 16 keys in a block
  int64_t held, all_groups;                          // keys in all blocks, and their groups
  MultipoleRow<T>* rows;
  T *scaled, *products;    // [rows][depth] queries times the scale; [depth] times the steps of a block
  int8_t* whole;           // [rows][chunks][8] queries in integers
  int32_t* totals;         // [rows][block] products of codes
  T* logits;               // [rows][held] estimates; -inf for keys that are read
  T* tops;                 // [rows][all_groups] largest of a group
  T *sigma, *fade;         // [rows][blocks] standard deviation of the errors of logits, and the factor that corrects it
  int8_t* rounded;         // [rows][block] weights in integers
  T* units;                // [rows][groups] that they are multiples of
  T *sums, *out;           // [rows][channels] products of codes in a block; the output
  T* weight;               // [keys] logits of keys that are read, then weights
  const E **key, **value;  // [keys]
  int64_t active[kMultipoleTile];

  explicit MultipoleMemory(const MultipoleCall<E>& call) {
    chunks = (call.depth + kKeyChannels - 1) / kKeyChannels, groups = call.block / kMultipoleGroup;
    const int64_t each = kValueChannels * 8 / call.bits;
    lanes_of_bytes = (call.width + each - 1) / each, channels = lanes_of_bytes * each;
    held = call.blocks * call.block, all_groups = call.blocks * groups;
  }

  int64_t lay_out(const MultipoleCall<E>& call, T* memory) {
    int64_t used = 0;
    const auto take = [&]<class U>(U** part, int64_t count) {
      if (memory) *part = reinterpret_cast<U*>(memory + used);
      used += (count * int64_t(sizeof(U)) / int64_t(sizeof(T)) + 31) / 16 * 16;
    };
    const int64_t n = call.tile;
    take(&rows, n), take(&scaled, n * call.depth), take(&products, call.depth);
    take(&whole, n * chunks * kKeyChannels), take(&totals, n * call.block);
    take(&logits, n * held), take(&tops, n * all_groups);
    take(&sigma, n * call.blocks), take(&fade, n * call.blocks);
    take(&rounded, n * call.block), take(&units, n * groups);
    take(&sums, n * channels), take(&out, n * channels);
    take(&weight, call.keys + lanes<T>), take(&key, call.keys), take(&value, call.keys);
    return used;
  }
};

template <class E>
struct MultipoleTile {
  using T = Wide<E>;
  using Row = MultipoleRow<T>;
  const MultipoleCall<E>& call;
  MultipoleMemory<E>& memory;
  int64_t unit, kv;  // unit: key head of all items
  int64_t count;     // rows
  int64_t read = 0;  // keys that the current row reads

  T* logits(int64_t row, int64_t b) const { return memory.logits + row * memory.held + b * call.block; }
  T* tops(int64_t row, int64_t b) const { return memory.tops + row * memory.all_groups + b * memory.groups; }

  // Collects the rows that see a block; returns their number.
  int64_t gather(int64_t b) {
    int64_t found = 0;
    for (int64_t row = 0; row < count; ++row)
      if (b < memory.rows[row].blocks) memory.active[found++] = row;
    return found;
  }

  // Estimates the logits of all keys in blocks, -inf for those that are always read; sets `top` of the rows.
  void estimate() {
    int64_t last = 0;
    for (int64_t row = 0; row < count; ++row) {
      memory.rows[row].top = kNever<T>;
      last = memory.rows[row].blocks > last ? memory.rows[row].blocks : last;
    }
    for (int64_t b = 0; b < last; ++b) {
      const int64_t at = unit * call.blocks + b, found = gather(b), wide = memory.chunks * kKeyChannels;
      Estimate<T> each[kMultipoleTile];
      for (int64_t i = 0; i < found; ++i) {
        const int64_t row = memory.active[i];
        each[i] = round_query<T>(memory.scaled + row * call.depth, call.key_low + at * call.depth,
                                 call.key_step + at * call.depth, call.depth, memory.products, memory.whole + i * wide);
        memory.sigma[row * call.blocks + b] = each[i].sigma;
      }
      code_products({call.key_codes + at * memory.groups * memory.chunks * 64, memory.groups, memory.chunks,
                     memory.whole, found, memory.totals, call.vnni});
      for (int64_t i = 0; i < found; ++i) {
        const int64_t row = memory.active[i];
        T* guesses = logits(row, b);
        const int32_t* totals = memory.totals + i * call.block;
        Vec<T> tops = all(kNever<T>);
        for (int64_t k = 0; k < call.block; k += lanes<T>) {
          const Vec<T> logit = each[i].base + each[i].unit * from_integers<T>(totals + k);
          tops = larger<T>(tops, logit);
          store<T>(guesses + k, logit);
        }
        Row& mine = memory.rows[row];
        const int64_t begin = b * call.block;
        if (begin < call.sinks || begin + call.block > mine.near) {
          tops = all(kNever<T>);
          for (int64_t k = 0; k < call.block; ++k) {
            if (begin + k < call.sinks || begin + k >= mine.near) guesses[k] = kNever<T>;
            tops[0] = guesses[k] > tops[0] ? guesses[k] : tops[0];
          }
        }
        const T top = largest_in_halves<T>(tops);
        mine.top = top > mine.top ? top : mine.top;
      }
    }
  }

  void look_at(const Row& row, int64_t rank) {
    const int64_t at = call.place ? call.place[row.item * call.places + rank] : rank;
    memory.key[read] = call.k.at(row.item, kv, at);
    memory.value[read++] = call.v.at(row.item, kv, at);
  }

  // Computes the logits of the keys that are read, from number `from` on.
  void multiply(int64_t row, int64_t from) {
    dots_with<E>(
        memory.scaled + row * call.depth, call.depth, read - from, [&](int64_t i) { return memory.key[from + i]; },
        memory.weight + from);
  }

  T largest_read() const {
    T top = kNever<T>;
    for (int64_t i = 0; i < read; ++i) top = memory.weight[i] > top ? memory.weight[i] : top;
    return top;
  }

  T variance(int64_t row, int64_t b) const {
    const T sigma = memory.sigma[row * call.blocks + b], found = sigma * sigma;
    return found < kMostVariance<T> ? found : kMostVariance<T>;
  }

  // Returns the sum of exp(logit - top) over all keys in blocks, each block times its factor `fade`, which is set here.
  T weigh_blocks(int64_t row) {
    const Row& mine = memory.rows[row];
    Running<T> total;
    for (int64_t b = 0; b < mine.blocks; ++b) {
      T *x = logits(row, b), *fade = memory.fade + row * call.blocks + b;
      Vec<T> sums{};
      for (int64_t k = 0; k < call.block; k += lanes<T>) sums += exponential_below(load<T>(x + k) - mine.top);
      *fade = exponential_below(all(T(-0.5) * variance(row, b)))[0];
      total.add(*fade * sum_in_halves<T>(sums));
    }
    return total.sum;
  }

  // Turns the logits of the keys that are read into weights, exp(logit - top), and returns their sum.
  T weigh_read(T top) {
    return sum_in_halves<T>(long_sum<Vec<T>>(read, lanes<T>, [&](int64_t i) {
      Vec<T> logits = load<T>(memory.weight + i);
      for (int64_t lane = read - i; lane < lanes<T>; ++lane) logits[lane] = kNever<T>;
      const Vec<T> x = exponential_below(logits - top);
      store<T>(memory.weight + i, x);
      return x;
    }));
  }

  // Reads the keys whose estimated logit is at least `bar`, less one standard deviation of its error, and sets the
  // largest logit of each group to that of its other keys. Returns the largest of these.
  T choose(int64_t row, T bar) {
    const Row& mine = memory.rows[row];
    T most = kNever<T>;
    for (int64_t b = 0; b < mine.blocks; ++b) {
      T *x = logits(row, b), *largest = tops(row, b);
      const T least = bar - memory.sigma[row * call.blocks + b];
      for (int64_t g = 0; g < memory.groups; ++g) {
        Vec<T> group = all(kNever<T>);
        for (int64_t k = g * kMultipoleGroup; k < (g + 1) * kMultipoleGroup; k += lanes<T>) {
          Vec<T> logit = load<T>(x + k);
          const IntVec<T> taken = (logit >= least) & (logit > kNever<T>);
          if (uint32_t bits = held<T>(taken)) {
            logit = taken ? all(kNever<T>) : logit;
            store<T>(x + k, logit);
            for (; bits; bits &= bits - 1) look_at(mine, b * call.block + k + __builtin_ctz(bits));
          }
          group = larger<T>(group, logit);
        }
        const T top = largest_in_halves<T>(group);
        largest[g] = top, most = top > most ? top : most;
      }
    }
    return most;
  }

  // Reads the keys that a row needs, and sums what they weigh.
  void read_keys(int64_t row) {
    Row& mine = memory.rows[row];
    read = 0;
    const int64_t sinks = call.sinks < mine.near ? call.sinks : mine.near;
    for (int64_t rank = 0; rank < sinks; ++rank) look_at(mine, rank);
    for (int64_t rank = mine.near; rank < mine.seen; ++rank) look_at(mine, rank);
    multiply(row, 0);
    T last = largest_read();
    if (mine.blocks) {
      const int64_t sure = read;
      mine.top = last > mine.top ? last : mine.top;
      const T mass = weigh_blocks(row);
      T around = T(0);
      for (int64_t i = 0; i < sure; ++i) around += exponential_below(all(memory.weight[i] - mine.top))[0];
      const T bar = mine.top + T(__builtin_log(double(call.least_share) * double(mass + around)));
      const T others = choose(row, bar);
      multiply(row, sure);
      last = largest_read();
      last = others > last ? others : last;
    }
    mine.total = weigh_read(last), mine.missed = T(0);
    T* out = memory.out + row * memory.channels;
    mix<E>(memory.weight, memory.value, read, call.width, out);
    mine.lightest = kLight<T> * mine.total / T(mine.blocks * memory.groups * kMultipoleGroup);
    mine.top = last;
    call.read[mine.out] = T(read);
  }

  // Rounds the weights of a block to integers, and returns the sum of those that count; squares: of their squares.
  T round_weights(int64_t row, int64_t b, int8_t* rounded, T* units, T* squares, T* middle) {
    const Row& mine = memory.rows[row];
    const T *x = logits(row, b), *largest = tops(row, b);
    const T fade = memory.fade[row * call.blocks + b];
    Vec<T> sums{}, powers{}, middles{};
    alignas(64) T heaviest[lanes<T>];  // of so many groups; those beyond the last are not used
    for (int64_t g = 0; g < memory.groups; ++g) {
      if (g % lanes<T> == 0) store<T>(heaviest, exponential_below(load<T>(largest + g) - mine.top));
      const T top = heaviest[g % lanes<T>];
      units[g] = T(0);
      if (!(top * fade > mine.lightest)) continue;
      const T unit = top / T(kMostWeight), inverse = T(kMostWeight) / top;
      units[g] = unit;
      for (int64_t k = g * kMultipoleGroup; k < (g + 1) * kMultipoleGroup; k += lanes<T>) {
        const Vec<T> mass = exponential_below(load<T>(x + k) - mine.top);
        const Vec<T> n = (mass * inverse + kToInteger<T>)-kToInteger<T>;
        to_bytes(n, rounded + k);
        sums += mass, powers += mass * mass, middles += unit * n;
      }
    }
    *squares = sum_in_halves<T>(powers), *middle = sum_in_halves<T>(middles);
    return sum_in_halves<T>(sums);
  }

  // Adds the copies of the keys that are not read.
  template <int bits>
  void add_copies() {
    constexpr T kMiddle = T((1 << bits) - 1) / 2;
    // A copy of 2 bits has steps of one standard deviation, one of 4 bits a fifteenth of the range.
    constexpr T kScatter = bits == 2 ? T(1) : T(18.75), kRounding = bits == 2 ? T(0.12) : T(1) / T(225);
    int64_t last = 0;
    for (int64_t row = 0; row < count; ++row) last = memory.rows[row].blocks > last ? memory.rows[row].blocks : last;
    for (int64_t b = 0; b < last; ++b) {
      const int64_t at = unit * call.blocks + b, seen = gather(b);
      T weight[kMultipoleTile], squares[kMultipoleTile], middle[kMultipoleTile];
      int64_t found = 0;
      for (int64_t i = 0; i < seen; ++i) {
        const int64_t row = memory.active[i];
        weight[found] = round_weights(row, b, memory.rounded + found * call.block, memory.units + found * memory.groups,
                                      squares + found, middle + found);
        if (weight[found] > T(0)) memory.active[found++] = row;
      }
      if (!found) continue;
      clear(memory.sums, found * memory.channels);
      add_codes<T, bits>({call.value_codes + at * memory.groups * memory.lanes_of_bytes * 256, memory.groups,
                          memory.lanes_of_bytes, memory.rounded, memory.units, found, memory.sums, call.vnni});
      const T *low = call.value_low + at * call.width, *step = call.value_step + at * call.width;
      T scatter = T(0);
      for (int64_t e = 0; e < call.width; ++e) scatter += step[e] * step[e];
      for (int64_t i = 0; i < found; ++i) {
        const int64_t row = memory.active[i];
        const T fade = memory.fade[row * call.blocks + b], *sums = memory.sums + i * memory.channels;
        // weight * (low + kMiddle * step) + step * (sums - kMiddle * middle)
        const T each = weight[i], rest = kMiddle * (weight[i] - middle[i]);
        T* out = memory.out + row * memory.channels;
        for (int64_t e = 0; e < call.width; ++e) out[e] += fade * (each * low[e] + step[e] * (sums[e] + rest));
        memory.rows[row].missed += fade * fade * squares[i] * kScatter * scatter * (variance(row, b) + kRounding);
        memory.rows[row].total += fade * each;
      }
    }
  }

  void answer() {
    for (int64_t row = 0; row < count; ++row) {
      const Row& mine = memory.rows[row];
      const E* q = call.q.at(mine.item, mine.head, mine.query);
      for (int64_t d = 0; d < call.depth; ++d) memory.scaled[row * call.depth + d] = widen(q[d]) * call.scale;
    }
    estimate();
    for (int64_t row = 0; row < count; ++row) read_keys(row);
    if (call.bits == 2)
      add_copies<2>();
    else
      add_copies<4>();
    for (int64_t row = 0; row < count; ++row) {
      const Row& mine = memory.rows[row];
      const T* out = memory.out + row * memory.channels;
      for (int64_t e = 0; e < call.width; ++e) narrow(out[e] / mine.total, call.out + mine.out * call.width + e);
      call.lse[mine.out] = T(__builtin_log(double(mine.total)) + double(mine.top));
      call.error[mine.out] = T(__builtin_sqrt(double(mine.missed)) / double(mine.total));
    }
  }
};

template <class E>
int64_t multipole_scratch(const MultipoleCall<E>& call) {
  return MultipoleMemory<E>(call).lay_out(call, nullptr);
}

// Tiles from `begin` to `end`; a tile has call.tile rows of one key head, the query heads of one query side by side.
template <class E>
void multipole_forward(const MultipoleCall<E>& call, int64_t begin, int64_t end, Wide<E>* scratch) {
  using T = Wide<E>;
  MultipoleMemory<E> memory(call);
  memory.lay_out(call, scratch);
  for (int64_t c = 0; c < call.tile * memory.chunks * kKeyChannels; ++c) memory.whole[c] = 0;
  const int64_t kv_heads = call.heads / call.groups, of_unit = call.queries * call.groups;
  const int64_t tiles = (of_unit + call.tile - 1) / call.tile;
  for (int64_t tile = begin; tile < end; ++tile) {
    const int64_t unit = tile / tiles, item = unit / kv_heads, kv = unit % kv_heads, from = tile % tiles * call.tile;
    const int64_t to = from + call.tile < of_unit ? from + call.tile : of_unit;
    int64_t count = 0;
    for (int64_t i = from; i < to; ++i) {
      const int64_t query = i / call.groups, head = kv * call.groups + i % call.groups;
      const int64_t seen = call.seen[item * call.queries + query], near = call.near[item * call.queries + query];
      const int64_t out = (item * call.heads + head) * call.queries + query;
      if (seen <= 0) {
        for (int64_t e = 0; e < call.width; ++e) narrow(T(0), call.out + out * call.width + e);
        call.lse[out] = kNever<T>, call.error[out] = call.read[out] = T(0);
        continue;
      }
      int64_t blocks = (near + call.block - 1) / call.block;
      if (near <= call.sinks) blocks = 0;
      if (blocks > call.blocks) blocks = call.blocks;
      memory.rows[count++] = {out, item, head, query, seen, near, blocks, T(0), T(0), T(0), T(0)};
    }
    MultipoleTile<E>{call, memory, unit, kv, count}.answer();
  }
}

template <class E>
constexpr MultipoleKernels<E> multipole_kernels() {
  return {multipole_scratch<E>, multipole_forward<E>};
}

}  // namespace sparing::SPARING_ISA
