// 16-bit floating-point numbers, and the types that kernels compute in. Tensors of 16 bits are widened in registers.
#pragma once

#include <cstdint>

namespace sparing {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class E>
struct WideOf {
  using type = E;
};
template <>
struct WideOf<BFloat16> {
  using type = float;
};
template <>
struct WideOf<Float16> {
  using type = float;
};

// The type that entries of type E are computed in.
template <class E>
using Wide = typename WideOf<E>::type;

}  // namespace sparing
