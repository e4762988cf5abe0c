// Sums over tokens with equal codes, through tables: tokens of one side add their values to a row per code, those of
// the other side read one row per hash. The values are cut into slices of a cache line, one task each: the tables of a
// slice stay in cache, rows never straddle cache lines, and the memory does not depend on the width.
#pragma once

#include "common/simd.h"
#include "common/sums.h"
#include "yoso/call.h"
#include "yoso/unit_rows.h"

namespace sparing::SPARING_ISA {

namespace yoso {

template <class T>
inline constexpr int kLine = 64 / int(sizeof(T));  // entries of a slice
template <class T>
inline constexpr int kParts = kLine<T> / lanes<T>;  // vectors of a slice

inline constexpr int64_t kNearBytes = 256 << 10;  // tables of several hashes are filled at once while they fit
inline constexpr int64_t kMostTables = 4;
inline constexpr int64_t kAhead = 12;  // tokens between prefetching a row and using it

inline constexpr int64_t kFewTokens = 8 * kRun;  // with more, the rows of tables have rests (see sums.h)

inline int64_t tables_at_once(int64_t bits, bool rests) {
  const int64_t bytes = int64_t(rests ? 128 : 64) << bits;
  return kMostTables * bytes <= kNearBytes ? kMostTables : 2 * bytes <= kNearBytes ? 2 : 1;
}

// One slice of one head.
template <class T>
struct Slice {
  const T* values;  // [from][line]
  T* sums;          // [to][line]
  T* tables;        // [tables at once][2^bits][line, and its rests]; zero between two hashes
  const uint16_t *from_codes, *to_codes;
  int64_t from_count, to_count, from_tokens, to_tokens;
  const int32_t *from_places, *to_places;
  int bits;
};

// One table for each of K hashes, from hash `first` on. rests: whether the rows have rests (see sums.h).
template <class T, int K, bool rests>
struct Tables {
  static constexpr int64_t kRow = rests ? 2 * kLine<T> : kLine<T>;
  const Slice<T>& slice;
  const uint16_t *from[K], *to[K];

  Tables(const Slice<T>& slice, int64_t first) : slice(slice) {
    for (int k = 0; k < K; ++k) {
      from[k] = slice.from_codes + (first + k) * slice.from_tokens;
      to[k] = slice.to_codes + (first + k) * slice.to_tokens;
    }
  }

  SPARING_INLINE T* row(int k, uint16_t code) const {
    return slice.tables + ((int64_t(k) << slice.bits) + code) * kRow;
  }

  SPARING_INLINE void put(int64_t j) const {
    Vec<T> value[kParts<T>];
    for (int p = 0; p < kParts<T>; ++p) value[p] = load<T>(slice.values + j * kLine<T> + p * lanes<T>);
    for (int k = 0; k < K; ++k) {
      T* at = row(k, from[k][j]);
      for (int p = 0; p < kParts<T>; ++p) add_to<T>(at + p * lanes<T>, rests ? kLine<T> : 0, value[p]);
    }
  }

  SPARING_INLINE void take(int64_t i) const {
    T* sums = slice.sums + i * kLine<T>;
    Vec<T> sum[kParts<T>];
    for (int p = 0; p < kParts<T>; ++p) sum[p] = load<T>(sums + p * lanes<T>);
    for (int k = 0; k < K; ++k) {
      const T* at = row(k, to[k][i]);
      for (int p = 0; p < kParts<T>; ++p) sum[p] += load<T>(at + p * lanes<T>);
    }
    for (int p = 0; p < kParts<T>; ++p) store<T>(sums + p * lanes<T>, sum[p]);
  }

  SPARING_INLINE void fetch_put(int64_t j) const {
    if (j >= 0 && j < slice.from_count)
      for (int k = 0; k < K; ++k) {
        __builtin_prefetch(row(k, from[k][j]), 1);
        if (rests) __builtin_prefetch(row(k, from[k][j]) + kLine<T>, 1);
      }
  }

  SPARING_INLINE void fetch_take(int64_t i) const {
    if (i >= 0 && i < slice.to_count)
      for (int k = 0; k < K; ++k) __builtin_prefetch(row(k, to[k][i]));
  }

  void clear() const {
    if (int64_t(1) << slice.bits <= slice.from_count) {
      const int64_t entries = (int64_t(K) << slice.bits) * kRow;
      for (int64_t x = 0; x < entries; x += lanes<T>) store<T>(slice.tables + x, Vec<T>{});
    } else {
      for (int64_t j = 0; j < slice.from_count; ++j)
        for (int k = 0; k < K; ++k)
          for (int64_t x = 0; x < kRow; x += lanes<T>) store<T>(row(k, from[k][j]) + x, Vec<T>{});
    }
  }

  void sum_all() const {
    for (int64_t j = 0; j < slice.from_count; ++j) fetch_put(j + kAhead), put(j);
    for (int64_t i = 0; i < slice.to_count; ++i) fetch_take(i + kAhead), take(i);
    clear();
  }

