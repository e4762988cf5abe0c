// Loads of 16-bit numbers as vectors of float, and rounding back.
#pragma once

#include "common/half.h"
#include "common/simd.h"
#include "common/tokens.h"

namespace sparing::SPARING_ISA {

SPARING_INLINE float widen(float x) { return x; }
SPARING_INLINE double widen(double x) { return x; }
SPARING_INLINE float widen(BFloat16 x) { return __builtin_bit_cast(float, uint32_t(x.bits) << 16); }
SPARING_INLINE float widen(Float16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
  if (rest >= 0x7c00) return __builtin_bit_cast(float, sign | 0x7f800000 | (rest & 0x3ff) << 13);
  // The exponent is 112 too small; multiplying makes it right for numbers below the normal range, too.
  const float moved = __builtin_bit_cast(float, rest << 13) * 0x1p112f;
  return __builtin_bit_cast(float, sign | __builtin_bit_cast(uint32_t, moved));
}

template <class E>
SPARING_INLINE Vec<Wide<E>> load_wide(const E* p) {
  using T = Wide<E>;
  if constexpr (sizeof(E) > 2) {
    return load<T>(p);
  } else {
#if defined(SPARING_AVX512) || defined(SPARING_AVX2)
    if constexpr (__is_same(E, BFloat16)) {
      typedef uint16_t Bits __attribute__((vector_size(SPARING_BYTES / 2)));
      typedef Bits Loose __attribute__((aligned(2), may_alias));
      const Bits bits = *reinterpret_cast<const Loose*>(p);
      return reinterpret_cast<Vec<T>>(__builtin_convertvector(bits, Vec<uint32_t>) << 16);
    } else {
#if defined(SPARING_AVX512)  // with a mask: GCC 12 warns of the undefined vector in the plain one
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
      return reinterpret_cast<Vec<T>>(_mm512_maskz_cvtph_ps(0xffff, bits));
#else
      return reinterpret_cast<Vec<T>>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#endif
    }
#else
    Vec<T> found{};
    for (int i = 0; i < lanes<T>; ++i) found[i] = widen(p[i]);
    return found;
#endif
  }
}

template <class E>
SPARING_INLINE void widen_row(const E* from, int64_t width, Wide<E>* to) {
  using T = Wide<E>;
  int64_t i = 0;
  for (; i + lanes<T> <= width; i += lanes<T>) store<T>(to + i, load_wide(from + i));
  for (; i < width; ++i) to[i] = widen(from[i]);
}

// Calls visit(p) with the address of a token's entries, in the type that they are stored in.
template <class T, class Visit>
SPARING_INLINE void with_stored(const StoredTokens<T>& from, int64_t item, int64_t head, int64_t token,
                                const Visit& visit) {
  const int64_t offset = from.offset(item, head, token);
  if constexpr (sizeof(T) == 4) {
    if (from.storage == Storage::bfloat16) return visit(static_cast<const BFloat16*>(from.data) + offset);
    if (from.storage == Storage::float16) return visit(static_cast<const Float16*>(from.data) + offset);
  }
  visit(static_cast<const T*>(from.data) + offset);
}

// Returns the entries of a token: as they are stored, or the first `width` of them widened, in `room`.
template <class T>
SPARING_INLINE const T* row_of(const StoredTokens<T>& from, int64_t item, int64_t head, int64_t token, int64_t width,
                               T* room) {
  if (from.storage == Storage::as_is) return from.at(item, head, token);
  with_stored(from, item, head, token, [&](const auto* row) { widen_row(row, width, room); });
  return room;
}

// Rounds x to the nearest number of the type of *out, ties to even.
SPARING_INLINE void narrow(float x, float* out) { *out = x; }
SPARING_INLINE void narrow(double x, double* out) { *out = x; }
SPARING_INLINE void narrow(float x, BFloat16* out) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  if ((bits & 0x7fffffff) > 0x7f800000) {
    out->bits = uint16_t(bits >> 16 | 0x40);  // NaN
  } else {
    out->bits = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}
SPARING_INLINE void narrow(float x, Float16* out) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  uint32_t found;
  if (size > 0x7f800000) {
    found = 0x7e00;  // NaN
  } else if (size >= 0x477ff000) {
    found = 0x7c00;                // rounds to infinity
  } else if (size < 0x38800000) {  // below the normal range: the sum leaves the rounded digits in the low bits
    found = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, size) + 0.5f) - 0x3f000000;
  } else {
    found = (size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13;
  }
  out->bits = uint16_t(sign | found);
}

}  // namespace sparing::SPARING_ISA
