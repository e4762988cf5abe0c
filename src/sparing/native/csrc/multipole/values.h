// Weighted sums of values from their copy in 2 or 4 bits. The weights of a group of 16 keys are rounded to 7 bits, so
// that products are those of small integers.
//
// A byte holds codes of 8 / bits channels, which are 16 apart. A lane of bytes covers 128 / bits channels; the codes of
// one lane and group are [8 pairs of keys][16 channels][2 keys].
#pragma once

#include "common/simd.h"
#include "multipole/call.h"

namespace sparing::SPARING_ISA {

inline constexpr int kMostWeight = 127;

// sums[c] += unit * sum over the keys of weight * code, for the 16 keys of a group; weights: whole numbers up to 127,
// so that 8 products of pairs fit into 16 bits. sums: one for each of `lanes_of_bytes` * 128 / bits channels.
template <class T, int bits>
SPARING_INLINE void add_codes(const uint8_t* codes, const int8_t* weights, int64_t lanes_of_bytes, T unit, T* sums) {
  constexpr int kParts = 8 / bits, kMask = (1 << bits) - 1;
  for (int64_t lane = 0; lane < lanes_of_bytes; ++lane, codes += 256, sums += kParts * kValueChannels) {
    int16_t totals[kParts][kValueChannels];
#if defined(SPARING_AVX2) || defined(SPARING_AVX512)
    const __m256i mask = _mm256_set1_epi8(kMask);
    __m256i total[kParts];
    for (int part = 0; part < kParts; ++part) total[part] = _mm256_setzero_si256();
    for (int pair = 0; pair < 8; ++pair) {
      int16_t both;
      __builtin_memcpy(&both, weights + 2 * pair, 2);
      const __m256i weight = _mm256_set1_epi16(both);
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 32 * pair));
      for (int part = 0; part < kParts; ++part) {
        const __m256i code = _mm256_and_si256(_mm256_srli_epi16(x, bits * part), mask);
        total[part] = _mm256_add_epi16(total[part], _mm256_maddubs_epi16(code, weight));
      }
    }
    for (int part = 0; part < kParts; ++part)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(totals[part]), total[part]);
#else
    for (int part = 0; part < kParts; ++part)
      for (int c = 0; c < kValueChannels; ++c) {
        int total = 0;
        for (int key = 0; key < kMultipoleGroup; ++key)
          total += (codes[key / 2 * 32 + 2 * c + key % 2] >> bits * part & kMask) * weights[key];
        totals[part][c] = int16_t(total);
      }
#endif
    for (int part = 0; part < kParts; ++part) {
      T* sum = sums + part * kValueChannels;
      for (int c = 0; c < kValueChannels; ++c) sum[c] += unit * T(totals[part][c]);
    }
  }
}

}  // namespace sparing::SPARING_ISA
