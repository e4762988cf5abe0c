// The kernel of exact attention (attend/forward.h), in which a group of queries reads the values of the keys that one
// of them wants, and a few others that stand for the rest. Scores and their sum are those of exact attention.
#pragma once

#include "attend/forward.h"
#include "skip/call.h"

namespace sparing::SPARING_ISA {

template <class T>
inline constexpr int kGroupStrips = kSkipGroup / kStrip<T>;

// The state of a strip beyond that of exact attention; rows of kStrip<T> entries.
template <class T>
struct SkipStrip {
  AttendStrip<T> attend;
  T* left;     // sum of the weights of keys that are left out
  T* lost;     // the part of it that no stand-in represents
  T* touched;  // number of values used
  T* scores;   // [kAttendKeys] of a tile, then its weights
};

template <class T>
int64_t skip_strip_size(const Skip<T>& call) {
  return attend_strip_size<T>(call) + (kAttendKeys + 3) * kStrip<T>;
}

template <class T>
int64_t skip_scratch(const Skip<T>& call) {
  return kAttendBlock / kStrip<T> * skip_strip_size(call) + call.q.room(kStrip<T>, call.depth) +
         call.k.room(kAttendKeys, call.depth) + call.v.room(kAttendKeys, call.width);
}

// Computes the weights of the first `count` keys of a tile for a strip, relative to the largest that it has seen, and
// sets bit `first` + lane of wanted[c] where a query wants key c. limits: how many of the keys a query sees. factor:
// set to what the sums of the tiles before shrink by.
template <class T, int W>
SPARING_INLINE void weigh_tile(const Skip<T>& call, SkipStrip<T>& strip, const AttendTile<T>& tile, int64_t count,
                               const int64_t* limits, int64_t queries, bool later, int first, uint32_t* wanted,
                               Vec<T>* factor) {
  constexpr int64_t step = kStrip<T>, everywhere = INT64_MAX;
  Vec<T> top[W], shift[W], total[W];
  for (int j = 0; j < W; ++j) {
    factor[j] = later ? load<T>(strip.attend.top + j * lanes<T>) : all(kNever<T>);
    top[j] = factor[j];
  }
  in_even_tiles<kAttendDeep>(count, [&]<int M>(int64_t c) {
    score_tile<T, M, W>(tile.keys + c, call.depth, strip.attend.queries, nullptr, tile.places + c, everywhere,
                        strip.scores + c * step, top);
  });
  if (limits[0] < count) {  // queries see ever more keys
    IntVec<T> sees[W] = {};
    for (int64_t r = 0; r < queries && r < W * lanes<T>; ++r)
      sees[r / lanes<T>][r % lanes<T>] = Int<T>(limits[r] < 0 ? 0 : limits[r] < count ? limits[r] : count);
    for (int j = 0; j < W; ++j) {
      top[j] = factor[j];
      for (int64_t c = 0; c < count; ++c) {
        T* at = strip.scores + c * step + j * lanes<T>;
        const Vec<T> score = sees[j] > Int<T>(c) ? load<T>(at) : all(kNever<T>);
        store<T>(at, score);
        top[j] = larger<T>(top[j], score);
      }
    }
  }
  for (int j = 0; j < W; ++j) {
    shift[j] = top[j] == kNever<T> ? Vec<T>{} : top[j];
    factor[j] = exponential_below(factor[j] - shift[j]);
    total[j] = Vec<T>{};
    store<T>(strip.attend.top + j * lanes<T>, top[j]);
  }
  const Vec<T> threshold = all(call.threshold);
  T* const scores = strip.scores;
  for (int64_t c = 0; c < count; ++c) {
    uint32_t found = 0;
    for (int j = 0; j < W; ++j) {
      T* at = scores + c * step + j * lanes<T>;
      const Vec<T> weight = exponential_below(load<T>(at) - shift[j]);
      store<T>(at, weight);
      total[j] += weight;
      found |= at_least<T>(weight, threshold) << (j * lanes<T>);
    }
    wanted[c] |= found << first;
  }
  for (int j = 0; j < W; ++j) {
    T* to = strip.attend.total + j * lanes<T>;
    Running<Vec<T>> sum{};
    if (later) sum = {rounded(load<T>(to) * factor[j]), rounded(load<T>(to + step) * factor[j])};
    sum.add(total[j]);
    store<T>(to, sum.sum), store<T>(to + step, sum.rest);
  }
}

// The keys of a tile, by who reads them.
struct KeyLists {
  int32_t used[kAttendKeys + 16];   // keys that a query of the strip reads, and those that stand for others
  int32_t left[kAttendKeys + 16];   // keys that not all queries read
  int32_t mixed[kAttendKeys + 16];  // keys that some queries read
  int64_t used_count = 0, left_count = 0, mixed_count = 0;

