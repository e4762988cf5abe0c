// Logits of keys from their copy in 4 bits. The query is rounded to 8 bits, once for each block of keys, so that
// products are those of small integers. Queries that share the keys are taken together: codes are unpacked once.
#pragma once

#include "common/gathered.h"
#include "common/simd.h"
#include "multipole/call.h"

namespace sparing::SPARING_ISA {

inline constexpr int64_t kMostChunks = 8;  // chunks that are unpacked at once; sums of 8 * 2 * 15 * 127 fit 16 bits

// The products of the codes of one block with the queries of a tile.
struct CodeProducts {
  const uint8_t* codes;    // [groups][chunks][16 keys][4], low half of a byte first
  int64_t groups, chunks;  // of 16 keys, and of 8 channels
  const int8_t* whole;     // [rows][chunks][8], those of the low halves first
  int64_t rows;
  int32_t* totals;  // [rows][groups][16]: sum over the channels of code * whole
  bool vnni;
};

#if defined(SPARING_AVX512)
// _mm512_dpbusd_epi32 adds products of 4 pairs of bytes in each lane.
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma"))) inline void code_products_vnni(
    const CodeProducts& call) {
  const __m512i half = _mm512_set1_epi8(15);
  const int64_t wide = 8 * call.chunks, stride = call.groups * kMultipoleGroup;
  for (int64_t g = 0; g < call.groups; ++g)
    for (int64_t first = 0; first < call.chunks; first += kMostChunks) {
      const uint8_t* codes = call.codes + 64 * (g * call.chunks + first);
      const int64_t count = call.chunks - first < kMostChunks ? call.chunks - first : kMostChunks;
      __m512i low[kMostChunks], high[kMostChunks];
#pragma GCC unroll 8
      for (int64_t c = 0; c < kMostChunks; ++c) {
        const __m512i x = c < count ? _mm512_loadu_si512(codes + 64 * c) : _mm512_setzero_si512();
        low[c] = _mm512_and_si512(x, half), high[c] = _mm512_and_si512(_mm512_srli_epi16(x, 4), half);
      }
      const auto products = [&](int64_t row, int64_t chunks) __attribute__((always_inline)) {
        const int8_t* whole = call.whole + row * wide + 8 * first;
        int32_t* totals = call.totals + row * stride + kMultipoleGroup * g;
        __m512i a = first ? _mm512_loadu_si512(totals) : _mm512_setzero_si512(), b = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int64_t c = 0; c < chunks; ++c) {
          int32_t even, odd;
          __builtin_memcpy(&even, whole + 8 * c, 4);
          __builtin_memcpy(&odd, whole + 8 * c + 4, 4);
          a = _mm512_dpbusd_epi32(a, low[c], _mm512_set1_epi32(even));
          b = _mm512_dpbusd_epi32(b, high[c], _mm512_set1_epi32(odd));
        }
        _mm512_storeu_si512(totals, _mm512_add_epi32(a, b));
      };
      if (count == kMostChunks)
        for (int64_t row = 0; row < call.rows; ++row) products(row, kMostChunks);
      else
        for (int64_t row = 0; row < call.rows; ++row) products(row, count);
    }
}
#endif

