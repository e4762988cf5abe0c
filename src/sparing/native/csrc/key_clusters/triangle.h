// Products of rows with a triangular matrix, for metric.h and poles.h.
#pragma once

#include "common/tile.h"

namespace sparing::SPARING_ISA {

// A lower triangular matrix whose columns are in the lanes.
template <class T>
struct Triangle {
  static constexpr int64_t kSome = 24;  // rows at a time: they stay in the L1 cache
  int64_t depth;
  T* columns;  // [panels][depth][kRows]

  static int64_t panels(int64_t depth) { return (depth + kRows - 1) / kRows; }
  static int64_t entries(int64_t depth) { return panels(depth) * depth * kRows; }

  // entry(k, c) is called for k >= c only.
  template <class Entry>
  void fill(const Entry& entry) const {
    for (int64_t i = 0; i < entries(depth); ++i) columns[i] = T(0);
    for (int64_t c = 0; c < depth; ++c)
      for (int64_t k = c; k < depth; ++k) columns[(c / kRows * depth + k) * kRows + c % kRows] = entry(k, c);
  }

  // out[panel][i][c] = sum_k rows[i][k] entry(k, panel * kRows + c) for i < count <= kSome, zeros up to used(panel);
  // panels are `step` entries apart
  void multiply(const T* rows, int64_t count, T* out, int64_t step) const {
    const T* from[kSome];
    for (int64_t panel = 0; panel < panels(depth); ++panel)
      for (int64_t c = 0; c < used(panel); c += kStrip<T>) {
        const int64_t k = panel * kRows + c;
        for (int64_t i = 0; i < count; ++i) from[i] = rows + i * depth + k;
        dots_strip<T>(from, count, depth - k, columns + (panel * depth + k) * kRows + c, out + panel * step + c);
      }
  }

  int64_t used(int64_t panel) const {
    const int64_t rest = depth - panel * kRows;
    return padded<T>(rest < kRows ? rest : kRows);
  }
};

}  // namespace sparing::SPARING_ISA