  // whole: the bits of the strip. stands: not zero for keys that may stand for others.
  SPARING_INLINE void fill(const uint32_t* read, const uint32_t* stands, int64_t count, uint32_t whole) {
#if defined(SPARING_AVX512)
    const __m512i all_bits = _mm512_set1_epi32(int32_t(whole));
    __m512i key = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const auto append = [&](__mmask16 which, int32_t* list, int64_t* length) __attribute__((always_inline)) {
      _mm512_storeu_si512(list + *length, _mm512_maskz_compress_epi32(which, key));
      *length += __builtin_popcount(which);
    };
    for (int64_t c = 0; c < count; c += 16) {
      const __mmask16 there = count - c < 16 ? __mmask16((1u << (count - c)) - 1) : __mmask16(0xffff);
      const __m512i by = _mm512_and_si512(_mm512_loadu_si512(read + c), all_bits);
      const __mmask16 some = _mm512_test_epi32_mask(by, by) & there;
      const __mmask16 every = _mm512_cmpeq_epi32_mask(by, all_bits) & there;
      const __m512i standing = _mm512_loadu_si512(stands + c);
      append((some | _mm512_test_epi32_mask(standing, standing)) & there, used, &used_count);
      append(there & ~every, left, &left_count);
      append(some & ~every, mixed, &mixed_count);
      key = _mm512_add_epi32(key, _mm512_set1_epi32(16));
    }
#else
    for (int64_t c = 0; c < count; ++c) {
      const uint32_t by = read[c] & whole;
      used[used_count] = left[left_count] = mixed[mixed_count] = int32_t(c);
      used_count += (by | stands[c]) != 0, left_count += by != whole, mixed_count += by != 0 && by != whole;
    }
#endif
  }
};

// Adds the values of a tile to a strip. read: bit `first` + lane is set where a query reads a key.
template <class T, int W>
SPARING_INLINE void absorb_read(const Skip<T>& call, SkipStrip<T>& strip, const AttendTile<T>& tile, int64_t count,
                                Meet meet, int first, const uint32_t* read, const Vec<T>* factor) {
  constexpr int64_t step = kStrip<T>;
  const uint32_t whole = uint32_t(((uint64_t(1) << (W * lanes<T>)) - 1) << first);
  IntVec<T> bit[W];
  for (int j = 0; j < W; ++j)
    for (int i = 0; i < lanes<T>; ++i) bit[j][i] = Int<T>(uint64_t(1) << (first + j * lanes<T> + i));
  T* const scores = strip.scores;
  const auto weight_at = [&](int64_t c, int j) { return scores + c * step + j * lanes<T>; };
  const auto reads = [&](int64_t c, int j) { return (all<Int<T>>(Int<T>(read[c])) & bit[j]) != 0; };
  KeyLists lists;
  lists.fill(read, call.stands, count, whole);
  Vec<T> left[W] = {}, stand[W] = {}, growth[W], touched[W];
  for (int64_t i = 0; i < lists.left_count; ++i)
    for (int j = 0; j < W; ++j) {
      const int64_t c = lists.left[i];
      left[j] += reads(c, j) ? Vec<T>{} : load<T>(weight_at(c, j));
    }
  for (int64_t c = call.stride - 1; c < count; c += call.stride)
    for (int j = 0; j < W; ++j) stand[j] += reads(c, j) ? Vec<T>{} : load<T>(weight_at(c, j));
  const bool later = meet == Meet::later;
  for (int j = 0; j < W; ++j) {
    const IntVec<T> enough = stand[j] * kMostGrowth<T> >= left[j] && stand[j] > kLeastStanding<T>;
    growth[j] = enough ? left[j] / (enough ? stand[j] : all(T(1))) : Vec<T>{};
    T *sum = strip.left + j * lanes<T>, *lost = strip.lost + j * lanes<T>;
    store<T>(sum, (later ? rounded(load<T>(sum) * factor[j]) : Vec<T>{}) + left[j]);
    store<T>(lost, (later ? rounded(load<T>(lost) * factor[j]) : Vec<T>{}) + (enough ? Vec<T>{} : left[j]));
    touched[j] = (later ? load<T>(strip.touched + j * lanes<T>) : Vec<T>{}) + T(count - lists.left_count);
  }
  for (int64_t c = call.stride - 1; c < count; c += call.stride)
    for (int j = 0; j < W; ++j) {
      const Vec<T> weight = load<T>(weight_at(c, j)), grown = rounded(weight * growth[j]);
      const IntVec<T> own = reads(c, j);
      store<T>(weight_at(c, j), own ? weight : grown);
      touched[j] += !own && grown > T(0) ? all(T(1)) : Vec<T>{};
    }
  for (int64_t i = 0; i < lists.mixed_count; ++i)
    for (int j = 0; j < W; ++j) {
      const int64_t c = lists.mixed[i];
      const IntVec<T> own = reads(c, j);
      touched[j] += own ? all(T(1)) : Vec<T>{};
      if (!call.stands[c]) store<T>(weight_at(c, j), own ? load<T>(weight_at(c, j)) : Vec<T>{});
    }
  for (int j = 0; j < W; ++j) store<T>(strip.touched + j * lanes<T>, touched[j]);
  const T *values[kAttendKeys], *weights[kAttendKeys];
  for (int64_t i = 0; i < lists.used_count; ++i)
    values[i] = tile.values[lists.used[i]], weights[i] = weight_at(lists.used[i], 0);
  in_even_tiles<kAttendDeep>(call.width, [&]<int M>(int64_t e) {
    value_tile<T, M, W>(
        values, e, lists.used_count, [&](int64_t k) { return weights[k]; }, meet, factor, strip.attend.sums + e * step,
        call.width * step);
  });
}

// Adds a tile to a group of queries. limits: how many keys of the tile each of them sees.
template <class T>
void absorb_group(const Skip<T>& call, SkipStrip<T>* strips, const int64_t* limits, int64_t queries,
                  const AttendTile<T>& tile, Meet meet) {
  constexpr int step = kStrip<T>;
  const int64_t most = limits[queries - 1], count = most < tile.count ? most : tile.count;
  uint32_t wanted[kAttendKeys] = {};
  Vec<T> factor[kGroupStrips<T>][2];
  for (int64_t first = 0, s = 0; first < queries; first += step, ++s) {
    const auto weigh = [&]<int W>() {
      weigh_tile<T, W>(call, strips[s], tile, count, limits + first, queries - first, meet == Meet::later, int(first),
                       wanted, factor[s]);
    };
    queries - first <= lanes<T> ? weigh.template operator()<1>() : weigh.template operator()<2>();
  }
  const uint32_t lanes_used = queries == 32 ? ~uint32_t(0) : (uint32_t(1) << queries) - 1;
  for (int64_t c = 0; c < count; ++c) {
    const uint32_t by = wanted[c] & lanes_used;
    // Of causal queries, those from the first that wants a key on read it: none depends on a later one.
    wanted[c] = (call.causal ? by | (0 - by) : by ? ~uint32_t(0) : 0) & lanes_used;
  }
  for (int64_t first = 0, s = 0; first < queries; first += step, ++s) {
    const auto absorb = [&]<int W>() {
      absorb_read<T, W>(call, strips[s], tile, count, meet, int(first), wanted, factor[s]);
    };
    queries - first <= lanes<T> ? absorb.template operator()<1>() : absorb.template operator()<2>();
  }
}

// Computes one block of queries of one head.
template <class T>
void skip_block(const Skip<T>& call, const AttendBlock& block, int64_t head, T* scratch) {
  constexpr int64_t step = kStrip<T>;
  static_assert(kSkipGroup % kStrip<T> == 0 && kAttendBlock % kSkipGroup == 0);
  const int64_t kv_head = head / call.groups, row = (block.item * call.heads + head) * call.queries;
  SkipStrip<T> strips[kAttendBlock / kStrip<T>];
  T* memory = scratch;
  for (SkipStrip<T>& strip : strips) {
    const int64_t depth = call.depth * step, width = 2 * call.width * step;
    strip.attend = {memory, memory + depth, memory + depth + width, memory + depth + width + step};
    memory += attend_strip_size<T>(call);
    strip.left = memory, strip.lost = memory + step, strip.touched = memory + 2 * step;
    strip.scores = memory + 3 * step, memory += (kAttendKeys + 3) * step;
  }
  T *query_room = memory, *key_room = query_room + call.q.room(step, call.depth);
  T* value_room = key_room + call.k.room(kAttendKeys, call.depth);
  int64_t positions[kAttendBlock];
  for (int64_t r = 0; r < block.count; ++r)
    positions[r] = call.order ? call.order[block.item * call.queries + block.first + r] : block.first + r;
  for (int64_t first = 0; first < block.count; first += step) {
    const T* rows[kStrip<T>];
    const int64_t count = block.count - first < step ? block.count - first : step;
    for (int64_t r = 0; r < count; ++r)
      rows[r] =
          row_of(call.q, block.item, head, positions[first + r], call.depth, query_room + call.q.room(r, call.depth));
    transpose<T, kStrip<T>>(rows, count, call.depth, call.scale, strips[first / step].attend.queries);
  }
  const int64_t* before = call.valid ? call.valid_before + block.item * (call.keys + 1) : nullptr;
  const auto rank = [&](int64_t place) { return before ? before[place] : place; };
  // Of the visible keys from `begin` to `end`, in ranks, queries see those below their limit.
  int64_t limits[kAttendBlock];
  for (int64_t r = 0; r < block.count; ++r)
    limits[r] = rank(call.causal && positions[r] + 1 < block.stop ? positions[r] + 1 : block.stop);
  const int64_t begin = rank(block.start), end = limits[block.count - 1];
  bool seen[kAttendBlock / kSkipGroup] = {};
  AttendTile<T> tile;
  for (int64_t at = begin; at < end; at += kAttendKeys) {
    gather_tile<T>(call, block.item, kv_head, at, end, key_room, value_room, &tile);
    for (int64_t first = 0; first < block.count; first += kSkipGroup) {
      const int64_t count = block.count - first < kSkipGroup ? block.count - first : kSkipGroup;
      if (limits[first + count - 1] <= at) continue;
      int64_t below[kSkipGroup];
      for (int64_t r = 0; r < count; ++r) below[r] = limits[first + r] - at;
      bool& met = seen[first / kSkipGroup];
      absorb_group(call, strips + first / step, below, count, tile, met ? Meet::later : Meet::first);
      met = true;
    }
  }
  for (int64_t first = 0; first < block.count; first += step) {
    SkipStrip<T>& strip = strips[first / step];
    const int64_t count = block.count - first < step ? block.count - first : step;
    if (!seen[first / kSkipGroup]) {
      clear(strip.attend.sums, call.width * step), clear(strip.attend.total, step), clear(strip.left, 3 * step);
      for (int64_t r = 0; r < step; ++r) strip.attend.top[r] = kNever<T>;
    }
    int64_t rows[kStrip<T>];
    T whole[kStrip<T>] = {};
    for (int64_t r = 0; r < count; ++r) {
      const T total = strip.attend.total[r];
      rows[r] = row + positions[first + r], whole[r] = total - strip.lost[r];
      call.left[rows[r]] = total == T(0) ? T(0) : strip.left[r] / total, call.touched[rows[r]] = strip.touched[r];
    }
    finish_strip<T>(call, strip.attend, count, rows, whole);
  }
}

template <class T>
void skip_forward(const Skip<T>& call, int64_t begin, int64_t end, T* scratch) {
  for (int64_t task = begin; task < end; ++task)
    skip_block(call, call.blocks[task % call.block_count], task / call.block_count, scratch);
}

template <class T>
constexpr SkipKernels<T> skip_kernels() {
  return {skip_scratch<T>, skip_forward<T>};
}

}  // namespace sparing::SPARING_ISA
