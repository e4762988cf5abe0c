// Gathers the queries of a strip and the keys that they see in one round.
#pragma once

#include "common/simd.h"
#include "common/tile.h"
#include "common/widen.h"
#include "lsh/call.h"
#include "lsh/strip.h"

namespace sparing::SPARING_ISA {

// Copies of the keys that neighbouring strips see in one round. Keys that are neighbours by bucket are scattered over
// memory: copied once, they cost one page lookup instead of one per strip.
template <class T>
struct LshWindow {
  int64_t low, high;           // places
  int64_t fetched;             // the place up to which keys were prefetched
  int32_t *token, *place;      // [window], [rounds][window]: the key at a place, and its place in earlier rounds
  T *keys, *values;            // [window][padded depth or width]
  T *key_grads, *value_grads;  // same shapes, then their rests (see sums.h), backward only
};

// A strip of queries in one round.
template <class T>
struct LshStrip {
  int64_t count;                                                // queries
  int64_t low, high;                                            // places that some query sees
  const int32_t* query;                                         // [count]
  int32_t first[kStrip<T> / kMixed], last[kStrip<T> / kMixed];  // keys that each kMixed queries see, from low
  Int<T>*from, *length;                     // [rounds][kStrip] arcs of the queries in this round and in earlier ones
  T *queries, *scores;                      // [depth][kStrip], [span][kStrip]
  T* room;                                  // [kStrip][depth] queries of 16 bits, widened
  T top[kStrip<T>];                         // the largest score
  T* sums;                                  // [kStrip][padded width], then their rests, forward only
  T *grads, *slopes;                        // [width][kStrip], [span][kStrip], backward only
  T *query_rows, *grad_rows, *query_grads;  // [kStrip][padded depth or width], the last with rests, backward only
};

// Points the parts into `memory`, unless it is null, and returns how many entries of T they take.
template <class T>
int64_t lay_out_lsh(LshWindow<T>* window, LshStrip<T>* strip, const Lsh<T>& call, T* memory, bool backward) {
  int64_t used = 0;
  const auto take = [&]<class Part>(Part** part, int64_t count) {
    if (memory) *part = reinterpret_cast<Part*>(memory + used);
    const int64_t bytes = (count * int64_t(sizeof(Part)) + 63) / 64 * 64;
    used += bytes / int64_t(sizeof(T));
  };
  const int64_t deep = padded<T>(call.depth), wide = padded<T>(call.width);
  take(&strip->queries, call.depth * kStrip<T>);
  take(&strip->scores, call.span * kStrip<T>);
  take(&strip->room, call.q.room(kStrip<T>, call.depth));
  take(&strip->from, call.rounds * kStrip<T>);
  take(&strip->length, call.rounds * kStrip<T>);
  take(&window->token, call.window);
  take(&window->place, call.rounds * call.window);
  take(&window->keys, call.window * deep);
  take(&window->values, call.window * wide);
  if (!backward) {
    take(&strip->sums, 2 * kStrip<T> * wide);
  } else {
    take(&window->key_grads, 2 * call.window * deep);
    take(&window->value_grads, 2 * call.window * wide);
    take(&strip->grads, call.width * kStrip<T>);
    take(&strip->slopes, call.span * kStrip<T>);
    take(&strip->query_rows, kStrip<T> * deep);
    take(&strip->grad_rows, kStrip<T> * wide);
    take(&strip->query_grads, 2 * kStrip<T> * deep);
  }
  return used;
}

// Returns how many of the sorted queries from `first` on, at most `most`, together cover at most `limit` places.
template <class T>
int64_t fitting(const Lsh<T>& call, const Arcs& now, int64_t first, int64_t most, int64_t limit, int64_t* low,
                int64_t* high) {
  *low = *high = 0;
  int64_t count = 0;
  for (; count < most && first + count < call.queries; ++count) {
    const int64_t i = now.sorted[first + count], begin = now.from[i], end = begin + now.length[i];
    if (begin == end) continue;
    const bool none = *low == *high;
    const int64_t lowest = none || begin < *low ? begin : *low, highest = none || end > *high ? end : *high;
    if (highest - lowest > limit) break;
    *low = lowest, *high = highest;
  }
  return count;
}

// Copies the keys from the end of the window to place `high`.
template <class T>
void extend_window(LshWindow<T>& window, const Lsh<T>& call, const Arcs* arcs, int64_t unit, int64_t round,
                   int64_t high) {
  const int64_t item = unit / call.heads, head = unit % call.heads, valid = call.counts[item];
  const int64_t deep = padded<T>(call.depth), wide = padded<T>(call.width);
  for (; window.high < high; ++window.high) {
    const int64_t p = window.high, c = p - window.low, token = arcs[round].order[p < 0 ? p + valid : p];
    window.token[c] = int32_t(token);
    with_stored(call.k, item, head, token,
                [&](const auto* key) { copy_row<T>(key, call.depth, deep, window.keys + c * deep); });
    with_stored(call.v, item, head, token,
                [&](const auto* value) { copy_row<T>(value, call.width, wide, window.values + c * wide); });
    for (int64_t e = 0; call.once && e < round; ++e) window.place[e * call.window + c] = arcs[e].place[token];
  }
}

// Copies the keys that the sorted queries from `first` on see; returns for how many queries there was room.
template <class T>
int64_t gather_window(LshWindow<T>& window, const Lsh<T>& call, const Arcs* arcs, int64_t unit, int64_t round,
                      int64_t first, int64_t most) {
  const int64_t valid = call.counts[unit / call.heads];
  const int64_t limit = valid < call.window ? valid : call.window;  // a key is copied once, even if arcs wrap around
  int64_t high;
  const int64_t count = fitting(call, arcs[round], first, most, limit, &window.low, &high);
  window.high = window.fetched = window.low;
  extend_window(window, call, arcs, unit, round, high);
  return count;
}

// Moves the window to the places from `low` to `high`, and keeps the copies of keys that stay in it.
template <class T>
void slide_window(LshWindow<T>& window, const Lsh<T>& call, const Arcs* arcs, int64_t unit, int64_t round, int64_t low,
                  int64_t high) {
  const int64_t deep = padded<T>(call.depth), wide = padded<T>(call.width);
  if (low < window.low || low > window.high) window.low = window.high = window.fetched = low;
  if (high - window.low > call.window) {
    const int64_t gone = low - window.low, kept = window.high - low;
    for (int64_t i = 0; i < kept; ++i) window.token[i] = window.token[gone + i];
    for (int64_t e = 0; call.once && e < round; ++e)
      for (int64_t i = e * call.window; i < e * call.window + kept; ++i) window.place[i] = window.place[gone + i];
    copy_row<T>(window.keys + gone * deep, kept * deep, kept * deep, window.keys);
    copy_row<T>(window.values + gone * wide, kept * wide, kept * wide, window.values);
    window.low = low;
  }
  extend_window(window, call, arcs, unit, round, high);
}

// Fills a strip with the sorted queries from `first` on, at most `most`, that together cover at most call.span places.
template <class T>
void gather_strip(LshStrip<T>& strip, const Lsh<T>& call, const Arcs* arcs, int64_t unit, int64_t round, int64_t first,
                  int64_t most) {
  const int64_t item = unit / call.heads, head = unit % call.heads;
  most = most < kStrip<T> ? most : kStrip<T>;
  strip.count = fitting(call, arcs[round], first, most, call.span, &strip.low, &strip.high);
  strip.query = arcs[round].sorted + first;
  for (int64_t e = call.once ? 0 : round; e <= round; ++e)
    for (int64_t r = 0; r < kStrip<T>; ++r) {
      const bool there = r < strip.count;
      strip.from[e * kStrip<T> + r] = there ? arcs[e].from[strip.query[r]] : 0;
      strip.length[e * kStrip<T> + r] = there ? arcs[e].length[strip.query[r]] : 0;
    }
  for (int64_t r = 0; r < kStrip<T>; ++r) {
    const int32_t begin = int32_t(strip.from[round * kStrip<T> + r] - strip.low);
    const int32_t end = begin + int32_t(strip.length[round * kStrip<T> + r]);
    int32_t &first = strip.first[r / kMixed], &last = strip.last[r / kMixed];
    if (r % kMixed == 0) first = last = 0;
    if (begin == end) continue;
    first = first == last || begin < first ? begin : first;
    last = end > last ? end : last;
  }
  const T* rows[kStrip<T>];
  for (int64_t r = 0; r < strip.count; ++r)
    rows[r] = row_of(call.q, item, head, strip.query[r], call.depth, strip.room + call.q.room(r, call.depth));
  transpose<T, kStrip<T>>(rows, strip.count, call.depth, call.scale, strip.queries);
}

// Prefetches the rows of later strips: queries and sums of the next, keys of the one after it.
template <class T>
void fetch_next(LshWindow<T>& window, const Lsh<T>& call, const Arcs& now, int64_t unit, int64_t next) {
  const int64_t item = unit / call.heads, head = unit % call.heads, most = 4 * kStrip<T>;
  const auto fetch = [](const auto* row, int64_t width) {
    for (int64_t e = 0; e < width; e += 64 / int64_t(sizeof(*row))) __builtin_prefetch(row + e, 0, 2);
  };
  const auto fetch_token = [&](const StoredTokens<T>& from, int64_t token, int64_t width) {
    with_stored(from, item, head, token, [&](const auto* row) { fetch(row, width); });
  };
  for (int64_t i = next; i < call.queries && i < next + kStrip<T>; ++i) {
    fetch_token(call.q, now.sorted[i], call.depth);
    fetch(call.out + (unit * call.queries + now.sorted[i]) * call.width, call.width);
  }
  const int64_t ahead = now.sorted[next + 2 * kStrip<T> < call.queries ? next + 2 * kStrip<T> : call.queries - 1];
  const int64_t begin = window.fetched > window.high ? window.fetched : window.high;
  const int64_t end = now.from[ahead] + now.length[ahead];
  window.fetched = end < begin + most ? end : begin + most;
  for (int64_t p = begin < 0 ? 0 : begin; p < window.fetched; ++p) {
    fetch_token(call.k, now.order[p], call.depth);
    fetch_token(call.v, now.order[p], call.width);
  }
}

}  // namespace sparing::SPARING_ISA
