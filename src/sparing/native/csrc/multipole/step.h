// Decoding: attention of few queries to a past that is already in clusters (multipole_step in Python). A query reads
// the keys of its own block, all summaries, and the members of the clusters that it expands; entries of a row are in
// the lanes.
#pragma once

#include "common/simd.h"
#include "common/softmax.h"
#include "common/sums.h"
#include "common/tile.h"
#include "multipole/call.h"
#include "multipole/step_rows.h"
#include "multipole/weights.h"

namespace sparing::SPARING_ISA {

template <class T>
struct StepMemory {
  T *score, *mass;         // [clusters] logit of a summary, and exp of it
  T *worth, *left, *gone;  // [clusters] worth of expanding it, keys that this reads, weight of nearby members
  T *offered, *price;      // worth and keys of the clusters that may be expanded
  int32_t* which;          // which clusters these are
  T* weight;               // [rows] logits, then weights
  const T** key;           // [rows]
  const T** value;         // [rows and clusters]

  int64_t lay_out(const MultipoleStep<T>& call, T* memory) {
    int64_t used = 0;
    const auto take = [&]<class U>(U** part, int64_t count) {
      if (memory) *part = reinterpret_cast<U*>(memory + used);
      used += (count * int64_t(sizeof(U)) / int64_t(sizeof(T)) + 15) / 16 * 16;
    };
    const int64_t padded_clusters = padded<T>(call.clusters) + lanes<T>, rows = most_rows(call);
    take(&score, padded_clusters), take(&mass, padded_clusters), take(&worth, padded_clusters);
    take(&left, padded_clusters), take(&gone, padded_clusters);
    take(&offered, padded_clusters), take(&price, padded_clusters), take(&which, padded_clusters);
    take(&weight, padded<T>(rows + call.clusters) + lanes<T>);
    take(&key, rows), take(&value, rows + call.clusters);
    return used;
  }

  static int64_t most_rows(const MultipoleStep<T>& call) {  // largest number of keys that a query reads
    const int64_t wanted = call.block + call.before + call.sinks + call.budget + 1;
    return wanted < call.keys ? wanted : call.keys;
  }
};

template <class T>
struct StepQuery {
  const MultipoleStep<T>& call;
  StepMemory<T>& memory;
  const StepPast<T> past;
  int64_t item, head, own;
  const T* q;
  int64_t shown;      // clusters in use
  int64_t from, low;  // first ranks of the query's own block, and of the nearby keys
  int64_t rows = 0;   // keys that the query reads
  int64_t near = 0;   // the first so many of them are nearby and may be in clusters
  T loud = T(0), shift = T(0), missed = T(0), near_top = T(0);
  T least = T(0);  // what a cluster must be worth to be expanded
  T light = T(0);  // summaries of less mass are left out
  int64_t spared = 0;

  int64_t position(int64_t rank) const { return call.place ? call.place[item * call.places + rank] : rank; }

  void look_at(int64_t rank) {
    const int64_t at = position(rank), kv = head / call.groups;
    memory.key[rows] = call.k.at(item, kv, at);
    memory.value[rows++] = call.v.at(item, kv, at);
  }

  // Sets `loud`, |q - mean|^2 divided by its mean over the queries.
  void sound() {
    const T spread = *past.variance;
    T total = T(0);
    for (int64_t k = 0; k < call.depth; ++k) total += (q[k] - past.mean[k]) * (q[k] - past.mean[k]);
    loud = spread >= kNormal<T> ? total / spread : T(0);
  }

  SPARING_INLINE Vec<T> variance(int64_t c) const {
    const Vec<T> x = loud * load<T>(past.spread + c);
    return x < call.cap ? x : all(call.cap);
  }

