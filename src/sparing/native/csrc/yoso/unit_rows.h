// Rows divided by their length. Length and quotient are computed in double and rounded once, so that any order of the
// sum gives the same float, except with a probability of about 2^-28 per entry.
#pragma once

#include "common/simd.h"
#include "common/widen.h"
#include "yoso/call.h"

namespace sparing::SPARING_ISA {

// Loads lanes<double> entries as double.
template <class T>
SPARING_INLINE Vec<double> widened(const T* p) {
  typedef T narrow __attribute__((vector_size(sizeof(T) * lanes<double>), aligned(alignof(T)), may_alias));
  return __builtin_convertvector(*reinterpret_cast<const narrow*>(p), Vec<double>);
}

// Returns the sum of the lanes, halving the vector in each step.
template <class T, int kHalf = lanes<T> / 2>
SPARING_INLINE T folded(Vec<T> x) {
  if constexpr (kHalf == 0) {
    return x[0];
  } else {
    return folded<T, kHalf / 2>(x + rotated<T, kHalf>(x));
  }
}

// The two factors that scale a row to unit length; zeros if all entries are smaller than `smallest`.
struct Shrink {
  double first, second;

  SPARING_INLINE double operator()(double x) const { return x * first * second; }
};

template <class T>
Shrink to_unit(const T* row, int64_t width, double smallest) {
  constexpr int step = lanes<double>;
  double top = 0;
  for (int64_t k = 0; k < width; ++k) {
    const double size = __builtin_fabs(double(row[k]));
    top = size > top ? size : top;
  }
  if (!(top >= smallest)) return {0.0, 0.0};
  const double first = sizeof(T) == 4 ? 1.0 : 1.0 / top;  // squares of huge and of tiny doubles are out of range
  Vec<double> sums{};
  int64_t k = 0;
  for (; k + step <= width; k += step) {
    const Vec<double> x = widened(row + k) * first;
    sums += x * x;
  }
  double total = folded<double>(sums);
  for (; k < width; ++k) total += (double(row[k]) * first) * (double(row[k]) * first);
  return {first, 1.0 / __builtin_sqrt(total)};
}

template <class T>
void unit_rows(const UnitRows<T>& call, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    T* row = call.rows + r * call.width;
    const Shrink unit_of = to_unit(row, call.width, call.smallest);
    for (int64_t k = 0; k < call.width; ++k) row[k] = T(unit_of(double(row[k])));
    call.inverse[r] = T(unit_of.first * unit_of.second);
  }
}

// Converts a gradient with respect to u = x / |x| to one with respect to x: factor * (grad - u (u . grad)) / |x|.
template <class T>
SPARING_INLINE void unit_row_backward(const T* x, const T* grad, int64_t width, double smallest, double factor, T* to) {
  constexpr int step = lanes<double>;
  const Shrink unit_of = to_unit(x, width, smallest);
  const double scale = unit_of.first * unit_of.second;
  Vec<double> sums{};
  int64_t k = 0;
  for (; k + step <= width; k += step) sums += widened(x + k) * unit_of.first * widened(grad + k);
  double along = folded<double>(sums);
  for (; k < width; ++k) along += double(x[k]) * unit_of.first * double(grad[k]);
  along *= unit_of.second;
  for (k = 0; k < width; ++k) to[k] = T((double(grad[k]) - unit_of(double(x[k])) * along) * scale * factor);
}

template <class T>
void find_along(const Values<T>& values, int64_t begin, int64_t end) {
  constexpr int step = lanes<double>;
  for (int64_t r = begin; r < end; ++r) {
    const int64_t unit = r / values.tokens, item = unit / values.heads, head = unit % values.heads;
    const T *x = values.x.at(item, head, r % values.tokens), *u = values.unit.at(item, head, r % values.tokens);
    Vec<double> sums{};
    int64_t k = 0;
    for (; k + step <= values.width; k += step) sums += widened(u + k) * widened(x + k);
    double along = folded<double>(sums);
    for (; k < values.width; ++k) along += double(u[k]) * double(x[k]);
    values.along[r] = along;
  }
}

// Reads `count` entries of a token's row, from `first` on.
template <class T>
SPARING_INLINE void read_values(const Values<T>& values, int64_t item, int64_t head, int64_t token, int64_t first,
                                int64_t count, T* to) {
  if (!values.unit.data)
    return with_stored(values.x, item, head, token, [&](const auto* x) { widen_row(x + first, count, to); });
  const T* x = values.x.at(item, head, token) + first;
  const T* unit = values.unit.at(item, head, token) + first;
  const int64_t row = (item * values.heads + head) * values.tokens + token;
  const double along = values.along[row], inverse = double(values.inverse[row]);
  for (int64_t k = 0; k < count; ++k) to[k] = T((double(x[k]) - double(unit[k]) * along) * inverse);
}

}  // namespace sparing::SPARING_ISA
