#include <bit>
#include <cmath>

#include "common/tensors.h"

namespace sparing {
namespace {

inline double size(double x) { return std::abs(x); }
inline float size(float x) { return std::abs(x); }
inline float size(BFloat16 x) { return std::bit_cast<float>((uint32_t(x.bits) & 0x7fff) << 16); }
inline float size(Float16 x) {
  const uint32_t exponent = x.bits >> 10 & 31, rest = x.bits & 1023;
  if (exponent == 31) return INFINITY;  // or NaN, which is as bad
  return exponent ? std::bit_cast<float>((exponent + 112) << 23 | rest << 13) : float(rest) * 0x1p-24F;
}

// Returns whether no entry of the tokens from `start` on is NaN, or larger than the limit.
template <class E>
bool moderate(const char* name, const Tensor& x, int64_t start, double limit) {
  STD_TORCH_CHECK(x.dim() == 4, name, " must have 4 axes");
  const int64_t items = x.size(0), heads = x.size(1), count = x.size(2), width = x.size(3);
  STD_TORCH_CHECK(start >= 0 && start <= count, "start must be from 0 to the number of tokens of ", name);
  const Tokens<const E> tokens_of = tokens<E>(name, x, items, heads, count, width);
  const auto most = Wide<E>(limit);
  int64_t small = 0;
  for (int64_t item = 0; item < items; ++item)
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t token = start; token < count; ++token) {
        const E* entries = tokens_of.at(item, head, token);
        for (int64_t i = 0; i < width; ++i) small += size(entries[i]) <= most;
      }
  return small == items * heads * (count - start) * width;
}

bool are_moderate(Tensor q, Tensor k, Tensor v, int64_t start, double limit) {
  return with_stored_type("q", q, [&]<class E>() {
    return moderate<E>("q", q, 0, limit) && moderate<E>("k", k, start, limit) && moderate<E>("v", v, start, limit);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparing, CPU, library) { library.impl("are_moderate", TORCH_BOX(&are_moderate)); }

}  // namespace sparing