  // Computes the scores of all summaries, and what expanding them is worth.
  void score() {
    dots_with<T>(q, call.depth, shown, [&](int64_t c) { return past.keys + c * call.depth; }, memory.score);
    for (int64_t c = 0; c < shown; ++c) memory.left[c] = T(past.size[c]), memory.gone[c] = T(0);
    for (int64_t c = shown; c < shown + lanes<T>; ++c) memory.left[c] = memory.gone[c] = T(0);
    Vec<T> top = all(kNever<T>), members{}, scatters{}, clusters{};
    for (int64_t c = 0; c < shown; c += lanes<T>) {
      Vec<T> x = load<T>(memory.score + c) * call.scale + load<T>(past.offset + c);
      if (call.second) x += T(0.5) * variance(c);
      const Vec<T> size = load<T>(memory.left + c);
      const IntVec<T> some = size > T(0);
      x = some ? x : all(kNever<T>);
      store<T>(memory.score + c, x);
      top = larger<T>(top, x);
      clusters += some ? all(T(1)) : Vec<T>{};
      members += size, scatters += some ? size * load<T>(past.scatter + c) : Vec<T>{};
    }
    for (int64_t rank = low; rank < from; ++rank) {
      const int32_t label = past.labels[rank];
      if (label >= 0) memory.left[label] -= T(1), memory.gone[label] += past.shares[rank];
    }
    shift = largest<T>(top);
    if (shift == kNever<T>) shift = T(0);
    Vec<T> total{};
    for (int64_t c = 0; c < shown; c += lanes<T>) {
      const IntVec<T> some = load<T>(memory.left + c) > T(0);
      const Vec<T> f = some ? exponential(load<T>(memory.score + c) - shift) : Vec<T>{};
      const Vec<T> mass = some ? f * (load<T>(past.weight + c) - load<T>(memory.gone + c)) : Vec<T>{};
      total += mass;
      store<T>(memory.mass + c, mass);
      const Vec<T> left = load<T>(memory.left + c);
      Vec<T> worth = mass * mass / (left > T(1) ? left : all(T(1)));
      if (!call.by_mass) worth *= surplus<T>(variance(c)) * load<T>(past.scatter + c);
      store<T>(memory.worth + c, some ? worth : Vec<T>{});
    }
    if (call.tolerance > T(0)) {
      const T every = sum<T>(total) + mass_near() * exponential(all(near_top - shift))[0];
      const T keys = sum<T>(members), usual = keys > T(0) ? sum<T>(scatters) / keys : T(0);
      least = call.tolerance * call.tolerance * (call.by_mass ? T(1) : usual) * every * every;
      light = every * light_share(call.tolerance, int64_t(sum<T>(clusters)));
    }
  }

  // Sets near_top, the largest logit of the keys that are read before any cluster is expanded. Returns the mass of
  // these keys times exp(-near_top).
  T mass_near() {
    near_top = kNever<T>;
    for (int64_t i = 0; i < rows; ++i) near_top = memory.weight[i] > near_top ? memory.weight[i] : near_top;
    return sum<T>(long_sum<Vec<T>>(rows, lanes<T>, [&](int64_t i) {
      Vec<T> logits = load<T>(memory.weight + i);
      for (int64_t lane = rows - i; lane < lanes<T>; ++lane) logits[lane] = kNever<T>;
      return exponential(logits - near_top);
    }));
  }

  void expand(int64_t c) {
    const int32_t* members = past.members + past.begin[c];
    for (int32_t i = 0; i < past.size[c]; ++i)
      if (members[i] < low) look_at(members[i]);
    memory.score[c] = kNever<T>, memory.worth[c] = T(-1);
  }

  void choose() {
    T budget = T(call.budget), every = T(0), asked = T(0);
    int64_t offers = 0;
    for (int64_t c = 0; c < shown; ++c) {
      every += memory.left[c];
      if (!(memory.worth[c] > least)) continue;
      asked += memory.price[offers] = memory.left[c], memory.offered[offers] = memory.worth[c];
      memory.which[offers++] = int32_t(c);
    }
    if (every <= budget && !(call.tolerance > T(0))) {
      for (int64_t c = 0; c < shown; ++c)
        if (memory.left[c] > T(0)) expand(c);
      return;
    }
    if (asked <= budget) {
      for (int64_t i = 0; i < offers; ++i) expand(memory.which[i]);
    } else {
      for (int64_t i = offers; i < offers + lanes<T>; ++i) memory.offered[i] = T(-1);
      for (int64_t i; (i = best_that_fits<T>(memory.offered, memory.price, offers, budget, least)) >= 0;) {
        budget -= memory.price[i], memory.offered[i] = T(-1);
        expand(memory.which[i]);
      }
    }
    for (int64_t c = 0; c < shown; c += lanes<T>) {
      const Vec<T> worth = load<T>(memory.worth + c);
      Vec<T> kept = worth * load<T>(memory.left + c);
      if (call.by_mass) kept *= surplus<T>(variance(c)) * load<T>(past.scatter + c);
      missed += sum<T>(worth > T(0) ? kept : Vec<T>{});
    }
    for (int64_t c = 0; c < shown; ++c) spared += memory.worth[c] >= T(0) && memory.left[c] > T(0);
  }

  // Computes the logits of the keys from `first` on.
  void meet(int64_t first) {
    T* logits = memory.weight + first;
    dots_with<T>(q, call.depth, rows - first, [&](int64_t i) { return memory.key[first + i]; }, logits);
    for (int64_t i = 0; i < rows - first; ++i) logits[i] *= call.scale;
  }

