#include <bit>
#include <cmath>

#include "common/tensors.h"

namespace sparing {
namespace {

inline double number(double x) { return x; }
inline float number(float x) { return x; }
inline float number(BFloat16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }
// Finite numbers of this type are small: only that they are finite counts.
inline float number(Float16 x) { return (x.bits & 0x7c00) == 0x7c00 ? INFINITY : 0.0F; }

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
        for (int64_t i = 0; i < width; ++i) small += std::abs(number(entries[i])) <= most;
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
