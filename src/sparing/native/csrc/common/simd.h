// Vectors of SPARING_BYTES bytes, written with the compiler's vector extension, so that one source serves every
// instruction set. No kernel may use functions of the standard library: an inline function, compiled for a wide
// instruction set, could be linked into the code of the others.
#pragma once

#include "common/isa.h"

namespace sparing::SPARING_ISA {

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(SPARING_BYTES)));
  typedef T loose __attribute__((vector_size(SPARING_BYTES), aligned(alignof(T)), may_alias));
};
template <class T>
using Vec = typename VectorOf<T>::type;

template <class T>
struct IntegerOf;
template <>
struct IntegerOf<float> {
  using type = int32_t;
};
template <>
struct IntegerOf<double> {
  using type = int64_t;
};
template <class T>
using Int = typename IntegerOf<T>::type;
template <class T>
using IntVec = Vec<Int<T>>;

template <class T>
inline constexpr int lanes = SPARING_BYTES / int(sizeof(T));

template <class T>
SPARING_INLINE Vec<T> load(const T* p) {
  return *reinterpret_cast<const typename VectorOf<T>::loose*>(p);
}

template <class T>
SPARING_INLINE void store(T* p, Vec<T> x) {
  *reinterpret_cast<typename VectorOf<T>::loose*>(p) = x;
}

template <class T>
SPARING_INLINE Vec<T> all(T x) {
  return x - Vec<T>{};
}

// 0, 1, 2, ...
template <class T>
SPARING_INLINE Vec<T> iota() {
  Vec<T> x{};
  for (int i = 0; i < lanes<T>; ++i) x[i] = T(i);
  return x;
}

template <class T>
SPARING_INLINE Vec<T> larger(Vec<T> a, Vec<T> b) {
  return a > b ? a : b;
}

// Returns a product that is rounded before it is added to anything. Compilers otherwise choose, for each copy of a loop
// that they make, whether a multiply-add takes it as it is, and equal numbers in other lanes give other bits.
template <class V>
SPARING_INLINE V rounded(V x) {
#if defined(SPARING_AVX512) || defined(SPARING_AVX2) || defined(SPARING_SSE2)
  asm("" : "+v"(x));  // of a vector, GCC 12 takes __builtin_assoc_barrier lane by lane
  return x;
#elif __has_builtin(__builtin_assoc_barrier)
  return __builtin_assoc_barrier(x);
#else
  asm("" : "+m"(x));
  return x;
#endif
}

template <class T>
SPARING_INLINE T sum(Vec<T> x) {
  T total = 0;
  for (int i = 0; i < lanes<T>; ++i) total += x[i];
  return total;
}