  // Turns logits into weights, exp(logit - top), and returns their sum.
  T weigh_rows(T top) {
    T total = T(0);
    const int64_t whole = rows / lanes<T> * lanes<T>;
    const Vec<T> sums = long_sum<Vec<T>>(whole, lanes<T>, [&](int64_t i) {
      const Vec<T> weight = exponential(load<T>(memory.weight + i) - top);
      store<T>(memory.weight + i, weight);
      return weight;
    });
    for (int64_t i = whole; i < rows; ++i) total += memory.weight[i] = exponential(all(memory.weight[i] - top))[0];
    return total + sum<T>(sums);
  }

  void answer(int64_t row) {
    T* out = call.out + row * call.width;
    for (int64_t rank = low; rank < from; ++rank) look_at(rank);
    near = rows;
    for (int64_t rank = from; rank <= own; ++rank) look_at(rank);
    for (int64_t rank = 0; rank < call.sinks && rank < low; ++rank) look_at(rank);
    meet(0);
    if (shown) {
      const int64_t met = rows;
      sound(), score(), choose();
      meet(met);
    }
    // The largest score that is left: that of an expanded cluster, or of one that is too light, may be far larger.
    Vec<T> tops = all(kNever<T>);
    for (int64_t c = 0; spared && c < shown; c += lanes<T>) {
      const IntVec<T> some = (load<T>(memory.left + c) > T(0)) & !(load<T>(memory.mass + c) < light);
      const Vec<T> score = some ? load<T>(memory.score + c) : all(kNever<T>);
      store<T>(memory.score + c, score);
      tops = larger<T>(tops, score);
    }
    T top = largest<T>(tops);
    for (int64_t i = 0; i < rows; ++i) top = memory.weight[i] > top ? memory.weight[i] : top;
    T total = weigh_rows(top);
    int64_t terms = rows;
    if (spared) {
      Vec<T> totals{};
      for (int64_t c = 0; c < shown; c += lanes<T>) {
        const IntVec<T> some = load<T>(memory.left + c) > T(0);
        const Vec<T> factor = exponential(load<T>(memory.score + c) - top);
        const Vec<T> mass = factor * (load<T>(past.weight + c) - load<T>(memory.gone + c));
        store<T>(memory.mass + c, some ? factor : Vec<T>{});
        totals += some ? mass : Vec<T>{};
      }
      total += sum<T>(totals);
      for (int64_t c = 0; c < shown; ++c) {
        if (memory.mass[c] * past.weight[c] < kFaint<T> * total) memory.mass[c] = T(0);
        if (memory.mass[c] == T(0)) continue;
        memory.weight[terms] = memory.mass[c];
        memory.value[terms++] = past.values + c * call.width;
      }
      // A summary includes its nearby members, which are exact: subtract their share.
      for (int64_t r = 0; r < near; ++r) {
        const int32_t label = past.labels[low + r];
        if (label >= 0) memory.weight[r] -= memory.mass[label] * past.shares[low + r];
      }
    }
    mix<T>(memory.weight, memory.value, terms, call.width, out);
    const T inverse = T(1) / total;
    for (int64_t e = 0; e < call.width; ++e) out[e] *= inverse;
    call.lse[row] = T(__builtin_log(double(total)) + double(top));
    call.error[row] =
        missed > T(0) ? T(__builtin_sqrt(double(missed)) * __builtin_exp(double(shift) - double(call.lse[row]))) : T(0);
    call.touched[row] = T(rows + spared), call.summaries[row] = T(spared);
  }
};

template <class T>
int64_t step_scratch(const MultipoleStep<T>& call) {
  StepMemory<T> memory{};
  return memory.lay_out(call, nullptr);
}

template <class T>
void step_forward(const MultipoleStep<T>& call, int64_t begin, int64_t end, T* scratch) {
  StepMemory<T> memory{};
  memory.lay_out(call, scratch);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t item = unit / call.heads, head = unit % call.heads;
    const StepPast<T> past = call.past(unit);
    for (int64_t i = 0; i < call.queries; ++i) {
      const int64_t row = unit * call.queries + i, own = call.own[item * call.queries + i];
      if (own < 0) {
        for (int64_t e = 0; e < call.width; ++e) call.out[row * call.width + e] = T(0);
        call.lse[row] = kNever<T>, call.error[row] = call.touched[row] = call.summaries[row] = T(0);
        continue;
      }
      const int64_t from = own / call.block * call.block, reach = own - call.before < from ? own - call.before : from;
      StepQuery<T> query{
          call, memory, past, item, head, own, call.q.at(item, head, i), *past.visible, from, reach > 0 ? reach : 0};
      query.answer(row);
    }
  }
}

template <class T>
constexpr StepKernels<T> step_kernels() {
  return {step_scratch<T>, step_forward<T>};
}

}  // namespace sparing::SPARING_ISA
