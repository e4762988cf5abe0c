// Z <- Z (13 I - AZ (15 I - AZ (7 I - AZ))) / 4 on small matrices (inverse_iteration in Python).
#pragma once

#include "common/product.h"
#include "common/tile.h"
#include "nystrom/call.h"

namespace sparing::SPARING_ISA {

// Square matrices with padded rows in working memory.
template <class T>
struct Squares {
  int64_t size, stride;
  T* memory;

  T* matrix(int64_t i) const { return memory + i * size * stride; }

  void copy_in(const T* from, T* to) const {
    for (int64_t i = 0; i < size; ++i)
      for (int64_t j = 0; j < stride; ++j) to[i * stride + j] = j < size ? from[i * size + j] : T(0);
  }
  void copy_out(const T* from, T factor, T* to) const {
    for (int64_t i = 0; i < size; ++i)
      for (int64_t j = 0; j < size; ++j) to[i * size + j] = factor * from[i * stride + j];
  }
  void turn(const T* from, T* to) const {
    for (int64_t i = 0; i < size; ++i)
      for (int64_t j = 0; j < stride; ++j) to[i * stride + j] = j < size ? from[j * stride + i] : T(0);
  }
  // x = diagonal I + factor x
  void shift(T* x, T diagonal, T factor) const {
    for (int64_t i = 0; i < size * stride; ++i) x[i] *= factor;
    for (int64_t i = 0; i < size; ++i) x[i * stride + i] += diagonal;
  }
  // out (+)= a b
  void multiply(const T* a, const T* b, T* out, bool add = false) const {
    product<T>({a, stride, 1}, size, size, in_rows(b, stride), stride, out, stride, add);
  }
  // out (+)= a^T b
  void multiply_turned(const T* a, const T* b, T* out, bool add = false) const {
    product<T>({a, 1, stride}, size, size, in_rows(b, stride), stride, out, stride, add);
  }
};

// The factors of one step from z: y = A Z, first = 7 I - y, second = 15 I - y first, third = 13 I - y second, over 4.
template <class T>
struct InverseStep {
  T *y, *first, *second, *third;

  void compute(const Squares<T>& all, const T* a, const T* z) {
    all.multiply(a, z, y);
    for (int64_t i = 0; i < all.size * all.stride; ++i) first[i] = y[i];
    all.shift(first, T(7), T(-1));
    all.multiply(y, first, second);
    all.shift(second, T(15), T(-1));
    all.multiply(y, second, third);
    all.shift(third, T(13.0 / 4), T(-1.0 / 4));
  }
};

template <class T>
int64_t inverse_scratch(const Inverse<T>& call, bool backward) {
  return (backward ? 11 + call.steps : 7) * call.size * padded<T>(call.size);
}

template <class T>
void inverse_forward(const Inverse<T>& call, int64_t begin, int64_t end, T* scratch) {
  const Squares<T> all{call.size, padded<T>(call.size), scratch};
  T *a = all.matrix(0), *z = all.matrix(1), *next = all.matrix(2);
  InverseStep<T> step{all.matrix(3), all.matrix(4), all.matrix(5), all.matrix(6)};
  for (int64_t i = begin; i < end; ++i) {
    const int64_t at = i * call.size * call.size;
    all.copy_in(call.a + at, a);
    all.copy_in(call.start + at, z);
    for (int64_t s = 0; s < call.steps; ++s) {
      step.compute(all, a, z);
      all.multiply(z, step.third, next);
      T* before = z;
      z = next, next = before;
    }
    all.copy_out(z, T(1), call.out + at);
  }
}

template <class T>
void inverse_backward(const Inverse<T>& call, int64_t begin, int64_t end, T* scratch) {
  const Squares<T> all{call.size, padded<T>(call.size), scratch};
  T *a = all.matrix(0), *a_grad = all.matrix(1), *z_grad = all.matrix(2), *y_grad = all.matrix(3);
  T *grad = all.matrix(4), *other = all.matrix(5), *turned = all.matrix(6);
  InverseStep<T> step{all.matrix(7), all.matrix(8), all.matrix(9), all.matrix(10)};
  const auto z = [&](int64_t s) { return all.matrix(11 + s); };
  const int64_t entries = all.size * all.stride;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t at = i * call.size * call.size;
    all.copy_in(call.a + at, a);
    all.copy_in(call.start + at, z(0));
    for (int64_t s = 0; s + 1 < call.steps; ++s) {
      step.compute(all, a, z(s));
      all.multiply(z(s), step.third, z(s + 1));
    }
    all.copy_in(call.grad + at, z_grad);
    for (int64_t j = 0; j < entries; ++j) a_grad[j] = T(0);
    for (int64_t s = call.steps - 1; s >= 0; --s) {
      step.compute(all, a, z(s));
      all.multiply_turned(z(s), z_grad, grad);  // the gradient of 4 * third
      for (int64_t j = 0; j < entries; ++j) grad[j] /= T(4);
      all.turn(step.third, turned);
      all.multiply(z_grad, turned, other);
      for (int64_t j = 0; j < entries; ++j) z_grad[j] = other[j];
      // 4 third = 13 I - y second, and the inner factors have the same form: the sign of the gradient alternates.
      all.turn(step.second, turned);
      all.multiply(grad, turned, y_grad);
      all.multiply_turned(step.y, grad, other);  // minus the gradient of second
      all.turn(step.first, turned);
      for (int64_t j = 0; j < entries; ++j) y_grad[j] = -y_grad[j];
      all.multiply(other, turned, y_grad, true);
      all.multiply_turned(step.y, other, grad);  // the gradient of first
      for (int64_t j = 0; j < entries; ++j) y_grad[j] -= grad[j];
      all.turn(z(s), turned);
      all.multiply(y_grad, turned, a_grad, true);
      all.multiply_turned(a, y_grad, z_grad, true);
    }
    all.copy_out(a_grad, T(1), call.grad_a + at);
    all.copy_out(z_grad, T(1), call.grad_start + at);
  }
}

template <class T>
constexpr InverseKernels<T> inverse_kernels() {
  return {inverse_scratch<T>, inverse_forward<T>, inverse_backward<T>};
}

}  // namespace sparing::SPARING_ISA
