// The random numbers of philox.h, many at a time, in vectors.
#pragma once

#include "common/isa.h"

namespace sparing::SPARING_ISA {

// out[i] = 32 random bits for index first + i, i < count; `out` must have room for kDrawn more.
inline constexpr int kDrawn = 64;

inline void philox(uint64_t seed, uint32_t stream, uint32_t purpose, uint64_t first, int64_t count, uint32_t* out) {
  constexpr int kBlocks = kDrawn / 4;  // counters at a time; compilers vectorise plain loops over them
  uint64_t block = first >> 2;
  int64_t skip = int64_t(first & 3);
  for (int64_t done = 0; done < count; block += kBlocks) {
    uint32_t a[kBlocks], b[kBlocks], c[kBlocks], d[kBlocks];
    for (int i = 0; i < kBlocks; ++i) {
      a[i] = uint32_t(block) + uint32_t(i);
      b[i] = uint32_t((block + uint64_t(i)) >> 32);
      c[i] = stream, d[i] = purpose;
    }
    uint32_t low = uint32_t(seed), high = uint32_t(seed >> 32);
    for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 1  // unrolled, it would not be vectorised
      for (int i = 0; i < kBlocks; ++i) {
        const uint64_t p = uint64_t(a[i]) * 0xD2511F53u, q = uint64_t(c[i]) * 0xCD9E8D57u;
        a[i] = uint32_t(q >> 32) ^ b[i] ^ low;
        c[i] = uint32_t(p >> 32) ^ d[i] ^ high;
        b[i] = uint32_t(q), d[i] = uint32_t(p);
      }
      low += 0x9E3779B9u, high += 0xBB67AE85u;
    }
    // The first block may begin in the middle.
    uint32_t* to = out + done;
    if (skip) {
      uint32_t words[kDrawn];
      for (int i = 0; i < kBlocks; ++i)
        words[4 * i] = a[i], words[4 * i + 1] = b[i], words[4 * i + 2] = c[i], words[4 * i + 3] = d[i];
      for (int64_t i = skip; i < kDrawn; ++i) to[i - skip] = words[i];
      done -= skip;
      skip = 0;
    } else {
      for (int i = 0; i < kBlocks; ++i)
        to[4 * i] = a[i], to[4 * i + 1] = b[i], to[4 * i + 2] = c[i], to[4 * i + 3] = d[i];
    }
    done += kDrawn;
  }
}

}  // namespace sparing::SPARING_ISA
