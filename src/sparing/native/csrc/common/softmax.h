// Softmax attention of a block of queries over a list of keys, tile by tile.
#pragma once

#include "common/normaliser.h"
#include "common/simd.h"
#include "common/sums.h"
#include "common/tile.h"

namespace sparing::SPARING_ISA {

// The working memory of one block; sized by softmax_scratch().
template <class T>
struct Block {
  int64_t depth, width;  // entries of a query and of a value
  T* queries;            // [depth][kRows], scaled
  T* sums;               // [width][kRows], then their rests
  T* scores;             // [kKeys][kRows]
  T* top;                // [kRows] largest score so far
  T* total;              // [kRows] sum of exp(score - top), then their rests; backward: 1 / total
  T* delta;              // [kRows] subtracted from the slopes, backward only
  T* slopes;             // [kKeys][kRows], backward only
  T* grads;              // [width][kRows] gradient of the output, backward only
  T* query_grads;        // [depth][kRows], then their rests, backward only
  T* query_rows;         // [kRows][padded depth], backward only
  T* grad_rows;          // [kRows][padded width], backward only
  int64_t used = kRows;  // lanes that hold queries, in whole strips; the others are not touched

  void use(int64_t queries) { used = padded<T>(queries); }

  // Multiplies all sums of the vector of lanes at r by `factor`.
  SPARING_INLINE void shrink(int r, Vec<T> factor) {
    for (int i = 0; i < 2; ++i) store<T>(total + i * kRows + r, load<T>(total + i * kRows + r) * factor);
    for (int64_t e = 0; e < 2 * width; ++e) store<T>(sums + e * kRows + r, load<T>(sums + e * kRows + r) * factor);
  }
};

// Sets the parts of a block to places in `memory` (64-byte aligned) and returns how many entries they take.
template <class T>
int64_t lay_out(Block<T>* block, T* memory, bool backward) {
  int64_t used = 0;
  const auto take = [&](T** part, int64_t count) {
    if (memory) *part = memory + used;
    used += count;
  };
  take(&block->queries, block->depth * kRows);
  take(&block->scores, kKeys * kRows);
  take(&block->top, kRows);
  take(&block->total, 2 * kRows);
  if (!backward) {
    take(&block->sums, 2 * block->width * kRows);
  } else {
    take(&block->delta, kRows);
    take(&block->slopes, kKeys * kRows);
    take(&block->grads, block->width * kRows);
    take(&block->query_grads, 2 * block->depth * kRows);
    take(&block->query_rows, padded<T>(block->depth) * kRows);
    take(&block->grad_rows, padded<T>(block->width) * kRows);
  }
  return used;
}

template <class T>
int64_t softmax_scratch(int64_t depth, int64_t width, bool backward) {
  Block<T> block{};
  block.depth = depth;
  block.width = width;
  return lay_out<T>(&block, nullptr, backward);
}

template <class T>
inline constexpr T kNever = -T(__builtin_inf());

// The smallest number whose reciprocal is finite.
template <class T>
inline constexpr T kNormal = sizeof(T) == 4 ? T(__FLT_MIN__) : T(__DBL_MIN__);

template <class T>
void start(Block<T>& block) {
  clear(block.sums, 2 * block.width * kRows);
  clear(block.total, 2 * kRows);
  for (int r = 0; r < kRows; ++r) block.top[r] = kNever<T>;
}

// Masks say which queries of a block see which keys of a tile. mask(key, first lane) is true in the lanes that see the
// key; `masks` is false if all do, and it is then not called. Optional: trim() narrows a range of keys to those that
// some lane of a strip sees, and open() tells whether all lanes see a key.
struct SeesAll {
  static constexpr bool masks = false;
};

struct Range {
  int64_t begin, end;
};

template <class T, class Mask>
SPARING_INLINE Range seen_by_strip(const Mask& mask, int64_t count, int first_lane) {
  if constexpr (requires { mask.trim(Range{}, first_lane); })
    return mask.trim(Range{0, count}, first_lane);
  else
    return {0, count};
}

// Computes the scores of the keys in `range` for one strip of lanes, -inf where a lane does not see the key.
template <class T, class Mask>
SPARING_INLINE void masked_scores(Block<T>& block, const T* const* keys, Range range, int strip, const Mask& mask) {
  dots_strip<T>(keys + range.begin, range.end - range.begin, block.depth, block.queries + strip,
                block.scores + range.begin * kRows + strip);
  if constexpr (Mask::masks)
    for (int64_t c = range.begin; c < range.end; ++c) {
      if constexpr (requires { mask.open(c); })
        if (mask.open(c)) continue;
      for (int r = strip; r < strip + kStrip<T>; r += lanes<T>) {
        T* at = block.scores + c * kRows + r;
        store<T>(at, mask(c, r) ? load<T>(at) : all(kNever<T>));
      }
    }
}

// Adds the values of `count` <= kKeys keys, each with weight exp(score), to the sums of the block.
template <class T, class Mask>
void absorb(Block<T>& block, const T* const* keys, const T* const* values, int64_t count, const Mask& mask) {
  for (int strip = 0; strip < block.used; strip += kStrip<T>) {
    const Range range = seen_by_strip<T>(mask, count, strip);
    if (range.begin >= range.end) continue;
    masked_scores(block, keys, range, strip, mask);
    for (int r = strip; r < strip + kStrip<T>; r += lanes<T>) {
      const Vec<T> before = load<T>(block.top + r);
      Vec<T> top = before;
      for (int64_t c = range.begin; c < range.end; ++c) top = larger<T>(top, load<T>(block.scores + c * kRows + r));
      const Vec<T> shift = top == kNever<T> ? Vec<T>{} : top;
      Vec<T> total{};
      for (int64_t c = range.begin; c < range.end; ++c) {
        T* at = block.scores + c * kRows + r;
        const Vec<T> weight = exponential(load<T>(at) - shift);
        store<T>(at, weight);
        total += weight;
      }
      store<T>(block.top + r, top);
      if (any<T>(top != before)) block.shrink(r, exponential(before - shift));
      add_to<T>(block.total + r, kRows, total);
    }
    weighted_sums_strip<T>(values + range.begin, range.end - range.begin, block.width,
                           block.scores + range.begin * kRows + strip, block.sums + strip, block.width * kRows);
  }
}

// Returns 1 / total, or 0 for a query that sees nothing.
template <class T>
SPARING_INLINE T inverse_of(T total) {
  return total == T(0) ? T(0) : T(1) / total;
}

// Returns the log-sum-exp of a query's scores, -inf if it sees nothing.
template <class T>
SPARING_INLINE T log_sum_exp(T top, T total) {
  return total == T(0) ? kNever<T> : T(__builtin_log(double(total)) + double(top));
}

// Writes output, log-sum-exp and normaliser of the first `count` lanes; zeros and -inf for a lane that saw nothing.
template <class T>
void finish(Block<T>& block, int64_t count, T* const* out, T* lse, const Normaliser<T>& norm) {
  for (int64_t r = 0; r < count; ++r) {
    const T top = block.top[r], total = block.total[r], inverse = inverse_of(total);
    for (int64_t e = 0; e < block.width; ++e) out[r][e] = block.sums[e * kRows + r] * inverse;
    lse[r] = log_sum_exp(top, total), norm.top[r] = top, norm.total[r] = total;
  }
}

// Prepares a backward pass; all weights are zero in lanes from `count` on.
template <class T>
void start_backward(Block<T>& block, const T* const* queries, const T* const* grads, const T* const* out,
                    const Normaliser<T>& norm, const T* lse_grads, int64_t count) {
  const auto rows = [&](const T* const* from, int64_t width, T* to) {
    const int64_t stride = padded<T>(width);
    for (int64_t i = 0; i < kRows * stride; ++i) to[i] = T(0);
    for (int64_t r = 0; r < count; ++r)
      for (int64_t e = 0; e < width; ++e) to[r * stride + e] = from[r][e];
  };
  rows(queries, block.depth, block.query_rows);
  rows(grads, block.width, block.grad_rows);
  transpose<T>(grads, count, block.width, T(1), block.grads);
  clear(block.query_grads, 2 * block.depth * kRows);
  // delta is the diagonal of products that are computed like the slopes: where one key has all the weight, output and
  // value are the same numbers, and the slope is then exactly zero.
  static_assert(kStrip<T> <= kKeys && kRows % kStrip<T> == 0);
  for (int64_t strip = 0; strip < count; strip += kStrip<T>) {
    const int64_t some = count - strip < kStrip<T> ? count - strip : kStrip<T>;
    dots_strip<T>(out + strip, some, block.width, block.grads + strip, block.slopes);
    for (int64_t r = strip; r < strip + some; ++r)
      block.delta[r] = block.slopes[(r - strip) * kRows + (r - strip)] - lse_grads[r];
  }
  for (int64_t r = 0; r < kRows; ++r) {
    const bool sees = r < count && norm.total[r] != T(0);
    block.top[r] = sees ? norm.top[r] : -kNever<T>;
    block.total[r] = sees ? inverse_of(norm.total[r]) : T(0);
    if (!sees) block.delta[r] = T(0);
  }
}

// Adds the gradients through `count` keys: d value = weight * grad, d score = weight * (grad . value - delta), and from
// that the gradients of query and key (without the scale). The rows of the gradients are padded, and the rest of
// an entry of key_grads or value_grads is `rest` entries after it.
template <class T, class Mask>
void absorb_backward(Block<T>& block, const T* const* keys, const T* const* values, int64_t count, const Mask& mask,
                     T* const* key_grads, T* const* value_grads, int64_t rest) {
  for (int strip = 0; strip < block.used; strip += kStrip<T>) {
    masked_scores(block, keys, {0, count}, strip, mask);
    dots_strip<T>(values, count, block.width, block.grads + strip, block.slopes + strip);
    for (int r = strip; r < strip + kStrip<T>; r += lanes<T>) {
      const Vec<T> top = load<T>(block.top + r), inverse = load<T>(block.total + r), delta = load<T>(block.delta + r);
      for (int64_t c = 0; c < count; ++c) {
        T* score = block.scores + c * kRows + r;
        T* slope = block.slopes + c * kRows + r;
        const Vec<T> weight = exponential(load<T>(score) - top) * inverse;
        store<T>(score, weight);
        store<T>(slope, weight * (load<T>(slope) - delta));
      }
    }
  }
  spread<T>(block.scores, count, block.grad_rows, padded<T>(block.width), value_grads, block.used, rest);
  spread<T>(block.slopes, count, block.query_rows, padded<T>(block.depth), key_grads, block.used, rest);
  weighted_sums<T>(keys, count, block.depth, block.slopes, block.query_grads, block.used, block.depth * kRows);
}

}  // namespace sparing::SPARING_ISA
