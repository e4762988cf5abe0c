// Keys in the metric of the queries, rounded to integers (metric_rows in Python).
#pragma once

#include "common/simd.h"
#include "key_clusters/call.h"
#include "key_clusters/triangle.h"

namespace sparing::SPARING_ISA {

template <class T>
int64_t metric_scratch(const MetricRows<T>& call) {
  using Factor = Triangle<double>;
  return Factor::entries(call.depth) + Factor::kSome * call.depth + Factor::panels(call.depth) * call.size * kRows;
}

// Multiplies the keys of some chunks by the factor of their metric and rounds them to integers.
template <class T>
void metric_rows(const MetricRows<T>& call, int64_t begin, int64_t end, double* scratch) {
  const int64_t d = call.depth, step = call.size * kRows;
  const Triangle<double> triangle{d, scratch};
  double *rows = scratch + triangle.entries(d), *turned = rows + triangle.kSome * d;  // [kSome][d], [panels][size][.]
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t chunk = unit % call.chunks, item = unit / call.chunks / call.heads;
    const int64_t head = unit / call.chunks % call.heads;
    const uint8_t* valid = call.valid + (item * call.chunks + chunk) * call.size;
    const double* factor = call.factor + unit * d * d;
    triangle.fill([&](int64_t k, int64_t c) { return factor[c * d + k]; });
    Vec<double> most{};
    for (int64_t first = 0; first < call.size; first += triangle.kSome) {
      const int64_t count = call.size - first < triangle.kSome ? call.size - first : triangle.kSome;
      for (int64_t r = 0; r < count; ++r) {
        const T* key = call.k.at(item, head, chunk * call.size + first + r);
        if (valid[first + r])
          for (int64_t k = 0; k < d; ++k) rows[r * d + k] = double(key[k]);
        else
          for (int64_t k = 0; k < d; ++k) rows[r * d + k] = 0.0;
      }
      triangle.multiply(rows, count, turned + first * kRows, step);
      for (int64_t panel = 0; panel < triangle.panels(d); ++panel)
        for (int64_t r = first; r < first + count; ++r)
          for (int64_t c = 0; c < triangle.used(panel); c += lanes<double>) {
            const Vec<double> entry = load<double>(turned + panel * step + r * kRows + c);
            most = larger<double>(most, entry < 0.0 ? -entry : entry);
          }
    }
    const double found = largest<double>(most), unit_size = double(call.limit) / (found == 0.0 ? 1.0 : found);
    float* out = call.out + unit * call.size * d;
    for (int64_t panel = 0; panel < triangle.panels(d); ++panel) {
      const int64_t first = panel * kRows, some = d - first < kRows ? d - first : kRows;
      for (int64_t r = 0; r < call.size; ++r) {
        const double* row = turned + panel * step + r * kRows;
        for (int64_t c = 0; c < some; ++c) out[r * d + first + c] = float(__builtin_rint(row[c] * unit_size));
      }
    }
  }
}

template <class T>
constexpr MetricKernels<T> metric_kernels() {
  return {metric_scratch<T>, metric_rows<T>};
}

}  // namespace sparing::SPARING_ISA
