// Hash codes of yoso. Projections are computed in the type of the tokens; where one is so small that rounding could
// have changed its sign, it is computed again in double, so that codes are those of double precision.
#pragma once

#include "common/simd.h"
#include "common/tile.h"
#include "common/widen.h"
#include "yoso/call.h"
#include "yoso/unit_rows.h"

namespace sparing::SPARING_ISA {

namespace yoso {

inline constexpr int64_t kHashBlock = kRows;   // tokens of a task
inline constexpr double kTie = 1e-9;           // a projection this small counts as zero, as in hashing.py
inline constexpr double kNoDirection = 1e-12;  // a vector shorter than this has code 0

// Replaces x by its Hadamard transform.
template <class T, int R, int H = 1>
SPARING_INLINE void butterflies(Vec<T>* x) {
  if constexpr (H < R) {
    for (int i = 0; i < R; ++i)
      if (!(i & H)) {
        const Vec<T> a = x[i], b = x[i + H];
        x[i] = a + b, x[i + H] = a - b;
      }
    butterflies<T, R, 2 * H>(x);
  }
}

// log2(R) stages of a transform of `size` vectors, from take(index) to give(index, vector).
template <class T, int R, class Take, class Give>
SPARING_INLINE void stages(int64_t size, int64_t step, const Take& take, const Give& give) {
  for (int64_t base = 0; base < size; base += R * step)
    for (int64_t at = base; at < base + step; ++at) {
      Vec<T> x[R];
      for (int i = 0; i < R; ++i) x[i] = take(at + i * step);
      butterflies<T, R>(x);
      for (int i = 0; i < R; ++i) give(at + i * step, x[i]);
    }
}

// The Hadamard transform of `size` >= 32 vectors, from take(index) to give(index, vector). `work` [size] holds the
// intermediate stages.
template <class T, class Take, class Give>
SPARING_INLINE void transform(int64_t size, Vec<T>* work, const Take& take, const Give& give) {
  const auto from_work = [&](int64_t i) { return work[i]; };
  const auto to_work = [&](int64_t i, Vec<T> x) { work[i] = x; };
  stages<T, 8>(size, 1, take, to_work);
  int64_t step = 8;
  for (; step * 8 < size; step *= 8) stages<T, 8>(size, step, from_work, to_work);
  if (step * 8 == size)
    stages<T, 8>(size, step, from_work, give);
  else if (step * 4 == size)
    stages<T, 4>(size, step, from_work, give);
  else
    stages<T, 2>(size, step, from_work, give);
}

// Calls give(h, z) for the coordinates first + h, h < 32, of H D3 H D2 H D1 x; signs[3][size] holds the diagonals D1 to
// D3.
template <class T, int kSize, class Sign, class Give>
SPARING_INLINE void rotate(const Vec<T>* x, const Sign* signs, int64_t any_size, int64_t first, Vec<T>* work,
                           const Give& give) {
  static_assert(kHashesAtOnce == 32);
  const int64_t size = kSize ? kSize : any_size;
  const auto sign = [&](int turn, int64_t i) { return all(T(signs[turn * size + i])); };
  const auto to_work = [&](int64_t i, Vec<T> z) { work[i] = z; };
  transform<T>(size, work, [&](int64_t i) { return x[i] * sign(0, i); }, to_work);
  transform<T>(size, work, [&](int64_t i) { return work[i] * sign(1, i); }, to_work);
  // Only 32 coordinates are wanted: the stages with the widest steps come first, and each keeps one half.
  const int64_t half = size / 2;
  const T side = first & half ? T(-1) : T(1);
  for (int64_t i = 0; i < half; ++i) work[i] = work[i] * sign(2, i) + work[i + half] * (sign(2, i + half) * side);
  for (int64_t step = half / 2; step >= kHashesAtOnce; step /= 2)
    for (int64_t i = 0; i < step; ++i) work[i] = first & step ? work[i] - work[i + step] : work[i] + work[i + step];
  transform<T>(kHashesAtOnce, work, [&](int64_t i) { return work[i]; }, give);
}

// A bound on the error of rotate() in T for a vector of unit length. Each of the 3 log2(size) stages multiplies lengths
// by sqrt(2) and adds a relative error of half a unit in the last place; one percent covers second-order terms.
template <class T>
T rotation_margin(int64_t size) {
  double stages = 0;
  for (int64_t s = size; s > 1; s /= 2) stages += 3;
  constexpr double epsilon = sizeof(T) == 4 ? 0x1p-24 : 0x1p-53;
  return T(1.01 * stages * epsilon * double(size) * __builtin_sqrt(double(size)));
}

// Working memory for lanes<T> tokens, one in each lane.
template <class T>
struct HashLanes {
  Vec<T>*x, *work;                 // [size]
  IntVec<T>* codes;                // [32]
  Vec<double>*wide_x, *wide_work;  // [size]

