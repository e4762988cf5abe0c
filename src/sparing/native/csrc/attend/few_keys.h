// The backward pass over few keys: the lanes hold keys. They are transposed once for all queries, whose rows, like
// those of the output, are then used as they are in memory.
#pragma once

#include "attend/call.h"
#include "common/product.h"
#include "common/simd.h"
#include "common/softmax.h"
#include "common/sums.h"
#include "common/tile.h"

namespace sparing::SPARING_ISA {

inline constexpr int64_t kFewKeys = 512;  // most keys
inline constexpr int64_t kScores = 8192;  // scores of a block of queries

template <class T>
struct FewKeys {
  int64_t count, columns, deep, wide;  // valid keys, and the widths of padded rows of keys, of queries and of values
  int64_t rows;                        // queries of a block
  T* key_panels;                       // [depth][columns] transposed
  T* bias;                             // [columns], -inf beyond the keys
  T* scores;                           // [rows][columns]
  T* sums;                             // [rows][the larger of wide and deep], then their rests
  T* scaled;                           // [rows][depth] queries, scaled
  T* slopes;                           // [rows][columns]
  T* value_turned;                     // [width][columns]
  T* key_rows;                         // [count][deep]
  T* query_rows;                       // [rows][deep] in panels
  T* grad_rows;                        // [rows][wide] in panels
  T* key_grads;                        // [count][deep], then their rests
  T* value_grads;                      // [count][wide], then their rests

  // Sets the sizes for at most call.keys keys, points all parts into `memory`, unless it is null, and returns how many
  // entries they take.
  int64_t lay_out(const Attend<T>& call, T* memory) {
    columns = padded<T>(call.keys), deep = padded<T>(call.depth), wide = padded<T>(call.width);
    rows = kScores / columns;
    rows = rows > kRows ? kRows : rows < 4 * kDeep ? 4 * kDeep : rows / kDeep * kDeep;
    int64_t used = 0;
    const auto take = [&](T** part, int64_t entries) {
      if (memory) *part = memory + used;
      used += entries;
    };
    take(&key_panels, call.depth * columns);
    take(&bias, columns);
    take(&scores, rows * columns);
    take(&sums, 2 * rows * (deep > wide ? deep : wide));
    take(&scaled, rows * call.depth);
    take(&slopes, rows * columns);
    take(&value_turned, call.width * columns);
    take(&key_rows, call.keys * deep);
    take(&query_rows, rows * deep);
    take(&grad_rows, rows * wide);
    take(&key_grads, 2 * call.keys * deep);
    take(&value_grads, 2 * call.keys * wide);
    return used;
  }

  // Packs the valid keys and values of a head into panels.
  void pack(const Attend<T>& call, int64_t item, int64_t head) {
    count = 0;
    for (int64_t j = 0; j < call.keys; ++j) count += call.sees(item, j);
    columns = padded<T>(count);
    for (int64_t c = 0; c < columns; ++c) bias[c] = c < count ? T(0) : kNever<T>;
    for (int64_t j = 0, c = 0; c < count; ++j) {
      if (!call.sees(item, j)) continue;
      const T *key = call.k.at(item, head, j), *value = call.v.at(item, head, j);
      if (call.bias) bias[c] = call.bias[item * call.keys + j];
      pack_column<T>(key, T(1), c, call.depth, key_panels);
      pack_column<T>(value, T(1), c, call.width, value_turned);
      pack_row<T>(key, call.depth, c, count, key_rows);
      ++c;
    }
    for (int64_t c = count; c < columns; ++c) {
      pack_column<T>(nullptr, T(0), c, call.depth, key_panels);
      pack_column<T>(nullptr, T(0), c, call.width, value_turned);
    }
  }
};

template <class T>
void attend_few_backward(const Attend<T>& call, int64_t begin, int64_t end, T* scratch) {
  FewKeys<T> few{};
  few.lay_out(call, scratch);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t item = unit / call.heads, head = unit % call.heads;
    few.pack(call, item, head);
    clear(few.key_grads, 2 * few.count * few.deep);
    clear(few.value_grads, 2 * few.count * few.wide);
    for (int64_t first = 0; first < call.queries; first += few.rows) {
      const int64_t rows = call.queries - first < few.rows ? call.queries - first : few.rows;
      const int64_t at = unit * call.queries + first;
      const T *queries = call.q.at(item, head, first), *grads = call.grad.at(item, head, first);
      // Scores are rounded as in the forward pass, which scales queries as well: weights are exp(score - largest).
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t k = 0; k < call.depth; ++k)
          few.scaled[r * call.depth + k] = call.scale * queries[r * call.q.token_step + k];
      product<T>({few.scaled, call.depth, 1}, rows, call.depth, in_panels(few.key_panels, call.depth), few.columns,
                 few.scores, few.columns);
      product<T>({grads, call.grad.token_step, 1}, rows, call.width, in_panels(few.value_turned, call.width),
                 few.columns, few.slopes, few.columns);
      for (int64_t r = 0; r < rows; ++r) {
        pack_row<T>(queries + r * call.q.token_step, call.depth, r, rows, few.query_rows);
        pack_row<T>(grads + r * call.grad.token_step, call.width, r, rows, few.grad_rows);
        T *scores = few.scores + r * few.columns, *slopes = few.slopes + r * few.columns;
        const T inverse = inverse_of(call.norm.total[at + r]), top = few.count ? call.norm.top[at + r] : T(0);
        // The weighted mean of the weights' gradients. Where one key has all the weight, its slope becomes exactly
        // zero.
        const Vec<T> mean = long_sum<Vec<T>>(few.columns, lanes<T>, [&](int64_t c) {
          const Vec<T> weight = exponential(load<T>(scores + c) + load<T>(few.bias + c) - top) * inverse;
          store<T>(scores + c, weight);
          return weight * load<T>(slopes + c);
        });
        const T delta = sum<T>(mean) - call.lse_grad[at + r];
        for (int64_t c = 0; c < few.columns; c += lanes<T>)
          store<T>(slopes + c, load<T>(scores + c) * (load<T>(slopes + c) - delta));
      }
      product<T>({few.scores, 1, few.columns}, few.count, rows, in_panels(few.grad_rows, rows), few.wide,
                 few.value_grads, few.wide, true, few.count * few.wide);
      product<T>({few.slopes, 1, few.columns}, few.count, rows, in_panels(few.query_rows, rows), few.deep,
                 few.key_grads, few.deep, true, few.count * few.deep);
      long_product<T>({few.slopes, few.columns, 1}, rows, few.count, in_panels(few.key_rows, few.count), few.deep,
                      few.sums, few.deep, few.rows * few.deep);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t k = 0; k < call.depth; ++k)
          call.grad_q[(at + r) * call.depth + k] = call.scale * few.sums[r * few.deep + k];
    }
    for (int64_t j = 0, c = 0; j < call.keys; ++j) {
      T* to_k = call.grad_k + (unit * call.keys + j) * call.depth;
      T* to_v = call.grad_v + (unit * call.keys + j) * call.width;
      const bool seen = call.sees(item, j);
      for (int64_t k = 0; k < call.depth; ++k) to_k[k] = seen ? call.scale * few.key_grads[c * few.deep + k] : T(0);
      for (int64_t e = 0; e < call.width; ++e) to_v[e] = seen ? few.value_grads[c * few.wide + e] : T(0);
      c += seen;
    }
  }
}

}  // namespace sparing::SPARING_ISA
