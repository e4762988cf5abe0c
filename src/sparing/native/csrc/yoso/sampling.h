// The random part of a yoso call: draws the hyperplanes and hashes the tokens.
#pragma once

#include <cmath>
#include <string>
#include <utility>

#include "common/philox.h"
#include "common/tensors.h"
#include "common/tokens.h"
#include "kernels.h"
#include "yoso/call.h"

namespace sparing {

inline constexpr int64_t kMostBits = 16;         // codes are 16-bit numbers
inline constexpr int64_t kPlaneBytes = 4 << 20;  // draw hyperplanes for as many heads at once as fit

// Hashes whose codes exist at the same time. They share a draw and use its coordinates from `first` on.
struct Chunk {
  uint32_t purpose;
  int64_t first, hashes;
};

// The arguments that say how codes are drawn; see native/yoso.py.
struct Sampling {
  const int64_t* streams;     // [heads]
  std::vector<int32_t> bits;  // [items]
  int64_t most_bits = 1;
  uint64_t seed;
  bool gaussian;
  int64_t hashes, size;
  std::vector<Chunk> chunks;

  Sampling(const Tensor& streams_, const Tensor& bits_, int64_t seed_, const std::vector<int64_t>& purposes,
           int64_t hashes_, bool gaussian_, int64_t items, int64_t heads, int64_t depth)
      : streams(packed<int64_t>("streams", streams_, {heads})),
        seed(uint64_t(seed_)),
        gaussian(gaussian_),
        hashes(hashes_),
        size(64) {
    STD_TORCH_CHECK(hashes >= 1, "hashes must be at least 1");
    STD_TORCH_CHECK(depth < (int64_t(1) << 20), "q must have fewer than 2^20 entries per token");
    STD_TORCH_CHECK(bits_.dim() == 1, "bits must have 1 axis");
    const int64_t listed = bits_.size(0);
    STD_TORCH_CHECK(listed == 1 || listed == items, "bits must have one entry, or one per item");
    const int64_t* given = packed<int64_t>("bits", bits_, {listed});
    for (int64_t item = 0; item < items; ++item) {
      const int64_t number = given[listed == 1 ? 0 : item];
      STD_TORCH_CHECK(number >= 1 && number <= kMostBits, "bits must lie between 1 and 16");
      bits.push_back(int32_t(number));
      most_bits = number > most_bits ? number : most_bits;
    }
    while (size < depth) size *= 2;
    const int64_t group = gaussian ? kHashesAtOnce : size;
    STD_TORCH_CHECK(int64_t(purposes.size()) == (hashes + group - 1) / group,
                    "purposes must have one entry per group of ", group, " hashes");
    for (int64_t start = 0; start < hashes; start += group)
      for (int64_t first = 0; first < group && start + first < hashes; first += kHashesAtOnce) {
        const int64_t left = hashes - start - first;
        chunks.push_back({uint32_t(purposes[start / group]), first, left < kHashesAtOnce ? left : kHashesAtOnce});
      }
  }
};

// The queries or the keys of a call, with room for the codes of one chunk.
template <class T>
struct Side {
  StoredTokens<T> x;
  std::vector<int64_t> counts;
  std::vector<int32_t> places;
  Scratch codes;
  Coded coded;

  Side(StoredTokens<T> x, const uint8_t* keep, int64_t items, int64_t heads, int64_t tokens, int64_t hashes)
      : x(x), counts(items), places(items * tokens), codes(2 * items * heads * hashes * tokens) {
    STD_TORCH_CHECK(codes, "there is not enough memory for the codes of ", hashes, " hashes");
    STD_TORCH_CHECK(tokens < (int64_t(1) << 31), "places are counted in 32 bits: at most 2^31 tokens");
    for (int64_t item = 0; item < items; ++item)
      for (int64_t place = 0; place < tokens; ++place)
        if (!keep || keep[item * tokens + place]) places[item * tokens + counts[item]++] = int32_t(place);
    coded = {tokens, counts.data(), places.data(), codes.as<uint16_t>()};
  }
};

// Calls take(i, x) for standard normal numbers. Words 2 i and 2 i + 1 of the stream give the i-th by the Box-Muller
// transform, as in draws.py. The logarithm and the cosine may differ from torch's in the last bit.
template <class Take>
void normals_of(const Philox& random, int64_t count, const Take& take) {
  const auto normal = [](uint32_t a, uint32_t b) {
    const double u = (double(a) + 0.5) / 4294967296.0, v = (double(b) + 0.5) / 4294967296.0;
    return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * 3.14159265358979323846 * v);
  };
  for (int64_t first = 0; first < count; first += 2) {
    const Philox::Words drawn = random.block(uint64_t(first) / 2);
    take(first, normal(drawn.word[0], drawn.word[1]));
    if (first + 1 < count) take(first + 1, normal(drawn.word[2], drawn.word[3]));
  }
}