  static int64_t entries(int64_t size) {
    return (2 * size + kHashesAtOnce) * lanes<T> + 2 * size * lanes<double> * int64_t(sizeof(double) / sizeof(T));
  }

  HashLanes(T* scratch, int64_t size) {
    x = reinterpret_cast<Vec<T>*>(scratch);
    work = x + size;
    codes = reinterpret_cast<IntVec<T>*>(work + size);
    wide_x = reinterpret_cast<Vec<double>*>(codes + kHashesAtOnce);
    wide_work = wide_x + size;
  }
};

// Sets bit `bit` of all codes, computed in double.
template <class T>
__attribute__((noinline)) void sure_bit(const HashLanes<T>& l, const T* signs, int64_t size, int64_t first, int bit) {
  for (int part = 0; part < lanes<T>; part += lanes<double>) {
    for (int64_t i = 0; i < size; ++i)
      for (int r = 0; r < lanes<double>; ++r) l.wide_x[i][r] = double(l.x[i][part + r]);
    rotate<double, 0>(l.wide_x, signs, size, first, l.wide_work, [&](int64_t h, Vec<double> z) {
      for (int r = 0; r < lanes<double>; ++r) {
        const Int<T> set = Int<T>(1) << bit;
        l.codes[h][part + r] = z[r] > kTie ? l.codes[h][part + r] | set : l.codes[h][part + r] & ~set;
      }
    });
  }
}

// Sets one bit of all codes; products smaller than `margin` are computed again in double.
template <class T, int kSize>
SPARING_INLINE void hash_bit(const HashLanes<T>& l, const T* signs, int64_t size, int64_t first, int bit,
                             Vec<T> margin) {
  const IntVec<T> set = all(Int<T>(Int<T>(1) << bit));
  if constexpr (sizeof(T) == 8) {
    rotate<T, kSize>(l.x, signs, size, first, l.work,
                     [&](int64_t h, Vec<T> z) { l.codes[h] |= IntVec<T>(z > T(kTie)) & set; });
  } else {
    Vec<T> nearest = all(T(1));
    rotate<T, kSize>(l.x, signs, size, first, l.work, [&](int64_t h, Vec<T> z) {
      l.codes[h] |= IntVec<T>(z > T(0)) & set;
      const Vec<T> apart = reinterpret_cast<Vec<T>>(reinterpret_cast<IntVec<T>>(z) & Int<T>(0x7fffffff));  // |z|
      nearest = apart < nearest ? apart : nearest;
    });
    if (any<T>(nearest <= margin)) sure_bit<T>(l, signs, size, first, bit);
  }
}

template <class T>
void hadamard_codes(const HashCodes<T>& call, int64_t item, int64_t head, int64_t begin, int64_t end, T* scratch) {
  const HashLanes<T> l(scratch, call.size);
  T* room = scratch + HashLanes<T>::entries(call.size);
  const int64_t unit = item * call.heads + head, tokens = call.coded.tokens;
  const T* signs = call.signs + (head - call.first_head) * call.most_bits * 3 * call.size;
  const T sure = rotation_margin<T>(call.size);
  for (int64_t i = 0; i < call.size; ++i) l.x[i] = Vec<T>{};
  for (int64_t at = begin; at < end; at += lanes<T>) {
    const int64_t count = end - at < lanes<T> ? end - at : lanes<T>;
    Vec<T> margin = all(T(-1));  // vectors without a direction and empty lanes have no uncertain signs
    for (int r = 0; r < lanes<T>; ++r) {
      if (r >= count) {
        for (int64_t k = 0; k < call.depth; ++k) l.x[k][r] = T(0);
        continue;
      }
      const T* row = row_of(call.x, item, head, call.coded.places[item * tokens + at + r], call.depth, room);
      const Shrink unit_of = to_unit(row, call.depth, kNoDirection);
      for (int64_t k = 0; k < call.depth; ++k) l.x[k][r] = T(unit_of(double(row[k])));
      if (unit_of.second > 0) margin[r] = sure;
    }
    for (int64_t h = 0; h < kHashesAtOnce; ++h) l.codes[h] = IntVec<T>{};
    for (int bit = 0; bit < call.bits[item]; ++bit) {
      const T* turn = signs + bit * 3 * call.size;
      if (call.size == 64)
        hash_bit<T, 64>(l, turn, 64, call.first, bit, margin);
      else
        hash_bit<T, 0>(l, turn, call.size, call.first, bit, margin);
    }
    uint16_t* to = call.coded.codes + unit * call.hashes * tokens + at;
    for (int64_t h = 0; h < call.hashes; ++h)
      for (int64_t r = 0; r < count; ++r) to[h * tokens + r] = uint16_t(l.codes[h][r]);
  }
}

template <class T>
void gaussian_codes(const HashCodes<T>& call, int64_t item, int64_t head, int64_t begin, int64_t end, T* scratch) {
  T *columns = scratch, *products = columns + call.depth * kRows, *room = products + kHashesAtOnce * kRows;
  const int64_t unit = item * call.heads + head, tokens = call.coded.tokens, count = end - begin;
  bool directed[kRows];
  for (int64_t r = 0; r < kRows; ++r) {
    if (r >= count) {
      for (int64_t k = 0; k < call.depth; ++k) columns[k * kRows + r] = T(0);
      continue;
    }
    const T* row = row_of(call.x, item, head, call.coded.places[item * tokens + begin + r], call.depth, room);
    const Shrink unit_of = to_unit(row, call.depth, kNoDirection);
    for (int64_t k = 0; k < call.depth; ++k) columns[k * kRows + r] = T(unit_of(double(row[k])));
    directed[r] = unit_of.second > 0;
  }
  uint16_t* to = call.coded.codes + unit * call.hashes * tokens + begin;
  for (int64_t h = 0; h < call.hashes; ++h)
    for (int64_t r = 0; r < count; ++r) to[h * tokens + r] = 0;
  for (int bit = 0; bit < call.bits[item]; ++bit) {
    const int64_t first = ((head - call.first_head) * call.most_bits + bit) * call.hashes;
    const T* planes[kHashesAtOnce];
    for (int64_t h = 0; h < call.hashes; ++h) planes[h] = call.rounded + (first + h) * call.depth;
    dots<T>(planes, call.hashes, call.depth, columns, products);
    for (int64_t h = 0; h < call.hashes; ++h) {
      const T margin = call.margins[first + h];
      for (int64_t r = 0; r < count; ++r) {
        double z = double(products[h * kRows + r]);
        if (sizeof(T) == 4 && z <= margin && z >= -margin && directed[r]) {
          const double* plane = call.normals + (first + h) * call.depth;
          z = 0;
          for (int64_t k = 0; k < call.depth; ++k) z += double(columns[k * kRows + r]) * plane[k];
        }
        to[h * tokens + r] |= uint16_t(z > kTie) << bit;
      }
    }
  }
}

template <class T>
int64_t hash_blocks(const HashCodes<T>& call) {
  return (call.coded.tokens + kHashBlock - 1) / kHashBlock;
}

template <class T>
int64_t hash_tasks(const HashCodes<T>& call) {
  return call.items * call.some_heads * hash_blocks(call);
}

template <class T>
int64_t hash_scratch(const HashCodes<T>& call) {
  const int64_t own = call.signs ? HashLanes<T>::entries(call.size) : (call.depth + kHashesAtOnce) * kRows;
  return own + call.x.room(1, call.depth);
}

template <class T>
void hash_codes(const HashCodes<T>& call, int64_t begin, int64_t end, T* scratch) {
  const int64_t blocks = hash_blocks(call);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t unit = task / blocks, item = unit / call.some_heads, head = call.first_head + unit % call.some_heads;
    const int64_t first = task % blocks * kHashBlock, last = call.coded.counts[item];
    if (first >= last) continue;
    const int64_t stop = first + kHashBlock < last ? first + kHashBlock : last;
    if (call.signs)
      hadamard_codes(call, item, head, first, stop, scratch);
    else
      gaussian_codes(call, item, head, first, stop, scratch);
  }
}

}  // namespace yoso

}  // namespace sparing::SPARING_ISA
