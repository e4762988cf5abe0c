// What is prepared for each head before tokens are projected (projection.h): the distribution of its features, and the
// rows of W in the order in which they are read.
#pragma once

#include "common/simd.h"
#include "common/tile.h"
#include "common/widen.h"
#include "monte_carlo/call.h"
#include "monte_carlo/philox_lanes.h"

namespace sparing::SPARING_ISA {

// Rows of W are cut into panels of `width` <= kColumnVectors vectors, each [features][width].
inline constexpr int kColumnVectors = 8;
inline constexpr int64_t kGroup =
    16384 / (kColumnVectors * SPARING_BYTES);  // rows of a group: 16 KiB of the widest panel

template <class T>
struct Panel {
  int64_t first, width;  // first column of the head, and columns: 2, 4 or 8 vectors, padded with zeros
};

template <class T>
Panel<T> panel_of(int64_t width, int64_t first) {
  constexpr int64_t widest = kColumnVectors * lanes<T>;
  int64_t left = width - first, size = kWide * lanes<T>;
  while (size < left && size < widest) size *= 2;
  return {first, size};
}

template <class T>
int64_t projection_row_entries(int64_t features, int64_t width) {
  int64_t entries = 0;
  for (int64_t first = 0; first < width;) {
    const Panel<T> panel = panel_of<T>(width, first);
    entries += panel.width * features;
    first += panel.width;
  }
  return entries;
}

// Calls visit(panel, at) for each panel of a head; `at` is where its rows begin.
template <class T, class Visit>
SPARING_INLINE void each_panel(int64_t features, int64_t width, int64_t head, const Visit& visit) {
  int64_t at = head * projection_row_entries<T>(features, width);
  for (int64_t first = 0; first < width;) {
    const Panel<T> panel = panel_of<T>(width, first);
    visit(panel, at);
    at += panel.width * features;
    first += panel.width;
  }
}

// Computes the distribution of a head's features: p(k) = |W[k]|^2 / |W|_F^2. weight: the head's [width][features].
template <class T>
void projection_law(const ProjectionTables<T>& call, int64_t head, const T* weight) {
  const int64_t d = call.features;
  double* ladder = call.ladder + head * d;
  Vec<T> sizes{};
  int64_t i = 0;
  for (; i + lanes<T> <= call.width * d; i += lanes<T>) {
    const Vec<T> x = load<T>(weight + i);
    sizes = larger<T>(sizes, larger<T>(x, -x));
  }
  T size = largest<T>(sizes);
  for (; i < call.width * d; ++i) {
    const T x = weight[i] < T(0) ? -weight[i] : weight[i];
    size = x > size ? x : size;
  }
  int exponent = 0;  // so that squares of any finite weight are in range
  __builtin_frexp(double(size), &exponent);
  const double shrink = __builtin_ldexp(1.0, -exponent);
  for (int64_t k = 0; k < d; ++k) ladder[k] = 0.0;
  for (int64_t e = 0; e < call.width; ++e)
    for (int64_t k = 0; k < d; ++k) {
      const double x = double(weight[e * d + k]) * shrink;
      ladder[k] += x * x;
    }
  double total = 0.0;
  for (int64_t k = 0; k < d; ++k) total += ladder[k];
  // An infinite or NaN weight makes all probabilities, and so all results, NaN.
  constexpr double tiny = 2.2250738585072014e-308;
  const double unit = !(total < __builtin_inf()) ? __builtin_nan("") : total > tiny ? total : tiny;
  double sum = 0.0;
  for (int64_t k = 0; k < d; ++k) {
    const double p = ladder[k] / unit;
    // Draws have 32 bits: a feature with a probability below 2^-64 is never drawn; 0 avoids 0 * inf. NaN stays NaN.
    call.inverse[head * d + k] = p <= 5.421010862427522e-20 ? T(0) : T(1.0 / p);
    sum += p;
    ladder[k] = sum;
  }
  for (int64_t k = 0; k < d; ++k) ladder[k] /= sum < tiny ? tiny : sum;
  ladder[d - 1] = __builtin_inf();  // so that every search ends
  int32_t* starts = call.starts + head * kStarts;
  int64_t k = 0;
  for (int64_t b = 0; b < kStarts; ++b) {
    while (ladder[k] < double(b) / (kStarts - 1)) ++k;
    starts[b] = int32_t(k);
  }
}

// Draws `count` features of list `rank`: for each random number, the first feature whose ladder reaches it.
template <class T>
void draw(const SampledProjection<T>& call, int64_t head, int64_t rank, int64_t count, uint32_t* bits, int32_t* found) {
  const uint64_t first = call.shared ? 0 : uint64_t(rank) * uint64_t(call.features);
  philox(call.seed, uint32_t(call.streams[head]), call.purpose, first, count, bits);
  const double* ladder = call.ladder + head * call.features;
  const int32_t* starts = call.starts + head * kStarts;
  for (int64_t t = 0; t < count; ++t) {
    double u = (double(bits[t]) + 0.5) * 0x1p-32;
    if (call.stratified) u = (double(t) + u) / double(count);
    int32_t k = starts[int64_t(u * (kStarts - 1))];
    while (ladder[k] < u) ++k;
    found[t] = k;
  }
}

// Copies the rows of W out of its columns.
template <class T>
void projection_rows(const ProjectionTables<T>& call, int64_t head, const T* weight) {
  const int64_t d = call.features;
  each_panel<T>(d, call.width, head, [&](const Panel<T>& panel, int64_t at) {
    T* rows = call.rows + at;
    const T* columns = weight + panel.first * d;
    const int64_t given = call.width - panel.first < panel.width ? call.width - panel.first : panel.width;
    constexpr int64_t kStrip = 16;  // entries of a row that share a cache line
    for (int64_t first = 0; first < d; first += kStrip) {
      const int64_t last = first + kStrip < d ? first + kStrip : d;
      for (int64_t e = 0; e < given; ++e)
        for (int64_t k = first; k < last; ++k) rows[k * panel.width + e] = columns[e * d + k];
      for (int64_t e = given; e < panel.width; ++e)
        for (int64_t k = first; k < last; ++k) rows[k * panel.width + e] = T(0);
    }
  });
}

template <class T>
int64_t projection_tables_scratch(const ProjectionTables<T>& call) {
  return call.weight.room(call.width, call.features);
}

template <class T>
void projection_tables(const ProjectionTables<T>& call, int64_t first_head, int64_t last_head, T* scratch) {
  for (int64_t head = first_head; head < last_head; ++head) {
    const T* weight = scratch;
    if (call.weight.storage == Storage::as_is)
      weight = call.weight.at(0, head, 0);
    else
      for (int64_t e = 0; e < call.width; ++e)
        row_of(call.weight, 0, head, e, call.features, scratch + e * call.features);
    projection_law(call, head, weight);
    projection_rows(call, head, weight);
  }
}

// Draws the shared list, and copies the rows that are on it, divided by their probability.
template <class T>
void projection_prepare(const SampledProjection<T>& call, int64_t first_head, int64_t last_head, T* scratch) {
  for (int64_t head = first_head; head < last_head; ++head) {
    const T* inverse = call.inverse + head * call.features;
    int32_t* list = call.list + head * call.features;
    const int64_t samples = call.most[head];
    draw(call, head, 0, samples, reinterpret_cast<uint32_t*>(scratch), list);
    each_panel<T>(call.features, call.width, head, [&](const Panel<T>& panel, int64_t at) {
      const T* rows = call.rows + at;
      T* listed = call.listed + at;
      for (int64_t t = 0; t < samples; ++t)
        for (int64_t e = 0; e < panel.width; ++e)
          listed[t * panel.width + e] = rows[list[t] * panel.width + e] * inverse[list[t]];
    });
  }
}

}  // namespace sparing::SPARING_ISA