  // Each token sees those at its own position and before.
  void sum_past() const {
    int64_t j = 0;
    for (int64_t i = 0; i < slice.to_count; ++i) {
      for (; j < slice.from_count && slice.from_places[j] <= slice.to_places[i]; ++j) fetch_put(j + kAhead), put(j);
      fetch_take(i + kAhead), take(i);
    }
    clear();
  }

  // Each token sees those at its own position and after.
  void sum_future() const {
    int64_t j = slice.from_count - 1;
    for (int64_t i = slice.to_count - 1; i >= 0; --i) {
      for (; j >= 0 && slice.from_places[j] >= slice.to_places[i]; --j) fetch_put(j - kAhead), put(j);
      fetch_take(i - kAhead), take(i);
    }
    clear();
  }

  void sum(Order order) const {
    if (order == Order::all)
      sum_all();
    else if (order == Order::past)
      sum_past();
    else
      sum_future();
  }
};

template <class T>
int64_t slices(const TableSums<T>& call) {
  return (call.width + kLine<T> - 1) / kLine<T>;
}

template <class T>
int64_t table_tasks(const TableSums<T>& call) {
  return call.items * call.heads * slices(call);
}

// Returns how many entries the tables of any item take at most.
template <class T>
int64_t table_entries(const TableSums<T>& call) {
  int64_t rows = 0;
  for (int rests = 0; rests <= (call.from.tokens > kFewTokens); ++rests)
    for (int64_t bits = 1; bits <= call.most_bits; ++bits) {
      const int64_t needed = tables_at_once(bits, rests) << (bits + rests);
      rows = needed > rows ? needed : rows;
    }
  return rows * kLine<T>;
}

template <class T>
int64_t table_scratch(const TableSums<T>& call) {
  return table_entries(call) + (call.from.tokens + call.to.tokens) * kLine<T>;
}

// Copies kLine entries of the values of all tokens, from entry `first` on; zero beyond the width.
template <class T>
void cut_slice(const TableSums<T>& call, int64_t item, int64_t head, int64_t first, T* values) {
  const int64_t count = call.from.counts[item];
  const int64_t wide = call.width - first < kLine<T> ? call.width - first : kLine<T>;
  for (int64_t j = 0; j < count; ++j) {
    const int64_t place = call.from.places[item * call.from.tokens + j];
    T* to = values + j * kLine<T>;
    read_values(call.values, item, head, place, first, wide, to);
    for (int64_t x = wide; x < kLine<T>; ++x) to[x] = T(0);
  }
}

// Sums through the tables of all hashes, several at a time.
template <class T, bool rests>
void sum_hashes(const Slice<T>& slice, int64_t hashes, Order order) {
  const int64_t together = tables_at_once(slice.bits, rests);
  int64_t hash = 0;
  if (together == kMostTables)
    for (; hash + kMostTables <= hashes; hash += kMostTables) Tables<T, kMostTables, rests>(slice, hash).sum(order);
  if (together >= 2)
    for (; hash + 2 <= hashes; hash += 2) Tables<T, 2, rests>(slice, hash).sum(order);
  for (; hash < hashes; ++hash) Tables<T, 1, rests>(slice, hash).sum(order);
}

template <class T>
void table_sums(const TableSums<T>& call, int64_t begin, int64_t end, T* scratch) {
  const int64_t count = slices(call), entries = table_entries(call);
  T *tables = scratch, *values = tables + entries, *sums = values + call.from.tokens * kLine<T>;
  for (int64_t x = 0; x < entries; ++x) tables[x] = T(0);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t unit = task / count, first = task % count * kLine<T>;
    const int64_t item = unit / call.heads, head = unit % call.heads;
    const Slice<T> slice{values,
                         sums,
                         tables,
                         call.from.codes + unit * call.hashes * call.from.tokens,
                         call.to.codes + unit * call.hashes * call.to.tokens,
                         call.from.counts[item],
                         call.to.counts[item],
                         call.from.tokens,
                         call.to.tokens,
                         call.from.places + item * call.from.tokens,
                         call.to.places + item * call.to.tokens,
                         call.bits[item]};
    cut_slice(call, item, head, first, values);
    for (int64_t x = 0; x < slice.to_count * kLine<T>; ++x) sums[x] = T(0);
    if (slice.from_count > kFewTokens)
      sum_hashes<T, true>(slice, call.hashes, call.order);
    else
      sum_hashes<T, false>(slice, call.hashes, call.order);
    const int64_t wide = call.width - first < kLine<T> ? call.width - first : kLine<T>;
    for (int64_t i = 0; i < slice.to_count; ++i) {
      T* to = call.out + (unit * call.to.tokens + slice.to_places[i]) * call.width + first;
      for (int64_t x = 0; x < wide; ++x) to[x] = (call.add ? to[x] : T(0)) + call.factor * sums[i * kLine<T> + x];
    }
  }
}

}  // namespace yoso

}  // namespace sparing::SPARING_ISA
