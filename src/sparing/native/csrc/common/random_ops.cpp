#include "common/philox.h"
#include "common/tensors.h"

namespace sparing {
namespace {

constexpr int64_t kGrain = 4096;  // least number of Philox blocks per task

// Returns [heads, count] numbers: make(word) for the first words of each stream.
template <class Number, class Make>
Tensor draw(const Tensor& streams, int64_t seed, int64_t purpose, int64_t count, const Make& make) {
  STD_TORCH_CHECK(streams.dim() == 1, "streams must have 1 axis");
  STD_TORCH_CHECK(count >= 0, "count must not be negative");
  const int64_t heads = streams.size(0), blocks = (count + 3) / 4;
  const int64_t* stream = packed<int64_t>("streams", streams, {heads});
  Tensor numbers = fresh({heads, count}, type_of<Number>());
  Number* out = static_cast<Number*>(numbers.mutable_data_ptr());
  torch::stable::parallel_for(0, heads * blocks, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t head = task / blocks, first = task % blocks * 4;
      const Philox random{uint64_t(seed), uint32_t(stream[head]), uint32_t(purpose)};
      const Philox::Words drawn = random.block(uint64_t(first) / 4);
      for (int64_t i = first; i < first + 4 && i < count; ++i) out[head * count + i] = make(drawn.word[i - first]);
    }
  });
  return numbers;
}

Tensor random_bits(Tensor streams, int64_t seed, int64_t purpose, int64_t count) {
  return draw<int64_t>(streams, seed, purpose, count, [](uint32_t word) { return int64_t(word); });
}

Tensor random_uniform(Tensor streams, int64_t seed, int64_t purpose, int64_t count) {
  return draw<double>(streams, seed, purpose, count, [](uint32_t word) { return (word + 0.5) / 4294967296.0; });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparing, CPU, library) {
  library.impl("random_bits", TORCH_BOX(&random_bits));
  library.impl("random_uniform", TORCH_BOX(&random_uniform));
}

}  // namespace sparing
