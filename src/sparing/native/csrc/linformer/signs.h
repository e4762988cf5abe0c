// Products with a matrix of random signs (sign_projection in Python). Rows are added four at a time: all 16
// signed sums of four rows are computed once, and each row of the result looks up its own, with a quarter of the
// additions of a plain product (the method of four Russians).
#pragma once

#include "common/isa.h"
#include "common/philox.h"
#include "common/simd.h"
#include "common/sums.h"
#include "common/tile.h"
#include "linformer/call.h"

namespace sparing::SPARING_ISA {

inline constexpr int64_t kWord = 32;     // rows whose signs fill a word
inline constexpr int64_t kSlots = 256;   // slots of a forward task
inline constexpr int64_t kTokens = 256;  // tokens of a backward task
inline constexpr int64_t kMaxWords = kSlots / kWord;
inline constexpr int64_t kFolded = 16 * kWord;  // tokens that are summed without compensation
template <class T>
inline constexpr int64_t kColumns = 128 / int64_t(sizeof(T));  // columns at a time: the sums of 32 rows fill 16 KiB

template <class T>
constexpr int64_t in_strips(int64_t width) {
  return (width + kColumns<T> - 1) / kColumns<T> * kColumns<T>;
}

// sums[group][i][column]: the sum of the rows 4 group to 4 group + 3, row b with a plus sign where i has bit b.
// Rows that are null count as zero.
template <class T>
void tabulate(const T* const* rows, int64_t first, int64_t width, T* sums) {
  for (int64_t group = 0; group < kWord / 4; ++group, sums += 16 * kColumns<T>) {
    T copies[4][kColumns<T>];
    const T* row[4];
    for (int b = 0; b < 4; ++b) {
      const T* from = rows[4 * group + b];
      if (from && first + kColumns<T> <= width) {
        row[b] = from + first;
        continue;
      }
      for (int64_t e = 0; e < kColumns<T>; ++e) copies[b][e] = from && first + e < width ? from[first + e] : T(0);
      row[b] = copies[b];
    }
    for (int64_t e = 0; e < kColumns<T>; e += lanes<T>) {
      const Vec<T> a = load<T>(row[0] + e), b = load<T>(row[1] + e), c = load<T>(row[2] + e), d = load<T>(row[3] + e);
      const Vec<T> low[4] = {-(a + b), a - b, b - a, a + b}, high[4] = {-(c + d), c - d, d - c, c + d};
      for (int i = 0; i < 16; ++i) store<T>(sums + i * kColumns<T> + e, low[i & 3] + high[i >> 2]);
    }
  }
}

// out[i][column] += the signed sum that the bits of words[i] select, for M consecutive results; without compensation
template <class T, int M>
SPARING_INLINE void look_up(const T* sums, const uint32_t* words, T* out, int64_t stride) {
  constexpr int kVectors = int(kColumns<T>) / lanes<T>;
  Vec<T> total[M][kVectors] = {};
  uint32_t word[M];
  for (int i = 0; i < M; ++i) word[i] = words[i];
#pragma GCC unroll 2  // unrolled further, the sums are reordered into long chains and the registers run out
  for (const T* group = sums; group < sums + kWord / 4 * 16 * kColumns<T>; group += 16 * kColumns<T>)
    for (int i = 0; i < M; ++i) {
      const T* chosen = group + (word[i] & 15) * kColumns<T>;
      word[i] >>= 4;
      for (int j = 0; j < kVectors; ++j) total[i][j] += load<T>(chosen + j * lanes<T>);
    }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < kVectors; ++j) add_to<T>(out + i * stride + j * lanes<T>, 0, total[i][j]);
}

// out[i] += sum_b +-rows[b], b < 32, plus where words[i] has bit b; rows of `stride` entries, whole strips
template <class T>
void add_signed(const T* const* rows, int64_t width, const uint32_t* words, int64_t count, T* sums, T* out,
                int64_t stride) {
  constexpr int kTogether = SPARING_BYTES >= 64 ? 4 : SPARING_BYTES >= 32 ? 2 : 1;  // fills the registers
  for (int64_t e = 0; e < stride; e += kColumns<T>) {
    tabulate(rows, e, width, sums);
    in_tiles<kTogether>(count, [&]<int M>(int64_t i) { look_up<T, M>(sums, words + i, out + i * stride + e, stride); });
  }
}

// Transposes a matrix of bits: bit j of word i becomes bit i of word j.
inline void turn_bits(uint32_t words[kWord]) {
  uint32_t mask = 0x0000FFFFu;
  for (int step = 16; step; step >>= 1, mask ^= mask << step)
    for (int i = 0; i < kWord; i = (i + step + 1) & ~step) {
      const uint32_t swapped = ((words[i] >> step) ^ words[i + step]) & mask;
      words[i] ^= swapped << step;
      words[i + step] ^= swapped;
    }
}

// words[w][t] = word `first + w` of the token of rank `rank + t`, for w < count <= kMaxWords and t < kWord
template <class T>
void draw_signs(const Signs<T>& call, int64_t head, int64_t rank, int64_t first, int64_t count,
                uint32_t (*words)[kWord]) {
  const int64_t per_token = (call.slots + kWord - 1) / kWord;
  const Philox random{call.seed, uint32_t(call.streams[head]), call.purpose};
  for (int64_t t = 0; t < kWord; ++t) {
    const uint64_t start = uint64_t((rank + t) * per_token + first), stop = start + uint64_t(count);
    for (uint64_t block = start / 4; block * 4 < stop; ++block) {
      const Philox::Words drawn = random.block(block);
      for (uint64_t i = 0; i < 4; ++i)
        if (block * 4 + i >= start && block * 4 + i < stop) words[block * 4 + i - start][t] = drawn.word[i];
    }
  }
}

