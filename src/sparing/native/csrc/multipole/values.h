// Weighted sums of values from their copy in 2 or 4 bits. The weights of a group of 16 keys are rounded to 7 bits, so
// that products are those of small integers. Queries that share the keys are taken together: codes are unpacked once.
//
// A byte holds codes of 8 / bits channels, which are 16 apart. A lane of bytes covers 128 / bits channels; the codes of
// one lane and group are [4 times 4 keys][16 channels][4 keys].
#pragma once

#include "common/simd.h"
#include "multipole/call.h"
#include "multipole/estimate.h"

namespace sparing::SPARING_ISA {

inline constexpr int kMostWeight = 127;

// The products of the codes of one block with the weights of a tile.
template <class T>
struct ValueSums {
  const uint8_t* codes;            // [groups][lanes_of_bytes][256]
  int64_t groups, lanes_of_bytes;  // groups of 16 keys
  const int8_t* weights;           // [rows][groups][16] whole numbers from 0 to 127
  const T* units;                  // [rows][groups] that the weights are multiples of; 0 for groups that do not count
  int64_t rows;
  T* sums;  // [rows][lanes_of_bytes * 128 / bits channels], to which unit * weight * code is added
  bool vnni;
};

template <class T>
SPARING_INLINE void add_totals(const int32_t* totals, T unit, T* sums) {
  for (int c = 0; c < kValueChannels; c += lanes<T>)
    store<T>(sums + c, load<T>(sums + c) + unit * from_integers<T>(totals + c));
}

#if defined(SPARING_AVX512)
template <class T, int bits>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma"))) void add_codes_vnni(
    const ValueSums<T>& call) {
  constexpr int kParts = 8 / bits, kMask = (1 << bits) - 1;
  const __m512i mask = _mm512_set1_epi8(kMask);
  const int64_t channels = call.lanes_of_bytes * kParts * kValueChannels;
  for (int64_t g = 0; g < call.groups; ++g)
    for (int64_t lane = 0; lane < call.lanes_of_bytes; ++lane) {
      const uint8_t* codes = call.codes + 256 * (g * call.lanes_of_bytes + lane);
      __m512i code[4][kParts];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m512i x = _mm512_loadu_si512(codes + 64 * i);
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part)
          code[i][part] = _mm512_and_si512(_mm512_srli_epi16(x, bits * part), mask);
      }
      for (int64_t row = 0; row < call.rows; ++row) {
        const T unit = call.units[row * call.groups + g];
        if (unit == T(0)) continue;
        const int8_t* weights = call.weights + kMultipoleGroup * (row * call.groups + g);
        T* sums = call.sums + row * channels + lane * kParts * kValueChannels;
        __m512i total[kParts];
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) total[part] = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          int32_t four;
          __builtin_memcpy(&four, weights + 4 * i, 4);
          const __m512i weight = _mm512_set1_epi32(four);
#pragma GCC unroll 4
          for (int part = 0; part < kParts; ++part)
            total[part] = _mm512_dpbusd_epi32(total[part], code[i][part], weight);
        }
        if constexpr (sizeof(T) == 4) {
          const __m512 factor = _mm512_set1_ps(unit);
#pragma GCC unroll 4
          for (int part = 0; part < kParts; ++part) {
            float* sum = sums + part * kValueChannels;
            _mm512_storeu_ps(
                sum, _mm512_fmadd_ps(factor, _mm512_maskz_cvtepi32_ps(0xffff, total[part]), _mm512_loadu_ps(sum)));
          }
        } else {
          for (int part = 0; part < kParts; ++part) {
            alignas(64) int32_t totals[kValueChannels];
            _mm512_store_si512(totals, total[part]);
            for (int c = 0; c < kValueChannels; ++c) sums[part * kValueChannels + c] += unit * T(totals[c]);
          }
        }
      }
    }
}
#endif

#if defined(SPARING_AVX512) || defined(SPARING_AVX2)
template <class T, int bits>
void add_codes_by_pairs(const ValueSums<T>& call) {
  constexpr int kParts = 8 / bits, kMask = (1 << bits) - 1;
  const int64_t channels = call.lanes_of_bytes * kParts * kValueChannels;
  alignas(64) uint8_t code[4][kParts][64];
  for (int64_t g = 0; g < call.groups; ++g)
    for (int64_t lane = 0; lane < call.lanes_of_bytes; ++lane) {
      const uint8_t* codes = call.codes + 256 * (g * call.lanes_of_bytes + lane);
      for (int i = 0; i < 4; ++i)
        for (int at = 0; at < 64; at += SPARING_BYTES) {
          const Bytes x = load_bytes(codes + 64 * i + at);
          for (int part = 0; part < kParts; ++part) store_bytes(code[i][part] + at, masked(x, bits * part, kMask));
        }
      for (int64_t row = 0; row < call.rows; ++row) {
        const T unit = call.units[row * call.groups + g];
        if (unit == T(0)) continue;
        const int8_t* weights = call.weights + kMultipoleGroup * (row * call.groups + g);
        T* sums = call.sums + row * channels + lane * kParts * kValueChannels;
        const Bytes weight[4] = {fours(four_bytes(weights)), fours(four_bytes(weights + 4)),
                                 fours(four_bytes(weights + 8)), fours(four_bytes(weights + 12))};
        for (int part = 0; part < kParts; ++part) {
          alignas(64) int32_t totals[kValueChannels];
          for (int at = 0; at < 64; at += SPARING_BYTES) {
            Bytes total = zero_bytes();
            for (int i = 0; i < 4; ++i) total = add_products(total, load_bytes(code[i][part] + at), weight[i]);
            store_bytes(totals + at / 4, add_pairs(zero_bytes(), total));
          }
          add_totals<T>(totals, unit, sums + part * kValueChannels);
        }
      }
    }
}
#endif

template <class T, int bits>
void add_codes(const ValueSums<T>& call) {
#if defined(SPARING_AVX512)
  if (call.vnni) return add_codes_vnni<T, bits>(call);
#endif
#if defined(SPARING_AVX512) || defined(SPARING_AVX2)
  add_codes_by_pairs<T, bits>(call);
#else
  constexpr int kParts = 8 / bits, kMask = (1 << bits) - 1;
  for (int64_t row = 0; row < call.rows; ++row)
    for (int64_t g = 0; g < call.groups; ++g) {
      const T unit = call.units[row * call.groups + g];
      if (unit == T(0)) continue;
      const int8_t* weights = call.weights + kMultipoleGroup * (row * call.groups + g);
      for (int64_t lane = 0; lane < call.lanes_of_bytes; ++lane) {
        const uint8_t* codes = call.codes + 256 * (g * call.lanes_of_bytes + lane);
        T* sums = call.sums + (row * call.lanes_of_bytes + lane) * kParts * kValueChannels;
        for (int part = 0; part < kParts; ++part) {
          int32_t totals[kValueChannels] = {};
          for (int key = 0; key < kMultipoleGroup; ++key)
            for (int c = 0; c < kValueChannels; ++c)
              totals[c] += (codes[key / 4 * 64 + 4 * c + key % 4] >> bits * part & kMask) * weights[key];
          add_totals<T>(totals, unit, sums + part * kValueChannels);
        }
      }
    }
#endif
}

}  // namespace sparing::SPARING_ISA