#if defined(SPARING_AVX512) || defined(SPARING_AVX2)
// A vector of bytes, and its products in 16 bits: sums of two pairs of bytes.
#if defined(SPARING_AVX512)
using Bytes = __m512i;
SPARING_INLINE Bytes load_bytes(const void* p) { return _mm512_loadu_si512(p); }
SPARING_INLINE void store_bytes(void* p, Bytes x) { _mm512_storeu_si512(p, x); }
SPARING_INLINE Bytes zero_bytes() { return _mm512_setzero_si512(); }
SPARING_INLINE Bytes fours(int32_t x) { return _mm512_set1_epi32(x); }
SPARING_INLINE Bytes masked(Bytes x, int by, int8_t mask) {
  return _mm512_and_si512(_mm512_srli_epi16(x, by), _mm512_set1_epi8(mask));
}
SPARING_INLINE Bytes add_products(Bytes total, Bytes codes, Bytes x) {
  return _mm512_add_epi16(total, _mm512_maddubs_epi16(codes, x));
}
SPARING_INLINE Bytes add_pairs(Bytes total, Bytes x) {
  return _mm512_add_epi32(total, _mm512_madd_epi16(x, _mm512_set1_epi16(1)));
}
#else
using Bytes = __m256i;
SPARING_INLINE Bytes load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
SPARING_INLINE void store_bytes(void* p, Bytes x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
SPARING_INLINE Bytes zero_bytes() { return _mm256_setzero_si256(); }
SPARING_INLINE Bytes fours(int32_t x) { return _mm256_set1_epi32(x); }
SPARING_INLINE Bytes masked(Bytes x, int by, int8_t mask) {
  return _mm256_and_si256(_mm256_srli_epi16(x, by), _mm256_set1_epi8(mask));
}
SPARING_INLINE Bytes add_products(Bytes total, Bytes codes, Bytes x) {
  return _mm256_add_epi16(total, _mm256_maddubs_epi16(codes, x));
}
SPARING_INLINE Bytes add_pairs(Bytes total, Bytes x) {
  return _mm256_add_epi32(total, _mm256_madd_epi16(x, _mm256_set1_epi16(1)));
}
#endif

SPARING_INLINE int32_t four_bytes(const void* p) {
  int32_t x;
  __builtin_memcpy(&x, p, 4);
  return x;
}

inline void code_products_by_pairs(const CodeProducts& call) {
  constexpr int kParts = 64 / SPARING_BYTES;  // vectors that hold 4 bytes of each of 16 keys
  const int64_t wide = 8 * call.chunks, stride = call.groups * kMultipoleGroup;
  alignas(64) uint8_t low[kMostChunks][64], high[kMostChunks][64];
  for (int64_t g = 0; g < call.groups; ++g)
    for (int64_t first = 0; first < call.chunks; first += kMostChunks) {
      const uint8_t* codes = call.codes + 64 * (g * call.chunks + first);
      const int64_t count = call.chunks - first < kMostChunks ? call.chunks - first : kMostChunks;
      for (int64_t c = 0; c < count; ++c)
        for (int i = 0; i < 64; i += SPARING_BYTES) {
          const Bytes x = load_bytes(codes + 64 * c + i);
          store_bytes(low[c] + i, masked(x, 0, 15)), store_bytes(high[c] + i, masked(x, 4, 15));
        }
      for (int64_t row = 0; row < call.rows; ++row) {
        const int8_t* whole = call.whole + row * wide + 8 * first;
        int32_t* totals = call.totals + row * stride + kMultipoleGroup * g;
        Bytes a[kParts], b[kParts];
        for (int i = 0; i < kParts; ++i) a[i] = b[i] = zero_bytes();
        for (int64_t c = 0; c < count; ++c) {
          const Bytes even = fours(four_bytes(whole + 8 * c)), odd = fours(four_bytes(whole + 8 * c + 4));
          for (int i = 0; i < kParts; ++i) {
            a[i] = add_products(a[i], load_bytes(low[c] + SPARING_BYTES * i), even);
            b[i] = add_products(b[i], load_bytes(high[c] + SPARING_BYTES * i), odd);
          }
        }
        for (int i = 0; i < kParts; ++i) {
          int32_t* part = totals + SPARING_BYTES / 4 * i;
          const Bytes before = first ? load_bytes(part) : zero_bytes();
          store_bytes(part, add_pairs(add_pairs(before, a[i]), b[i]));
        }
      }
    }
}
#endif

inline void code_products(const CodeProducts& call) {
#if defined(SPARING_AVX512)
  if (call.vnni) return code_products_vnni(call);
#endif
#if defined(SPARING_AVX512) || defined(SPARING_AVX2)
  code_products_by_pairs(call);
#else
  for (int64_t row = 0; row < call.rows; ++row)
    for (int64_t g = 0; g < call.groups; ++g) {
      int32_t* totals = call.totals + (row * call.groups + g) * kMultipoleGroup;
      const int8_t* whole = call.whole + 8 * row * call.chunks;
      for (int i = 0; i < kMultipoleGroup; ++i) totals[i] = 0;
      for (int64_t c = 0; c < call.chunks; ++c)
        for (int i = 0; i < kMultipoleGroup; ++i)
          for (int j = 0; j < 4; ++j) {
            const int32_t code = call.codes[64 * (g * call.chunks + c) + 4 * i + j];
            totals[i] += (code & 15) * whole[8 * c + j] + (code >> 4) * whole[8 * c + 4 + j];
          }
    }
#endif
}

// How the logits of one query with the keys of one block are estimated.
template <class T>
struct Estimate {
  T base, unit;  // the logit of a key is about base + unit * (product of its codes)
  T sigma;       // standard deviation of the error of this estimate
};

// As many integers of 32 and of 8 bits as a vector has numbers of T. Not templates: GCC 12 does not convert vectors
// whose size depends on a parameter.
template <class T>
struct IntegersOf;
template <>
struct IntegersOf<float> {
  typedef int32_t wide __attribute__((vector_size(SPARING_BYTES), aligned(4), may_alias));
  typedef int8_t narrow __attribute__((vector_size(SPARING_BYTES / 4), aligned(1), may_alias));
};
template <>
struct IntegersOf<double> {
  typedef int32_t wide __attribute__((vector_size(SPARING_BYTES / 2), aligned(4), may_alias));
  typedef int8_t narrow __attribute__((vector_size(SPARING_BYTES / 8), aligned(1), may_alias));
};

SPARING_INLINE void load_integers(const int32_t* p, Vec<float>* x) {
  *x = __builtin_convertvector(*reinterpret_cast<const IntegersOf<float>::wide*>(p), Vec<float>);
}
SPARING_INLINE void load_integers(const int32_t* p, Vec<double>* x) {
  *x = __builtin_convertvector(*reinterpret_cast<const IntegersOf<double>::wide*>(p), Vec<double>);
}

template <class T>
SPARING_INLINE Vec<T> from_integers(const int32_t* p) {
  Vec<T> x;
  load_integers(p, &x);
  return x;
}

// Stores whole numbers from -127 to 127 as bytes.
SPARING_INLINE void to_bytes(Vec<float> x, int8_t* p) {
  const IntegersOf<float>::wide whole = __builtin_convertvector(x, IntegersOf<float>::wide);
  *reinterpret_cast<IntegersOf<float>::narrow*>(p) = __builtin_convertvector(whole, IntegersOf<float>::narrow);
}
SPARING_INLINE void to_bytes(Vec<double> x, int8_t* p) {
  const IntegersOf<double>::wide whole = __builtin_convertvector(x, IntegersOf<double>::wide);
  *reinterpret_cast<IntegersOf<double>::narrow*>(p) = __builtin_convertvector(whole, IntegersOf<double>::narrow);
}

// Adding it to a number below 2^22 (2^51) leaves the nearest integer in the low bits.
template <class T>
inline constexpr T kToInteger = sizeof(T) == 4 ? T(12582912.0) : T(6755399441055744.0);

// Rounds scaled * step to 8 bits, in `whole`. scaled: the query times the scale. products: working memory of `depth`
// entries. whole: entries for whole chunks of channels, zero from `depth` on. The estimate is corrected for this
// rounding as if all codes were 7.5, the middle of their range.
template <class T>
SPARING_INLINE Estimate<T> round_query(const T* scaled, const T* low, const T* step, int64_t depth, T* products,
                                       int8_t* whole) {
  constexpr T kWhole = T(127), kMiddle = T(7.5), kVariance = T(21.25);
  Vec<T> tops{}, bases{}, lefts{}, squares{};
  T top = T(0), base = T(0), left = T(0), square = T(0);
  int64_t d = 0;
  for (; d + lanes<T> <= depth; d += lanes<T>) {
    const Vec<T> x = load<T>(scaled + d), w = x * load<T>(step + d);
    store<T>(products + d, w);
    bases += x * load<T>(low + d);
    tops = larger<T>(tops, larger<T>(w, -w));
  }
  for (; d < depth; ++d) {
    const T w = scaled[d] * step[d];
    products[d] = w, base += scaled[d] * low[d];
    top = w > top ? w : -w > top ? -w : top;
  }
  const T most = largest_in_halves<T>(tops);
  top = most > top ? most : top;
  constexpr T kSmall = sizeof(T) == 4 ? T(0x1p-100) : T(0x1p-900);  // smaller logits change no weight
  const T unit = top < kSmall ? T(0) : top / kWhole, inverse = top < kSmall ? T(0) : kWhole / top;
  for (d = 0; d + lanes<T> <= depth; d += lanes<T>) {
    const Vec<T> w = load<T>(products + d), y = w * inverse, n = (y + kToInteger<T>)-kToInteger<T>;
    lefts += w - unit * n, squares += y * y;
    to_bytes(n, whole + d);
  }
  for (; d < depth; ++d) {
    const T y = products[d] * inverse, n = (y + kToInteger<T>)-kToInteger<T>;
    left += products[d] - unit * n, square += y * y, whole[d] = int8_t(n);
  }
  base += sum_in_halves<T>(bases), left += sum_in_halves<T>(lefts), square += sum_in_halves<T>(squares);
  const double variance = double(square + kVariance * T(depth)) / 12;
  return {base + kMiddle * left, unit, unit * T(__builtin_sqrt(variance))};
}

}  // namespace sparing::SPARING_ISA