template <class T>
int64_t signs_tasks(const Signs<T>& call, bool backward) {
  const int64_t blocks = backward ? (call.tokens + kTokens - 1) / kTokens : (call.slots + kSlots - 1) / kSlots;
  return call.items * call.heads * blocks;
}

template <class T>
int64_t signs_scratch(const Signs<T>& call, bool backward) {
  return kWord / 4 * 16 * kColumns<T> + (backward ? kTokens : 3 * kSlots) * in_strips<T>(call.width);
}

template <class T>
T sign_size(const Signs<T>& call) {
  return T(1.0 / __builtin_sqrt(double(call.slots)));
}

template <class T>
void signs_forward(const Signs<T>& call, int64_t begin, int64_t end, T* scratch) {
  const int64_t stride = in_strips<T>(call.width), blocks = (call.slots + kSlots - 1) / kSlots;
  const int64_t entries = kSlots * stride;
  // Two levels, as in sums.h: `out` sums up to kFolded tokens plainly, `every` adds these sums up with compensation.
  T *sums = scratch, *out = scratch + kWord / 4 * 16 * kColumns<T>, *every = out + entries;
  const T size = sign_size(call);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t unit = task / blocks, start = task % blocks * kSlots;
    const int64_t item = unit / call.heads, head = unit % call.heads;
    const int64_t slots = call.slots - start < kSlots ? call.slots - start : kSlots;
    clear(out, 3 * entries);
    const auto fold = [&] {
      for (int64_t i = 0; i < slots * stride; i += lanes<T>) add_to<T>(every + i, entries, load<T>(out + i));
      clear(out, slots * stride);
    };
    int64_t rank = 0;
    for (int64_t next = 0; next < call.tokens;) {
      const T* rows[kWord];
      int64_t found = 0;
      for (; next < call.tokens && found < kWord; ++next)
        if (!call.keep || call.keep[item * call.tokens + next]) rows[found++] = call.x.at(item, head, next);
      if (!found) break;
      for (int64_t t = found; t < kWord; ++t) rows[t] = nullptr;
      uint32_t words[kMaxWords][kWord];
      const int64_t count = (slots + kWord - 1) / kWord;
      draw_signs(call, head, rank, start / kWord, count, words);
      for (int64_t w = 0; w < count; ++w) turn_bits(words[w]);  // now the signs of one slot are a word
      add_signed(rows, call.width, words[0], slots, sums, out, stride);
      rank += found;
      if (rank % kFolded == 0) fold();
    }
    fold();
    T* to = call.out + (unit * call.slots + start) * call.width;
    for (int64_t s = 0; s < slots; ++s)
      for (int64_t e = 0; e < call.width; ++e) to[s * call.width + e] = size * every[s * stride + e];
  }
}

template <class T>
void signs_backward(const Signs<T>& call, int64_t begin, int64_t end, T* scratch) {
  T *sums = scratch, *out = scratch + kWord / 4 * 16 * kColumns<T>;
  const T size = sign_size(call);
  const int64_t stride = in_strips<T>(call.width), blocks = (call.tokens + kTokens - 1) / kTokens;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t unit = task / blocks, start = task % blocks * kTokens;
    const int64_t item = unit / call.heads, head = unit % call.heads;
    const int64_t stop = start + kTokens < call.tokens ? start + kTokens : call.tokens;
    const uint8_t* keep = call.keep ? call.keep + item * call.tokens : nullptr;
    int64_t rank = keep ? 0 : start, valid = stop - start;
    if (keep) {
      for (int64_t j = 0; j < start; ++j) rank += keep[j] != 0;
      valid = 0;
      for (int64_t j = start; j < stop; ++j) valid += keep[j] != 0;
    }
    for (int64_t i = 0; i < valid * stride; ++i) out[i] = T(0);
    for (int64_t first = 0; first < call.slots; first += kSlots) {
      const int64_t slots = call.slots - first < kSlots ? call.slots - first : kSlots;
      const int64_t count = (slots + kWord - 1) / kWord;
      uint32_t words[kMaxWords][kTokens];
      for (int64_t t = 0; t < valid; t += kWord) {
        uint32_t drawn[kMaxWords][kWord];
        draw_signs(call, head, rank + t, first / kWord, count, drawn);
        for (int64_t w = 0; w < count; ++w)
          for (int64_t i = 0; i < kWord; ++i) words[w][t + i] = drawn[w][i];
      }
      for (int64_t w = 0; w < count; ++w) {
        const T* rows[kWord];
        for (int64_t i = 0; i < kWord; ++i) {
          const int64_t slot = first + w * kWord + i;
          rows[i] = slot < call.slots ? call.x.at(item, head, slot) : nullptr;
        }
        add_signed(rows, call.width, words[w], valid, sums, out, stride);
      }
    }
    T* to = call.out + unit * call.tokens * call.width;
    for (int64_t j = start, t = 0; j < stop; ++j) {
      if (!keep || keep[j]) {
        for (int64_t e = 0; e < call.width; ++e) to[j * call.width + e] = size * out[t * stride + e];
        ++t;
      } else {
        for (int64_t e = 0; e < call.width; ++e) to[j * call.width + e] = T(0);
      }
    }
  }
}

template <class T>
constexpr SignKernels<T> sign_kernels() {
  return {signs_scratch<T>, signs_tasks<T>, signs_forward<T>, signs_backward<T>};
}

}  // namespace sparing::SPARING_ISA