// Hyperplanes of some heads for one chunk.
template <class T>
struct Planes {
  std::vector<T> signs;         // Hadamard
  std::vector<double> normals;  // Gaussian
  std::vector<T> rounded, margins;

  static int64_t bytes_of_a_head(const Sampling& s, int64_t hashes, int64_t depth) {
    return s.most_bits * (s.gaussian ? hashes * depth * int64_t(sizeof(T) + 8) : 3 * s.size * int64_t(sizeof(T)));
  }

  void draw(const Sampling& s, const Chunk& chunk, int64_t first_head, int64_t heads, int64_t depth) {
    const int64_t rows = s.gaussian ? s.most_bits * chunk.hashes : s.most_bits * 3, width = s.gaussian ? depth : s.size;
    signs.resize(s.gaussian ? 0 : heads * rows * width);
    normals.resize(s.gaussian ? heads * rows * width : 0);
    rounded.resize(normals.size()), margins.resize(s.gaussian ? heads * rows : 0);
    torch::stable::parallel_for(0, heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t head = begin; head < end; ++head) {
        const Philox draws{s.seed, uint32_t(s.streams[first_head + head]), chunk.purpose};
        const int64_t at = head * rows * width;
        if (!s.gaussian) {
          draws.words(rows * width, [&](int64_t i, uint32_t word) { signs[at + i] = word & 1 ? T(1) : T(-1); });
          continue;
        }
        normals_of(draws, rows * width, [&](int64_t i, double x) { normals[at + i] = x, rounded[at + i] = T(x); });
        for (int64_t row = 0; row < rows; ++row) {
          double squares = 0;
          for (int64_t k = 0; k < width; ++k) squares += normals[at + row * width + k] * normals[at + row * width + k];
          // Bounds the rounding of the normal and of `width` products and sums; one percent covers second-order terms.
          margins[head * rows + row] = T(1.01 * double(width + 2) * 0x1p-24 * std::sqrt(squares));
        }
      }
    });
  }
};

// Computes the codes of one chunk for the tokens of all sides.
template <class T>
void hash_sides(const Sampling& s, const Chunk& chunk, int64_t items, int64_t heads, int64_t depth,
                std::initializer_list<const Side<T>*> sides) {
  const YosoKernels<T>& use = kernels().of<T>().yoso;
  const int64_t fitting = kPlaneBytes / (Planes<T>::bytes_of_a_head(s, chunk.hashes, depth) + 1) + 1;
  Planes<T> planes;
  for (int64_t head = 0; head < heads; head += fitting) {
    const int64_t some = heads - head < fitting ? heads - head : fitting;
    planes.draw(s, chunk, head, some, depth);
    for (const Side<T>* side : sides) {
      HashCodes<T> call{};
      call.x = side->x, call.coded = side->coded;
      call.items = items, call.heads = heads, call.depth = depth, call.hashes = chunk.hashes;
      call.first_head = head, call.some_heads = some;
      call.bits = s.bits.data(), call.most_bits = s.most_bits;
      call.size = s.size, call.first = chunk.first;
      call.signs = s.gaussian ? nullptr : planes.signs.data();
      call.normals = planes.normals.data(), call.rounded = planes.rounded.data(), call.margins = planes.margins.data();
      in_parallel<T>(use.hash_tasks(call), 1, use.hash_scratch(call),
                     [&](int64_t begin, int64_t end, T* scratch) { use.hash_codes(call, begin, end, scratch); });
    }
  }
}

}  // namespace sparing
