// Logits of keys from their copy in 4 bits. The query is rounded to 8 bits, once for each block of keys, so that
// products are those of small integers.
#pragma once

#include "common/simd.h"
#include "multipole/call.h"

namespace sparing::SPARING_ISA {

inline constexpr int64_t kMostChunks = 8;  // chunks whose sums of products fit 16 bits: 8 * 2 * 15 * 127 < 2^15

// totals[i] = sum over the channels of code * whole, for the 16 keys of a group. codes: [chunks][16][4], low half of a
// byte first; whole: [chunks][8], those of the low halves first.
SPARING_INLINE void code_products(const uint8_t* codes, const int8_t* whole, int64_t chunks, int32_t* totals) {
#if defined(SPARING_AVX512) || defined(SPARING_AVX2)
  const auto both = [&](int64_t chunk, int32_t* low, int32_t* high) {
    __builtin_memcpy(low, whole + 8 * chunk, 4);
    __builtin_memcpy(high, whole + 8 * chunk + 4, 4);
  };
#endif
#if defined(SPARING_AVX512)
  const __m512i half = _mm512_set1_epi8(15), ones = _mm512_set1_epi16(1);
  __m512i total = _mm512_setzero_si512();
  for (int64_t first = 0; first < chunks; first += kMostChunks) {
    const int64_t end = first + kMostChunks < chunks ? first + kMostChunks : chunks;
    __m512i a = _mm512_setzero_si512(), b = a;
    for (int64_t c = first; c < end; ++c) {
      int32_t low, high;
      both(c, &low, &high);
      const __m512i x = _mm512_loadu_si512(codes + 64 * c);
      a = _mm512_add_epi16(a, _mm512_maddubs_epi16(_mm512_and_si512(x, half), _mm512_set1_epi32(low)));
      b = _mm512_add_epi16(
          b, _mm512_maddubs_epi16(_mm512_and_si512(_mm512_srli_epi16(x, 4), half), _mm512_set1_epi32(high)));
    }
    total = _mm512_add_epi32(total, _mm512_add_epi32(_mm512_madd_epi16(a, ones), _mm512_madd_epi16(b, ones)));
  }
  _mm512_storeu_si512(totals, total);
#elif defined(SPARING_AVX2)
  const __m256i half = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  __m256i total[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int64_t first = 0; first < chunks; first += kMostChunks) {
    const int64_t end = first + kMostChunks < chunks ? first + kMostChunks : chunks;
    __m256i a[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()}, b[2] = {a[0], a[0]};
    for (int64_t c = first; c < end; ++c) {
      int32_t low, high;
      both(c, &low, &high);
      const __m256i for_low = _mm256_set1_epi32(low), for_high = _mm256_set1_epi32(high);
      for (int i = 0; i < 2; ++i) {
        const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 64 * c + 32 * i));
        a[i] = _mm256_add_epi16(a[i], _mm256_maddubs_epi16(_mm256_and_si256(x, half), for_low));
        b[i] = _mm256_add_epi16(b[i], _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(x, 4), half), for_high));
      }
    }
    for (int i = 0; i < 2; ++i)
      total[i] =
          _mm256_add_epi32(total[i], _mm256_add_epi32(_mm256_madd_epi16(a[i], ones), _mm256_madd_epi16(b[i], ones)));
  }
  for (int i = 0; i < 2; ++i) _mm256_storeu_si256(reinterpret_cast<__m256i*>(totals + 8 * i), total[i]);
#else
  for (int i = 0; i < kMultipoleGroup; ++i) totals[i] = 0;
  for (int64_t c = 0; c < chunks; ++c)
    for (int i = 0; i < kMultipoleGroup; ++i)
      for (int j = 0; j < 4; ++j) {
        const int32_t code = codes[64 * c + 4 * i + j];
        totals[i] += (code & 15) * whole[8 * c + j] + (code >> 4) * whole[8 * c + 4 + j];
      }
#endif
}

// How the logits of one query with the keys of one block are estimated.
template <class T>
struct Estimate {
  T base, unit;  // the logit of a key is about base + unit * (product of its codes)
  T sigma;       // standard deviation of the error of this estimate
};

// Rounds scaled * step to 8 bits, in `whole`. scaled: the query times the scale. products: working memory of `depth`
// entries. whole: entries for whole chunks of channels, zero from `depth` on. The estimate is corrected for this
// rounding as if all codes were 7.5, the middle of their range.
template <class T>
SPARING_INLINE Estimate<T> round_query(const T* scaled, const T* low, const T* step, int64_t depth, T* products,
                                       int8_t* whole) {
  constexpr T kWhole = T(127), kMiddle = T(7.5), kVariance = T(21.25);
  constexpr T kRound = sizeof(T) == 4 ? T(12582912.0) : T(6755399441055744.0);  // see exponential()
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
  const T most = largest<T>(tops);
  top = most > top ? most : top;
  constexpr T kSmall = sizeof(T) == 4 ? T(0x1p-100) : T(0x1p-900);  // smaller logits change no weight
  const T unit = top < kSmall ? T(0) : top / kWhole, inverse = top < kSmall ? T(0) : kWhole / top;
  for (d = 0; d + lanes<T> <= depth; d += lanes<T>) {
    const Vec<T> w = load<T>(products + d), y = w * inverse, n = (y + kRound) - kRound;
    lefts += w - unit * n, squares += y * y;
    for (int i = 0; i < lanes<T>; ++i) whole[d + i] = int8_t(n[i]);
  }
  for (; d < depth; ++d) {
    const T y = products[d] * inverse, n = (y + kRound) - kRound;
    left += products[d] - unit * n, square += y * y, whole[d] = int8_t(n);
  }
  base += sum<T>(bases), left += sum<T>(lefts), square += sum<T>(squares);
  const double variance = double(square + kVariance * T(depth)) / 12;
  return {base + kMiddle * left, unit, unit * T(__builtin_sqrt(variance))};
}

}  // namespace sparing::SPARING_ISA
