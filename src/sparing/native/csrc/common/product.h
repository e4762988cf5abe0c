// Products of matrices that fit the cache: out = a b, with the columns of b in panels, each contiguous in memory.
#pragma once

#include "common/simd.h"
#include "common/sums.h"
#include "common/tile.h"

namespace sparing::SPARING_ISA {

template <class T>
inline constexpr int64_t kPanel = kWide * lanes<T>;

// A matrix whose entry (i, k) is at data[i * row + k * step]: step 1 for a matrix, row 1 for a transposed one.
template <class T>
struct Strided {
  const T* data;
  int64_t row, step;
};

// A matrix whose columns are read in panels: row k of panel p is at data[p * panel + k * row].
template <class T>
struct Panels {
  const T* data;
  int64_t panel, row;
};

// Panels one after the other, each with its `depth` rows: the faster layout for many columns.
template <class T>
SPARING_INLINE Panels<T> in_panels(const T* data, int64_t depth) {
  return {data, kPanel<T> * depth, kPanel<T>};
}

// Plain rows of `columns` entries.
template <class T>
SPARING_INLINE Panels<T> in_rows(const T* data, int64_t columns) {
  return {data, kPanel<T>, columns};
}

// out[i][lane] (+)= sum_k a(i, k) panel[k][lane] for i < M, for one panel's lanes
template <class T, int M>
SPARING_INLINE void panel_tile(Strided<T> a, int64_t depth, const T* panel, int64_t panel_row, T* out, int64_t out_row,
                               bool add, int64_t rest) {
  Vec<T> sums[M][kWide] = {};
  const T* row[M];
  for (int i = 0; i < M; ++i) row[i] = a.data + i * a.row;
  for (int64_t k = 0; k < depth; ++k) {
    Vec<T> column[kWide];
    for (int j = 0; j < kWide; ++j) column[j] = load<T>(panel + k * panel_row + j * lanes<T>);
    for (int i = 0; i < M; ++i) {
      const Vec<T> x = all(row[i][k * a.step]);
      for (int j = 0; j < kWide; ++j) sums[i][j] += x * column[j];
    }
  }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < kWide; ++j) {
      T* to = out + i * out_row + j * lanes<T>;
      add ? add_to<T>(to, rest, sums[i][j]) : store<T>(to, sums[i][j]);
    }
}

// out[i][j] (+)= sum_k a(i, k) b(k, j) for i < count, k < depth, j < columns (whole panels)
template <class T>
void product(Strided<T> a, int64_t count, int64_t depth, Panels<T> b, int64_t columns, T* out, int64_t out_row,
             bool add = false, int64_t rest = 0) {
  for (int64_t j = 0; j < columns; j += kPanel<T>) {
    const T* panel = b.data + j / kPanel<T> * b.panel;
    in_tiles<kDeep>(count, [&]<int M>(int64_t i) {
      const T* rows = a.data + i * a.row;
      T* to = out + i * out_row + j;
      if (a.step == 1)  // a constant step costs no multiplication
        panel_tile<T, M>({rows, a.row, 1}, depth, panel, b.row, to, out_row, add, rest);
      else
        panel_tile<T, M>({rows, a.row, a.step}, depth, panel, b.row, to, out_row, add, rest);
    });
  }
}

// Computes the same product with a long sum over k (see sums.h). The rest of an entry of `out` is `rest` entries after
// it.
template <class T>
void long_product(Strided<T> a, int64_t count, int64_t depth, Panels<T> b, int64_t columns, T* out, int64_t out_row,
                  int64_t rest) {
  if (depth > 2 * kRun) clear(out + rest, count * out_row);
  if (!depth) clear(out, count * out_row);
  in_runs(depth, 2 * kRun, [&](int64_t begin, int64_t end) {
    product<T>({a.data + begin * a.step, a.row, a.step}, count, end - begin, {b.data + begin * b.row, b.panel, b.row},
               columns, out, out_row, begin > 0, rest);
  });
}

// Packs row k of a matrix into panels of `depth` rows, with zeros beyond its `width` entries.
template <class T>
void pack_row(const T* row, int64_t width, int64_t k, int64_t depth, T* panels) {
  for (int64_t j = 0; j < width; j += kPanel<T>) {
    T* to = panels + j * depth + k * kPanel<T>;
    for (int64_t lane = 0; lane < kPanel<T>; ++lane) to[lane] = j + lane < width ? row[j + lane] : T(0);
  }
}

// Packs column j of such a matrix, times a factor; zeros if `column` is null.
template <class T>
void pack_column(const T* column, T factor, int64_t j, int64_t depth, T* panels) {
  T* to = panels + j / kPanel<T> * kPanel<T> * depth + j % kPanel<T>;
  for (int64_t k = 0; k < depth; ++k) to[k * kPanel<T>] = column ? factor * column[k] : T(0);
}

}  // namespace sparing::SPARING_ISA
