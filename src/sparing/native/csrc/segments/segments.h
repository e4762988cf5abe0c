// Means over runs of consecutive valid tokens (segment_means in Python).
#pragma once

#include "common/sums.h"
#include "common/widen.h"
#include "segments/call.h"

namespace sparing::SPARING_ISA {

// Calls visit(token, segment, size) for the tokens of an item in order; segment -1 for padded tokens. Segment i
// holds the ranks floor(i count / segments) to floor((i + 1) count / segments) - 1 among the valid tokens.
template <class T, class Visit>
SPARING_INLINE void segments_visit(const Segments<T>& call, int64_t item, const Visit& visit) {
  const uint8_t* keep = call.keep ? call.keep + item * call.tokens : nullptr;
  int64_t count = call.tokens;
  if (keep) {
    count = 0;
    for (int64_t j = 0; j < call.tokens; ++j) count += keep[j] != 0;
  }
  int64_t rank = 0, segment = 0, first = 0, last = count / call.segments;  // ranks of a segment: first to last - 1
  for (int64_t j = 0; j < call.tokens; ++j) {
    if (keep && !keep[j]) {
      visit(j, int64_t(-1), int64_t(0));
      continue;
    }
    for (; rank >= last; ++segment) first = last, last = (segment + 2) * count / call.segments;
    visit(j, segment, last - first);
    ++rank;
  }
}

template <class T>
int64_t segments_scratch(const Segments<T>& call) {
  return 3 * call.width + call.x.room(1, call.width);
}

template <class T>
void segment_means(const Segments<T>& call, int64_t begin, int64_t end, T* scratch) {
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t item = unit / call.heads, head = unit % call.heads;
    T *out = call.out + unit * call.segments * call.width, *part = scratch, *sums = scratch + call.width;
    T* rests = sums + call.width;
    clear(out, call.segments * call.width);
    clear(scratch, 3 * call.width);
    int64_t rank_in_segment = 0;
    segments_visit(call, item, [&](int64_t j, int64_t segment, int64_t size) {
      if (segment < 0) return;
      const T* from = row_of(call.x, item, head, j, call.width, scratch + 3 * call.width);
      for (int64_t e = 0; e < call.width; ++e) part[e] += from[e];
      const bool last = ++rank_in_segment == size;
      if (!last && rank_in_segment % kRun) return;
      for (int64_t e = 0; e < call.width; ++e) {
        Running<T> total{sums[e], rests[e]};
        total.add(part[e]);
        part[e] = T(0), sums[e] = total.sum, rests[e] = total.rest;
      }
      if (!last) return;
      for (int64_t e = 0; e < call.width; ++e) out[segment * call.width + e] = sums[e] / T(size);
      clear(sums, 2 * call.width);
      rank_in_segment = 0;
    });
  }
}

template <class T>
void segment_means_backward(const Segments<T>& call, int64_t begin, int64_t end) {
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t item = unit / call.heads, head = unit % call.heads;
    T* out = call.out + unit * call.tokens * call.width;
    segments_visit(call, item, [&](int64_t j, int64_t segment, int64_t size) {
      T* to = out + j * call.width;
      const T* from = segment < 0 ? nullptr : call.x.at(item, head, segment);
      for (int64_t e = 0; e < call.width; ++e) to[e] = from ? from[e] / T(size) : T(0);
    });
  }
}

template <class T>
constexpr SegmentKernels<T> segment_kernels() {
  return {segments_scratch<T>, segment_means<T>, segment_means_backward<T>};
}

}  // namespace sparing::SPARING_ISA
