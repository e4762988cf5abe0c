// The kernels of lsh (hash-bucket attention).
#pragma once

#include "common/isa.h"
#include "lsh/backward.h"
#include "lsh/call.h"
#include "lsh/forward.h"
#include "lsh/gather.h"
#include "lsh/hash.h"

namespace sparing::SPARING_ISA {

template <class T>
int64_t lsh_scratch(const Lsh<T>& call, bool backward) {
  LshWindow<T> window{};
  LshStrip<T> strip{};
  return lay_out_lsh<T>(&window, &strip, call, nullptr, backward) + (backward ? call.queries : 0);
}

template <class T>
constexpr LshKernels<T> lsh_kernels() {
  return {rounded_size<T>, round_rotations<T>, hash_scratch<T>, hash_tasks<T>,
          hash<T>,         lsh_scratch<T>,     lsh_forward<T>,  lsh_backward<T>};
}

}  // namespace sparing::SPARING_ISA
