// Buckets by random rotations (rotation_buckets in Python).
//
// The largest entry of |R x| is searched in 8-bit integers, which are multiplied four times as fast as float32. The
// error of a rounded product is bounded, and rows that could still be the largest are compared in float64, so that the
// bucket is the one that float64 finds.
#pragma once

#include "common/simd.h"
#include "common/tile.h"
#include "common/widen.h"
#include "lsh/call.h"
#include "lsh/rounding.h"

namespace sparing::SPARING_ISA {

SPARING_INLINE Vec<int32_t> size_of(Vec<int32_t> x) { return larger<int32_t>(x, -x); }

// out[i][lane] = rows[.][i] . columns[.][lane] for i < kDeep; raises `top` to the largest magnitudes of the first
// `count` rows
SPARING_INLINE void byte_tile(const int32_t* rows, int64_t count, int64_t words, const int32_t* columns,
                              Vec<int32_t>* top, int32_t* out) {
  constexpr int kLanes = lanes<int32_t>;
  for (int64_t first = 0; first < words; first += kSegment) {
    const int64_t last = first + kSegment < words ? first + kSegment : words;
    Vec<uint16_t> sums[kDeep][kWide];
    for (int i = 0; i < kDeep; ++i)
      for (int j = 0; j < kWide; ++j) sums[i][j] = reinterpret_cast<Vec<uint16_t>>(all(rows[i]));
    rows += kDeep;
    for (int64_t k = first; k < last; ++k, rows += kDeep) {
      Vec<int32_t> column[kWide];
      for (int j = 0; j < kWide; ++j) column[j] = load<int32_t>(columns + k * kHashed + j * kLanes);
      for (int i = 0; i < kDeep; ++i) {
        const Vec<int32_t> x = all(rows[i]);
        for (int j = 0; j < kWide; ++j) sums[i][j] += byte_products(column[j], x);
      }
    }
    Vec<int32_t> totals[kDeep][kWide];
    for (int i = 0; i < kDeep; ++i)
      for (int j = 0; j < kWide; ++j) totals[i][j] = halves_added(sums[i][j]);
    const auto at = [&](int i, int j) { return out + i * kHashed + j * kLanes; };
    if (first > 0)
      for (int i = 0; i < kDeep; ++i)
        for (int j = 0; j < kWide; ++j) totals[i][j] += load<int32_t>(at(i, j));
    for (int i = 0; i < kDeep; ++i)
      for (int j = 0; j < kWide; ++j) store<int32_t>(at(i, j), totals[i][j]);
    if (last < words) continue;
    if (count >= kDeep) {
      for (int i = 0; i < kDeep; ++i)
        for (int j = 0; j < kWide; ++j) top[j] = larger<int32_t>(top[j], size_of(totals[i][j]));
    } else {
      for (int i = 0; i < count; ++i)
        for (int j = 0; j < kWide; ++j) top[j] = larger<int32_t>(top[j], size_of(load<int32_t>(at(i, j))));
    }
  }
}

template <class T>
int64_t hash_words(const RotationHash<T>& call) {
  return (call.depth + 3) / 4;
}

template <class T>
int64_t hash_tiles(const RotationHash<T>& call) {  // tiles of kDeep rows; the last is padded
  return (call.rows + kDeep - 1) / kDeep;
}

template <class T>
int64_t rounded_row(const RotationHash<T>& call) {  // words of a row, and one more for each of its segments
  return hash_words(call) + (hash_words(call) + kSegment - 1) / kSegment;
}

template <class T>
int64_t rounded_size(const RotationHash<T>& call) {
  return hash_tiles(call) * kDeep * rounded_row(call);
}

template <class T>
SPARING_INLINE const double* rotation_row(const RotationHash<T>& call, int64_t head, int64_t round, int64_t row) {
  return call.rotations + ((head * call.rows + row) * call.rounds + round) * call.depth;
}

template <class T>
void round_rotations(const RotationHash<T>& call, int64_t begin, int64_t end) {
  for (int64_t task = begin; task < end; ++task) {
    const int64_t head = task / call.rounds, round = task % call.rounds;
    double largest = 0.0;
    for (int64_t i = 0; i < call.rows; ++i)
      for (int64_t k = 0; k < call.depth; ++k) {
        const double size = __builtin_fabs(rotation_row(call, head, round, i)[k]);
        largest = size > largest ? size : largest;
      }
    const double scale = largest > 0.0 ? kLargestInRow / largest : 0.0;
    int32_t* table = call.rounded + task * rounded_size(call);
    for (int64_t i = 0; i < rounded_size(call); ++i) table[i] = 0;
    RotationBounds squares{};
    for (int64_t i = 0; i < call.rows; ++i) {
      const double* row = rotation_row(call, head, round, i);
      round_row(row, call.depth, scale, squares, table + i / kDeep * kDeep * rounded_row(call) + i % kDeep);
      T* near = call.near + (task * call.rows + i) * call.depth;
      for (int64_t k = 0; k < call.depth; ++k) near[k] = T(scale * row[k]);
    }
    call.bounds[task] = {__builtin_sqrt(squares.norm), __builtin_sqrt(squares.error), __builtin_sqrt(squares.part)};
  }
}

template <class T>
double exact_product(const T* x, const double* row, int64_t depth) {
  double total = 0.0;
  for (int64_t k = 0; k < depth; ++k) total += double(x[k]) * row[k];
  return total;
}

template <class T>
SPARING_INLINE T near_product(const T* x, const T* row, int64_t depth) {
  constexpr int kAtOnce = 4;  // independent sums, to hide the latency of an addition
  Vec<T> sums[kAtOnce] = {};
  int64_t k = 0;
  for (; k + kAtOnce * lanes<T> <= depth; k += kAtOnce * lanes<T>)
    for (int i = 0; i < kAtOnce; ++i) sums[i] += load<T>(x + k + i * lanes<T>) * load<T>(row + k + i * lanes<T>);
  for (; k + lanes<T> <= depth; k += lanes<T>) sums[0] += load<T>(x + k) * load<T>(row + k);
  Vec<T> folded = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  for (int step = 1; step < lanes<T>; step *= 2)
    folded = interleave<T, 0>(folded, folded) + interleave<T, 1>(folded, folded);
  T total = folded[0];
  for (; k < depth; ++k) total += x[k] * row[k];
  return total;
}

template <class T>
int64_t hash_tasks(const RotationHash<T>& call) {
  return call.items * call.heads * ((call.tokens + kHashBlock - 1) / kHashBlock);
}

template <class T>
int64_t hash_scratch(const RotationHash<T>& call) {
  const int64_t words = hash_words(call), rows = hash_tiles(call) * kDeep;
  return words * kHashBlock + (1 + int64_t(sizeof(T) / sizeof(int32_t))) * rows * kHashed + 2 * rows +
         call.x.room(kHashBlock, call.depth);
}

// Rows whose product could be the largest in some lane, and the lanes in which it could.
struct CandidateRows {
  int32_t* row;
  uint32_t* of_lanes;
  int64_t count;
};

// Collects the rows whose products reach `least` in some lane.
SPARING_INLINE void find_candidates(const int32_t* products, int64_t rows, const int32_t* least, CandidateRows& found) {
  constexpr int kLanes = lanes<int32_t>;
  Vec<int32_t> limit[kWide];
  for (int j = 0; j < kWide; ++j) limit[j] = load<int32_t>(least + j * kLanes);
  int32_t* row = found.row;
  uint32_t* of_lanes = found.of_lanes;
  for (int64_t i = 0; i < rows; ++i) {
    uint32_t reach = 0;
    for (int j = 0; j < kWide; ++j)
      reach |= held<float>(size_of(load<int32_t>(products + i * kHashed + j * kLanes)) >= limit[j]) << (j * kLanes);
    *row = int32_t(i), *of_lanes = reach;
    row += reach != 0, of_lanes += reach != 0;  // no branch: it would often be mispredicted
  }
  found.count = row - found.row;
}

// Products of the candidates with the tokens they are for, in T; zero for other lanes.
template <class T>
SPARING_INLINE void near_products(const RotationHash<T>& call, int64_t table, const T* const* tokens,
                                  const CandidateRows& found, T* products) {
  const T* rows = call.near + table * call.rows * call.depth;
  for (int64_t c = 0; c < found.count; ++c, products += kHashed) {
    const T* row = rows + found.row[c] * call.depth;
    for (int r = 0; r < kHashed; r += lanes<T>) store<T>(products + r, Vec<T>{});
    for (uint32_t left = found.of_lanes[c]; left; left &= left - 1) {
      const int r = __builtin_ctz(left);
      products[r] = near_product(tokens[r], row, call.depth);
    }
  }
}

// Buckets of `count` tokens of one strip in one round, from the products of the candidates.
template <class T>
SPARING_INLINE void find_buckets(const RotationHash<T>& call, int64_t head, int64_t round, int64_t rows,
                                 const T* const* tokens, const RoundedToken* known, int64_t count,
                                 const CandidateRows& found, const T* products, int32_t* out) {
  T apart[kHashed];
  Int<T> best[kHashed];
  for (int r = 0; r < kHashed; r += lanes<T>) {
    Vec<T> top = all(T(-1)), next = top;
    IntVec<T> at{}, now{};
    for (int64_t c = 0; c < found.count; ++c, now += 1) {
      const Vec<T> product = load<T>(products + c * kHashed + r), size = larger<T>(product, -product);
      next = larger<T>(next, size < top ? size : top);
      at = size > top ? now : at;
      top = larger<T>(top, size);
    }
    store<T>(apart + r, top - next);
    store<Int<T>>(best + r, at);
  }
  // For a token of unit length: bounds the error of the difference of two float32 sums whose terms were rounded before.
  const double unsure = 3.0 * double(call.depth + 2) * 6e-8 * call.bounds[head * call.rounds + round].norm;
  for (int64_t r = 0; r < count; ++r) {
    out[r] = found.row[best[r]] + (products[best[r] * kHashed + r] > T(0) ? int32_t(rows) : 0);
    if (known[r].usual && (sizeof(T) == 8 || double(apart[r]) > unsure * known[r].length)) continue;
    double top = -1.0, along = 0.0;
    for (int64_t c = 0; c < found.count; ++c) {
      if (!(found.of_lanes[c] >> r & 1)) continue;
      const double product = exact_product(tokens[r], rotation_row(call, head, round, found.row[c]), call.depth);
      if (__builtin_fabs(product) > top) top = __builtin_fabs(product), along = product, out[r] = found.row[c];
    }
    if (along > 0.0) out[r] += int32_t(rows);
  }
}

// Finds, for each token, the smallest rounded product that the row of its largest exact product could have; `top` is
// the largest rounded product. |x.r - x'.r'| <= |x - x'| |r| + |x'| |r - r'|, and both products may be off by that.
// Tokens that cannot be rounded get 0, which every row reaches.
SPARING_INLINE void find_least(const Vec<int32_t>* top, const RotationBounds& bounds, const RoundedToken* known,
                               int64_t count, int32_t* least) {
  for (int j = 0; j < kWide; ++j) store<int32_t>(least + j * lanes<int32_t>, top[j]);
  for (int64_t r = 0; r < count; ++r) {
    const double moved = known[r].error * bounds.norm + known[r].norm * bounds.error + 1.0;
    least[r] = known[r].usual ? least[r] - int32_t(2.0 * moved) : 0;
  }
  for (int64_t r = count; r < kHashed; ++r) least[r] = 0x7fffffff;
}

template <class T>
void hash(const RotationHash<T>& call, int64_t begin, int64_t end, int32_t* scratch) {
  const int64_t words = hash_words(call), blocks = (call.tokens + kHashBlock - 1) / kHashBlock;
  const int64_t most = hash_tiles(call) * kDeep;
  int32_t *columns = scratch, *products = columns + words * kHashBlock;
  T* near = reinterpret_cast<T*>(products + most * kHashed);
  CandidateRows found{};
  found.row = reinterpret_cast<int32_t*>(near + most * kHashed);
  found.of_lanes = reinterpret_cast<uint32_t*>(found.row + most);
  T* room = reinterpret_cast<T*>(found.of_lanes + most);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t unit = task / blocks, item = unit / call.heads, head = unit % call.heads;
    const int64_t start = task % blocks * kHashBlock;
    const int64_t count = call.tokens - start < kHashBlock ? call.tokens - start : kHashBlock;
    const int64_t rows = call.used[item];
    double part = 1.0;
    for (int64_t round = 0; round < call.rounds; ++round) {
      const double one = call.bounds[head * call.rounds + round].part;
      part = one > part ? one : part;
    }
    const T* tokens[kHashBlock];
    RoundedToken known[kHashBlock];
    for (int64_t i = 0; rows && i < words * kHashBlock; ++i) columns[i] = 0;
    for (int64_t i = 0; rows && i < count; ++i) {
      tokens[i] = row_of(call.x, item, head, start + i, call.depth, room + call.x.room(i, call.depth));
      known[i] =
          round_token(tokens[i], call.depth, kLargestSum / part, columns + i / kHashed * words * kHashed + i % kHashed);
    }
    for (int64_t round = 0; round < call.rounds; ++round) {
      int32_t* out = call.out + (round * call.items * call.heads + unit) * call.tokens + start;
      const int32_t* rotated = call.rounded + (head * call.rounds + round) * rounded_size(call);
      for (int64_t first = 0; first < count; first += kHashed) {
        const int64_t some = count - first < kHashed ? count - first : kHashed;
        if (!rows) {  // all tokens are in one bucket
          for (int64_t r = 0; r < some; ++r) out[first + r] = 0;
          continue;
        }
        Vec<int32_t> top[kWide] = {};
        for (int64_t i = 0; i < rows; i += kDeep)
          byte_tile(rotated + i * rounded_row(call), rows - i, words, columns + first * words, top,
                    products + i * kHashed);
        int32_t least[kHashed];
        find_least(top, call.bounds[head * call.rounds + round], known + first, some, least);
        find_candidates(products, rows, least, found);
        near_products(call, head * call.rounds + round, tokens + first, found, near);
        find_buckets(call, head, round, rows, tokens + first, known + first, some, found, near, out + first);
      }
    }
  }
}

}  // namespace sparing::SPARING_ISA
