// Values projected from sampled features (monte_carlo in Python): H[j] = (1/r_j) sum_t x[j, s_t] W[s_t] / p(s_t).
//
// If each token has its own list of samples, the features are drawn and sorted by groups of rows of W that fit the L1
// cache, and the rows are added group by group for a whole chunk of tokens: read from the L2 cache, they would take
// twice as long. If all tokens share a list, or use every feature, a few tokens at a time are multiplied with the rows
// of W in the order of the list.
#pragma once

#include "common/simd.h"
#include "common/tile.h"
#include "monte_carlo/call.h"
#include "monte_carlo/projection_rows.h"

namespace sparing::SPARING_ISA {

// The working memory of a chunk of tokens.
template <class T>
struct Samples {
  T* amounts;      // [kRows * features] x[s] / p(s) of each draw
  Int<T>* picks;   // [kRows * features] s of each draw
  Int<T>* begins;  // [kRows][groups + 1], where the draws of a group of features begin
  T* sums;         // [kRows][kColumnVectors vectors]
  int32_t* found;  // [features], the draws of one token, in their order
  uint32_t* bits;  // [features + 2 kDrawn]
  T* room;         // [kDeep][features], rows of x that are stored in 16 bits
};

template <class T>
int64_t feature_groups(const SampledProjection<T>& call) {
  return (call.features + kGroup - 1) / kGroup;
}

template <class T>
int64_t lay_out(Samples<T>* samples, const SampledProjection<T>& call, T* memory) {
  int64_t used = 0;
  const auto take = [&]<class Entry>(Entry** part, int64_t count) {
    if (memory) *part = reinterpret_cast<Entry*>(memory + used);
    used += (count * int64_t(sizeof(Entry)) + 63) / 64 * 64 / int64_t(sizeof(T));
  };
  take(&samples->sums, kRows * kColumnVectors * lanes<T>);
  take(&samples->found, call.features);
  take(&samples->bits, call.features + 2 * kDrawn);
  take(&samples->begins, kRows * (feature_groups(call) + 1));
  take(&samples->amounts, kRows * call.features);
  take(&samples->picks, kRows * call.features);
  take(&samples->room, call.x.room(kDeep, call.features));
  return used;
}

template <class T>
int64_t projection_scratch(const SampledProjection<T>& call) {
  Samples<T> samples{};
  return lay_out<T>(&samples, call, nullptr);
}

// A token in the order of a head: its row, its output and its samples.
template <class T>
struct Place {
  int64_t token;
  T* out;
  int64_t count, rank;

  Place(const SampledProjection<T>& call, int64_t head, int64_t position) {
    const TokenSlot at = call.order[head * call.items * call.tokens + position];
    token = at.token;
    out = call.out + at.value * call.width;
    count = call.counts[at.value], rank = call.ranks[at.value];
  }

  // Returns its row of x, which may be in `room`.
  const T* row(const SampledProjection<T>& call, T* room) const {
    return row_of(call.x, 0, 0, token, call.features, room);
  }

  // Writes one panel of the value: sums / samples + bias.
  void write(const SampledProjection<T>& call, int64_t head, const Panel<T>& panel, const T* sums,
             int64_t samples) const {
    const T divisor = T(samples > 0 ? samples : 1);
    const T* bias = call.bias ? call.bias + head * call.width + panel.first : nullptr;
    const int64_t given = call.width - panel.first < panel.width ? call.width - panel.first : panel.width;
    T* to = out + panel.first;
    int64_t e = 0;
    for (; e + lanes<T> <= given; e += lanes<T>)
      store<T>(to + e, load<T>(sums + e) / divisor + (bias ? load<T>(bias + e) : Vec<T>{}));
    for (; e < given; ++e) to[e] = sums[e] / divisor + (bias ? bias[e] : T(0));
  }
};

template <class T, int M>
void add_groups(const Samples<T>& samples, int64_t tokens, int64_t groups, const T* rows) {
  constexpr int64_t width = M * lanes<T>;
  for (int64_t i = 0; i < tokens * width; ++i) samples.sums[i] = T(0);
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t j = 0; j < tokens; ++j) {
      const Int<T>* begins = samples.begins + j * (groups + 1) + g;
      T* sums = samples.sums + j * width;
      Vec<T> total[M];
      for (int i = 0; i < M; ++i) total[i] = load<T>(sums + i * lanes<T>);
      for (int64_t t = begins[0]; t < begins[1]; ++t) {
        const T* row = rows + samples.picks[t] * width;
        const Vec<T> amount = all(samples.amounts[t]);
        for (int i = 0; i < M; ++i) total[i] += amount * load<T>(row + i * lanes<T>);
      }
      for (int i = 0; i < M; ++i) store<T>(sums + i * lanes<T>, total[i]);
    }
}

