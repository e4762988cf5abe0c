// Philox4x32-10 (Salmon et al., SC 2011), the generator of draws.py, bit for bit: the key is the seed, the counter is
// (block low, block high, stream, purpose), and block b holds the numbers 4 b to 4 b + 3 of a stream.
#pragma once

#include <cstdint>

namespace sparing {

struct Philox {
  uint64_t seed;
  uint32_t stream, purpose;

  struct Words {
    uint32_t word[4];
  };

  // Always inline: a copy compiled for a wide instruction set must not serve the others.
  __attribute__((always_inline)) Words block(uint64_t number) const {
    uint32_t c0 = uint32_t(number), c1 = uint32_t(number >> 32), c2 = stream, c3 = purpose;
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; ++round) {
      const uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
      c0 = uint32_t(p1 >> 32) ^ c1 ^ k0, c1 = uint32_t(p1);
      c2 = uint32_t(p0 >> 32) ^ c3 ^ k1, c3 = uint32_t(p0);
      k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
  }

  // Calls take(index, word) for the numbers 0 to count - 1.
  template <class Take>
  void words(int64_t count, const Take& take) const {
    for (int64_t first = 0; first < count; first += 4) {
      const Words drawn = block(uint64_t(first) / 4);
      for (int64_t i = first; i < first + 4 && i < count; ++i) take(i, drawn.word[i - first]);
    }
  }
};

}  // namespace sparing