// Returns a0 b0 + a1 b1 in each lane, for the two 16-bit integers that a lane of a and b holds.
SPARING_INLINE Vec<int32_t> pair_products(Vec<int32_t> a, Vec<int32_t> b) {
#if defined(SPARING_AVX512)
  return reinterpret_cast<Vec<int32_t>>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(SPARING_AVX2)
  return reinterpret_cast<Vec<int32_t>>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(SPARING_SSE2)
  return reinterpret_cast<Vec<int32_t>>(_mm_madd_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
  return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

template <class T>
SPARING_INLINE T largest(Vec<T> x) {
  T top = x[0];
  for (int i = 1; i < lanes<T>; ++i) top = x[i] > top ? x[i] : top;
  return top;
}

// Returns whether any lane of a comparison is true.
template <class T>
SPARING_INLINE bool any(IntVec<T> mask) {
  Int<T> seen = 0;
  for (int i = 0; i < lanes<T>; ++i) seen |= mask[i];
  return seen != 0;
}

// Bit i is set if lane i of a comparison is true. Code that compilers generate for this extracts the lanes one by one,
// which costs more than computing the scores that are compared.
template <class T>
SPARING_INLINE uint32_t held(IntVec<T> mask) {
#if defined(SPARING_AVX512)
  if constexpr (sizeof(T) == 4)
    return uint16_t(__builtin_ia32_cvtd2mask512(mask));
  else
    return uint8_t(__builtin_ia32_cvtq2mask512(reinterpret_cast<Vec<long long>>(mask)));
#elif defined(SPARING_AVX2)
  if constexpr (sizeof(T) == 4)
    return uint32_t(__builtin_ia32_movmskps256(reinterpret_cast<Vec<float>>(mask)));
  else
    return uint32_t(__builtin_ia32_movmskpd256(reinterpret_cast<Vec<double>>(mask)));
#else
  uint32_t bits = 0;
  for (int i = 0; i < lanes<T>; ++i) bits |= uint32_t(mask[i] & 1) << i;
  return bits;
#endif
}

// Returns the bits of the lanes in which a >= b.
template <class T>
SPARING_INLINE uint32_t at_least(Vec<T> a, Vec<T> b) {
#if defined(SPARING_AVX512)
  if constexpr (sizeof(T) == 4)
    return _mm512_cmp_ps_mask(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), _CMP_GE_OQ);
  else
    return _mm512_cmp_pd_mask(reinterpret_cast<__m512d>(a), reinterpret_cast<__m512d>(b), _CMP_GE_OQ);
#else
  return held<T>(a >= b);
#endif
}

// exp, to about one unit in the last place. Arguments below the range of normal numbers (also -inf) give 0;
// those above 88 (709 in double precision) are taken as 88 (709). Arguments must not be NaN.
SPARING_INLINE Vec<float> exponential(Vec<float> x) {
  constexpr float low = -87.336540f, high = 88.0f;
  const IntVec<float> tiny = x < low;
  x = x < low ? all(low) : x;
  x = x > high ? all(high) : x;
  constexpr float round = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const Vec<float> shifted = x * 1.44269504088896341f + round;
  const Vec<float> n = shifted - round;
  const Vec<float> r = (x - n * 0.693145751953125f) - n * 1.42860682030941723e-6f;
  Vec<float> p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const IntVec<float> whole = __builtin_convertvector(n, IntVec<float>);
  return tiny ? Vec<float>{} : p * reinterpret_cast<Vec<float>>((whole + 127) << 23);
}

SPARING_INLINE Vec<double> exponential(Vec<double> x) {
  constexpr double low = -708.39641853226408, high = 709.0;
  const IntVec<double> tiny = x < low;
  x = x < low ? all(low) : x;
  x = x > high ? all(high) : x;
  constexpr double round = 6755399441055744.0;  // 1.5 * 2^52
  const Vec<double> shifted = x * 1.4426950408889634074 + round;
  const Vec<double> n = shifted - round;
  const Vec<double> r = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
  Vec<double> p = all(1.0 / 6227020800.0);
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * (r * r) + r + 1.0;
  // The integer sits in the low bits of the shifted number; converting to 64-bit integers is slow before AVX-512.
  const IntVec<double> whole = reinterpret_cast<IntVec<double>>(shifted) - reinterpret_cast<IntVec<double>>(all(round));
  return tiny ? Vec<double>{} : p * reinterpret_cast<Vec<double>>((whole + 1023) << 52);
}

// exp of numbers that are not positive, including -inf, in fewer steps than exponential()
SPARING_INLINE Vec<float> exponential_below(Vec<float> x) {
  constexpr float round = 12582912.0f;  // as in exponential()
  const Vec<float> shifted = x * 1.44269504088896341f + round;
  const Vec<float> n = shifted - round;
#if defined(SPARING_AVX512) || defined(SPARING_AVX2)
  // 2^(n + r): with multiply-adds, the product that n is subtracted from is not rounded.
  const Vec<float> r = x * 1.92596303e-8f + (x * 1.44269502f - n);
  Vec<float> p = all(1.5353362e-4f);
  p = p * r + 1.33988745e-3f;
  p = p * r + 9.61843736e-3f;
  p = p * r + 5.55033247e-2f;
  p = p * r + 2.40226479e-1f;
  p = p * r + 6.93147203e-1f;
  p = p * r + 1.0f;
#if defined(SPARING_AVX512)
  const __mmask16 normal = _mm512_cmp_ps_mask(reinterpret_cast<__m512>(x), _mm512_set1_ps(-87.336540f), _CMP_GE_OQ);
  return reinterpret_cast<Vec<float>>(
      _mm512_maskz_scalef_ps(normal, reinterpret_cast<__m512>(p), reinterpret_cast<__m512>(n)));
#else
  const Vec<float> scaled = reinterpret_cast<Vec<float>>(reinterpret_cast<Vec<uint32_t>>(p) +
                                                         (reinterpret_cast<Vec<uint32_t>>(shifted) << 23));
  return x < -87.336540f ? Vec<float>{} : scaled;
#endif
#else
  const Vec<float> r = (x - n * 0.693145751953125f) - n * 1.42860682030941723e-6f;
  Vec<float> p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Vec<uint32_t> power = (reinterpret_cast<Vec<uint32_t>>(shifted) << 23) + (127u << 23);
  return x < -87.336540f ? Vec<float>{} : p * reinterpret_cast<Vec<float>>(power);
#endif
}

SPARING_INLINE Vec<double> exponential_below(Vec<double> x) { return exponential(x); }

// log of positive normal numbers, to about one unit in the last place
SPARING_INLINE Vec<float> logarithm(Vec<float> x) {
  // x = 2^e (1 + m) with 1 + m from sqrt(1/2) to sqrt(2): subtracting the bits of sqrt(1/2) leaves e above the
  // mantissa.
  constexpr int32_t half_root = 0x3f3504f3, mantissa = 0x007fffff;
  const IntVec<float> bits = reinterpret_cast<IntVec<float>>(x) - half_root;
  const Vec<float> e = __builtin_convertvector(bits >> 23, Vec<float>);
  const Vec<float> m = reinterpret_cast<Vec<float>>((bits & mantissa) + half_root) - 1.0f, square = m * m;
  Vec<float> p = all(7.0376836292e-2f);
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  p = rounded(p * m * square) - e * 2.12194440e-4f;
  p = p - 0.5f * square;
  return m + p + e * 0.693359375f;
}

SPARING_INLINE Vec<double> logarithm(Vec<double> x) {
  for (int i = 0; i < lanes<double>; ++i) x[i] = __builtin_log(x[i]);
  return x;
}

#if defined(__clang__)
template <int...>
struct Numbers {};
template <int N, int... more>
struct NumbersBelow : NumbersBelow<N - 1, N - 1, more...> {};
template <int... all>
struct NumbersBelow<0, all...> {
  using type = Numbers<all...>;
};
#endif

// a0 b0 a1 b1 ... from the first halves of two vectors, or from their second halves
template <class T, int half>
SPARING_INLINE Vec<T> interleave(Vec<T> a, Vec<T> b) {
#if defined(__clang__)
  return [&]<int... i>(Numbers<i...>) {
    return __builtin_shufflevector(a, b, (i / 2 + half * lanes<T> / 2 + i % 2 * lanes<T>)...);
  }(typename NumbersBelow<lanes<T>>::type{});
#else
  IntVec<T> from;
  for (int i = 0; i < lanes<T>; ++i) from[i] = i / 2 + half * lanes<T> / 2 + i % 2 * lanes<T>;
  return __builtin_shuffle(a, b, from);
#endif
}

// Lane i of the result is lane i + by of x, modulo the number of lanes.
template <class T, int by>
SPARING_INLINE Vec<T> rotated(Vec<T> x) {
#if defined(__clang__)
  return [&]<int... i>(Numbers<i...>) {
    return __builtin_shufflevector(x, x, ((i + by) % lanes<T>)...);
  }(typename NumbersBelow<lanes<T>>::type{});
#else
  IntVec<T> from{};  // a constant: shuffles that are known only at run time extract lane by lane
  for (int i = 0; i < lanes<T>; ++i) from[i] = Int<T>((i + by) % lanes<T>);
  return __builtin_shuffle(x, from);
#endif
}

// Transposes a square of lanes<T> vectors.
template <class T>
SPARING_INLINE void turn(Vec<T>* square) {
  constexpr int N = lanes<T>;
  Vec<T> turned[N];
  for (int step = 1; step < N; step *= 2) {
    for (int r = 0; r < N / 2; ++r) {
      turned[2 * r] = interleave<T, 0>(square[r], square[r + N / 2]);
      turned[2 * r + 1] = interleave<T, 1>(square[r], square[r + N / 2]);
    }
    for (int r = 0; r < N; ++r) square[r] = turned[r];
  }
}

}  // namespace sparing::SPARING_ISA