// Projects tokens that each have their own list of samples.
template <class T>
void project_own(const SampledProjection<T>& call, const TokenChunk& chunk, const Samples<T>& samples) {
  const int64_t groups = feature_groups(call);
  const T* inverse = call.inverse + chunk.head * call.features;
  int64_t used = 0;
  for (int64_t j = 0; j < chunk.count; ++j) {
    const Place<T> token(call, chunk.head, chunk.first + j);
    const T* x = token.row(call, samples.room);
    for (int64_t k = 0; k < call.features; k += 64 / int64_t(sizeof(T))) __builtin_prefetch(x + k);
    draw(call, chunk.head, token.rank, token.count, samples.bits, samples.found);
    Int<T>* begins = samples.begins + j * (groups + 1);
    for (int64_t g = 0; g <= groups; ++g) begins[g] = 0;
    for (int64_t t = 0; t < token.count; ++t) ++begins[samples.found[t] / kGroup];
    Int<T> next = Int<T>(used);
    for (int64_t g = 0; g <= groups; ++g) {
      const Int<T> size = begins[g];
      begins[g] = next;
      next += size;
    }
    for (int64_t t = 0; t < token.count; ++t) {
      const int32_t k = samples.found[t];
      const Int<T> to = begins[k / kGroup]++;
      samples.amounts[to] = x[k] * inverse[k];
      samples.picks[to] = k;
    }
    for (int64_t g = groups; g > 0; --g) begins[g] = begins[g - 1];
    begins[0] = Int<T>(used);
    used += token.count;
  }
  each_panel<T>(call.features, call.width, chunk.head, [&](const Panel<T>& panel, int64_t at) {
    const T* rows = call.rows + at;
    switch (panel.width / lanes<T>) {
      case 2: add_groups<T, 2>(samples, chunk.count, groups, rows); break;
      case 4: add_groups<T, 4>(samples, chunk.count, groups, rows); break;
      default: add_groups<T, kColumnVectors>(samples, chunk.count, groups, rows);
    }
    for (int64_t j = 0; j < chunk.count; ++j) {
      const Place<T> token(call, chunk.head, chunk.first + j);
      token.write(call, chunk.head, panel, samples.sums + j * panel.width, token.count);
    }
  });
}

// sums[i] += sum_t x[i][list[t]] rows[t] for begin <= t < end and i < M, for V vectors of the rows; without a list the
// features are 0, 1, 2, ...
template <class T, int M, int V>
SPARING_INLINE void prefix_tile(const T* const* x, const int32_t* list, int64_t begin, int64_t end, const T* rows,
                                int64_t width, T* sums) {
  Vec<T> total[M][V];
  const T* from[M];
  for (int i = 0; i < M; ++i) {
    from[i] = x[i];
    for (int j = 0; j < V; ++j) total[i][j] = load<T>(sums + i * width + j * lanes<T>);
  }
  for (int64_t t = begin; t < end; ++t) {
    const int64_t k = list ? list[t] : t;
    Vec<T> row[V];
    for (int j = 0; j < V; ++j) row[j] = load<T>(rows + t * width + j * lanes<T>);
    for (int i = 0; i < M; ++i) {
      const Vec<T> entry = all(from[i][k]);
      for (int j = 0; j < V; ++j) total[i][j] += entry * row[j];
    }
  }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < V; ++j) store<T>(sums + i * width + j * lanes<T>, total[i][j]);
}

// Computes the sums of up to kDeep tokens, sorted by decreasing count: together as far as all have samples, then one by
// one.
template <class T, int V>
SPARING_INLINE void prefix_sums(const T* const* x, const int64_t* counts, int64_t tokens, const int32_t* list,
                                const T* rows, T* sums) {
  constexpr int64_t width = V * lanes<T>;
  for (int64_t i = 0; i < tokens * width; ++i) sums[i] = T(0);
  const int64_t common = counts[tokens - 1];
  for (int64_t e = 0; e < width; e += kWide * lanes<T>)
    in_tiles<kDeep>(tokens, [&]<int M>(int64_t i) {
      prefix_tile<T, M, kWide>(x + i, list, 0, common, rows + e, width, sums + i * width + e);
    });
  for (int64_t i = 0; i < tokens; ++i)
    if (counts[i] > common) prefix_tile<T, 1, V>(x + i, list, common, counts[i], rows, width, sums + i * width);
}

// Projects tokens that use the first features of one list, each as many as it has samples, or all features if there is
// no list.
template <class T>
void project_together(const SampledProjection<T>& call, const TokenChunk& chunk, const Samples<T>& samples,
                      const int32_t* list) {
  const T* table = list ? call.listed : call.rows;
  each_panel<T>(call.features, call.width, chunk.head, [&](const Panel<T>& panel, int64_t at) {
    const T* rows = table + at;
    for (int64_t first = 0; first < chunk.count; first += kDeep) {
      const int64_t some = chunk.count - first < kDeep ? chunk.count - first : kDeep;
      const T* x[kDeep];
      int64_t counts[kDeep];
      for (int64_t i = 0; i < some; ++i) {
        const Place<T> token(call, chunk.head, chunk.first + first + i);
        x[i] = token.row(call, samples.room + call.x.room(i, call.features)), counts[i] = token.count;
      }
      switch (panel.width / lanes<T>) {
        case 2: prefix_sums<T, 2>(x, counts, some, list, rows, samples.sums); break;
        case 4: prefix_sums<T, 4>(x, counts, some, list, rows, samples.sums); break;
        default: prefix_sums<T, kColumnVectors>(x, counts, some, list, rows, samples.sums);
      }
      for (int64_t i = 0; i < some; ++i) {
        const Place<T> token(call, chunk.head, chunk.first + first + i);
        token.write(call, chunk.head, panel, samples.sums + i * panel.width, list ? token.count : 1);
      }
    }
  });
}

template <class T>
void projection_project(const SampledProjection<T>& call, const TokenChunk* chunk, T* scratch) {
  Samples<T> samples{};
  lay_out<T>(&samples, call, scratch);
  if (chunk->samples == call.features)
    project_together<T>(call, *chunk, samples, nullptr);
  else if (call.listed)
    project_together<T>(call, *chunk, samples, call.list + chunk->head * call.features);
  else
    project_own(call, *chunk, samples);
}

template <class T>
constexpr ProjectionKernels<T> projection_kernels() {
  return {kRows,
          projection_row_entries<T>,
          projection_tables_scratch<T>,
          projection_tables<T>,
          projection_scratch<T>,
          projection_prepare<T>,
          projection_project<T>};
}

}  // namespace sparing::SPARING_ISA
