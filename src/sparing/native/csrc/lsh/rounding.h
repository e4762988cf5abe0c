// Rotations and tokens in 8-bit integers, for the hash.
//
// A segment of up to 64 entries has two parts, and each word holds two entries of each. Entries of rows are signed.
// Those of tokens are stored with kOffset added, because the multiplication instruction takes one factor unsigned; the
// sums of a row start at the value that cancels the offset. A part is summed in 16 bits. Intermediate sums may
// overflow, but the final sum does not, because the norms of both factors are bounded.
#pragma once

#include "common/isa.h"
#include "common/simd.h"
#include "common/tile.h"
#include "lsh/call.h"

namespace sparing::SPARING_ISA {

inline constexpr int kHashed = kWide * lanes<float>;  // tokens that are hashed together
inline constexpr int kHashBlock = 8 * kHashed;        // tokens of a task

inline constexpr int kSegment = 16;  // words
inline constexpr int kOffset = 64;
inline constexpr double kLargestInRow = 127.0, kLargestInToken = 63.0, kLargestSum = 32767.0;

// Returns the products of four 8-bit numbers in each lane, added within each half of the lane. The numbers of `a` must
// be from 0 to 127.
SPARING_INLINE Vec<uint16_t> byte_products(Vec<int32_t> a, Vec<int32_t> b) {
#if defined(SPARING_AVX512)
  return reinterpret_cast<Vec<uint16_t>>(
      _mm512_maddubs_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(SPARING_AVX2)
  return reinterpret_cast<Vec<uint16_t>>(
      _mm256_maddubs_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  const Vec<int16_t> x = reinterpret_cast<Vec<int16_t>>(a), y = reinterpret_cast<Vec<int16_t>>(b);
  return reinterpret_cast<Vec<uint16_t>>((x & 255) * ((y << 8) >> 8) + (x >> 8) * (y >> 8));
#endif
}

// Returns the sum of the two halves of each lane.
SPARING_INLINE Vec<int32_t> halves_added(Vec<uint16_t> halves) {
#if defined(SPARING_AVX512)
  return reinterpret_cast<Vec<int32_t>>(_mm512_madd_epi16(reinterpret_cast<__m512i>(halves), _mm512_set1_epi16(1)));
#elif defined(SPARING_AVX2)
  return reinterpret_cast<Vec<int32_t>>(_mm256_madd_epi16(reinterpret_cast<__m256i>(halves), _mm256_set1_epi16(1)));
#else
  const Vec<int32_t> x = reinterpret_cast<Vec<int32_t>>(halves);
  return ((x << 16) >> 16) + (x >> 16);
#endif
}

// The segment that starts at a word: part p holds the entries from first[p] to first[p + 1].
struct HashSegment {
  int64_t words, first[3];

  SPARING_INLINE HashSegment(int64_t word, int64_t depth) {
    const int64_t begin = 4 * word, entries = depth - begin < 4 * kSegment ? depth - begin : 4 * kSegment;
    words = (entries + 3) / 4;
    first[0] = begin, first[1] = begin + (2 * words < entries ? 2 * words : entries), first[2] = begin + entries;
  }
};

// Writes a row, scaled and rounded, to every kDeep-th word from `to` on, which must be zero. Each segment follows
// the word that its sums start from. Raises the bounds, which are squares here, where this row exceeds them.
SPARING_INLINE void round_row(const double* row, int64_t depth, double scale, RotationBounds& bounds, int32_t* to) {
  double square = 0.0, error = 0.0;
  for (int64_t word = 0; 4 * word < depth; word += kSegment, to += (1 + kSegment) * kDeep) {
    const HashSegment segment(word, depth);
    for (int p = 0; p < 2; ++p) {
      double part = 0.0;
      int32_t sum = 0;
      for (int64_t k = segment.first[p]; k < segment.first[p + 1]; ++k) {
        const double exact = row[k] * scale;
        const int32_t near = int32_t(exact + (exact < 0.0 ? -0.5 : 0.5));
        const int64_t at = k - segment.first[p];
        square += exact * exact, error += (exact - near) * (exact - near), part += double(near) * near, sum += near;
        to[(1 + at / 2) * kDeep] |= int32_t((uint32_t(near) & 255) << (16 * p + 8 * (at % 2)));
      }
      to[0] |= int32_t((uint32_t(-kOffset * sum) & 0xffff) << (16 * p));
      bounds.part = part > bounds.part ? part : bounds.part;
    }
  }
  bounds.norm = square > bounds.norm ? square : bounds.norm;
  bounds.error = error > bounds.error ? error : bounds.error;
}

// What is known about a rounded token; the norms are upper bounds.
struct RoundedToken {
  double length;       // norm of the token
  double norm, error;  // norms of the rounded token and of its rounding error
  bool usual;          // neither too small nor too large to be rounded
};

// Returns the factor by which token x is multiplied before it is rounded. Sets the fields of `known` that do not depend
// on the rounding.
template <class T>
SPARING_INLINE T token_scale(const T* x, int64_t depth, double part, RoundedToken& known) {
  Vec<T> tops{};
  T square = T(0), longest = T(0), top = T(0);
  for (int64_t word = 0; 4 * word < depth; word += kSegment) {
    const HashSegment segment(word, depth);
    for (int p = 0; p < 2; ++p) {
      Vec<T> squares{};
      int64_t k = segment.first[p];
      for (; k + lanes<T> <= segment.first[p + 1]; k += lanes<T>) {
        const Vec<T> some = load<T>(x + k);
        squares += some * some;
        tops = larger<T>(tops, larger<T>(some, -some));
      }
      T of_part = sum<T>(squares);
      for (; k < segment.first[p + 1]; ++k) {
        of_part += x[k] * x[k];
        top = x[k] > top ? x[k] : -x[k] > top ? -x[k] : top;
      }
      square += of_part;
      longest = of_part > longest ? of_part : longest;
    }
  }
  top = largest<T>(tops) > top ? largest<T>(tops) : top;
  known.usual = square > T(1e-30) && square < T(1e30);
  if (!known.usual) return T(0);
  // Rounding changes each entry of a part by at most 0.5.
  const double by_part = (0.999 * part - 0.5 * __builtin_sqrt(2.0 * kSegment)) / __builtin_sqrt(double(longest));
  const double by_entry = kLargestInToken / double(top), scale = by_part < by_entry ? by_part : by_entry;
  known.length = 1.001 * __builtin_sqrt(double(square));
  known.norm = scale * known.length;
  return T(scale);
}

// Writes token x, scaled and rounded, to columns[.][lane]. The norm of a part becomes at most `part`.
template <class T>
SPARING_INLINE RoundedToken round_token(const T* x, int64_t depth, double part, int32_t* columns) {
  constexpr T kNearest = (sizeof(T) == 4 ? T(12582912.0) : T(6755399441055744.0)) + T(kOffset);  // see exponential()
  RoundedToken known{};
  const T scale = token_scale(x, depth, part, known);
  if (!known.usual) return known;
  Vec<T> errors{};
  T error = T(0);
  for (int64_t word = 0; 4 * word < depth; word += kSegment) {
    const HashSegment segment(word, depth);
    Int<T> whole[4 * kSegment];
    uint8_t bytes[4 * kSegment];
    int64_t k = 4 * word;
    for (; k + lanes<T> <= segment.first[2]; k += lanes<T>) {
      const Vec<T> exact = load<T>(x + k) * scale, shifted = exact + kNearest, off = exact - (shifted - kNearest);
      errors += off * off;
      store<Int<T>>(whole + k - 4 * word, reinterpret_cast<IntVec<T>>(shifted));
    }
    for (; k < segment.first[2]; ++k) {
      const T exact = x[k] * scale;
      const Int<T> near = Int<T>(exact + T(kOffset) + T(0.5));
      error += (exact + T(kOffset) - T(near)) * (exact + T(kOffset) - T(near));
      whole[k - 4 * word] = near;
    }
    for (k -= 4 * word; k < 4 * segment.words; ++k) whole[k] = 0;
    for (k = 0; k < 4 * segment.words; ++k) bytes[k] = uint8_t(whole[k]);
    for (int64_t w = 0; w < segment.words; ++w) {
      const uint8_t *low = bytes + 2 * w, *high = low + 2 * segment.words;
      columns[(word + w) * kHashed] = int32_t(low[0] | low[1] << 8 | high[0] << 16 | uint32_t(high[1]) << 24);
    }
  }
  known.error = 1.001 * __builtin_sqrt(double(sum<T>(errors) + error)) + 0.02;
  known.norm += known.error;
  return known;
}

}  // namespace sparing::SPARING_ISA
