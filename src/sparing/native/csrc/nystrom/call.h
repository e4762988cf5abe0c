// Third-order iteration for the (pseudo)inverses of small matrices. Included by kernels.h.
#pragma once

#include <cstdint>

namespace sparing {

template <class T>
struct Inverse {
  const T *a, *start;  // [matrices][size][size]
  int64_t matrices, size, steps;
  T* out;  // [matrices][size][size]
  // backward
  const T* grad;           // [matrices][size][size]
  T *grad_a, *grad_start;  // the same
};

template <class T>
struct InverseKernels {  // working memory in entries of T, and the work on matrices from `begin` to `end`
  int64_t (*scratch)(const Inverse<T>&, bool backward);
  void (*forward)(const Inverse<T>&, int64_t begin, int64_t end, T* scratch);
  void (*backward)(const Inverse<T>&, int64_t begin, int64_t end, T* scratch);
};

}  // namespace sparing
