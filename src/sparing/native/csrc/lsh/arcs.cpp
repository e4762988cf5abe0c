#include "lsh/arcs.h"

#include <algorithm>

namespace sparing {
namespace {

// starts[b] = number of valid tokens in buckets below b, for b = 0 ... buckets.
void count_buckets(const int32_t* in, const uint8_t* valid, int64_t tokens, int64_t buckets, int32_t* starts) {
  std::fill(starts, starts + buckets + 1, 0);
  for (int64_t i = 0; i < tokens; ++i)
    if (!valid || valid[i]) ++starts[in[i] + 1];
  for (int64_t b = 0; b < buckets; ++b) starts[b + 1] += starts[b];
}

// Writes the tokens in the order of (bucket, position), those that are not valid last.
void sort_tokens(const int32_t* in, const uint8_t* valid, int64_t tokens, int64_t buckets, int32_t* next,
                 int32_t* order) {
  count_buckets(in, valid, tokens, buckets, next);
  int32_t last = next[buckets];
  for (int64_t i = 0; i < tokens; ++i) order[valid && !valid[i] ? last++ : next[in[i]]++] = int32_t(i);
}

// Sets the arc of a query in bucket b. `own` is the query's place among the keys: how many are in smaller buckets, or
// in the same bucket at a smaller position.
void around_bucket(const BucketsOfHead& head, const int32_t* starts, int64_t b, int64_t own, int32_t* from,
                   int32_t* length) {
  const int64_t chunk = head.chunk, step = std::max<int64_t>(chunk / 2, 1);
  const int64_t low = starts[b], high = starts[b + 1];
  int64_t centre = (low + high) / 2;
  if (head.queries == head.keys && high - low > 2 * chunk) centre = std::min(std::max(own, low + chunk), high - chunk);
  // Rounds towards zero where torch rounds down; negative numbers become 0 below.
  const int64_t base = (centre - chunk + step / 2) / step * step;
  *from = int32_t(std::max<int64_t>(std::min(base, head.count - 2 * chunk), 0));
  *length = int32_t(std::min(head.count, 2 * chunk));
}

// Sets the arc of a query in bucket b; `passed` keys of the bucket are at the query's position or before.
void behind_position(const BucketsOfHead& head, const int32_t* starts, int64_t b, int64_t passed, int32_t* from,
                     int32_t* length) {
  const int64_t chunk = std::max<int64_t>(passed - 1, 0) / head.chunk;
  const int64_t skipped = std::max<int64_t>(chunk - 1, 0) * head.chunk;
  *from = int32_t(starts[b] + skipped);
  *length = int32_t(passed - skipped);
}

// Sets the arc of the query of this rank. Chunk 0 also sees the last chunk, at negative places.
void around_rank(const BucketsOfHead& head, int64_t rank, int32_t* from, int32_t* length) {
  const int64_t last = std::max<int64_t>(head.count - 1, 0) / head.chunk;
  const int64_t chunk = std::min(rank / head.chunk, last);
  const int64_t begin = chunk > 0 ? (chunk - 1) * head.chunk : last > 0 ? last * head.chunk - head.count : 0;
  *from = int32_t(begin);
  *length = int32_t(std::min((chunk + 1) * head.chunk, head.count) - begin);
}

}  // namespace

int64_t arc_scratch(int64_t buckets) { return 2 * (buckets + 1); }

void find_arcs(Rule rule, const BucketsOfHead& head, const Arcs& arcs, int32_t* scratch) {
  int32_t *starts = scratch, *next = starts + head.buckets + 1;
  count_buckets(head.in_k, head.keep, head.keys, head.buckets, starts);
  std::copy(starts, starts + head.buckets + 1, next);
  int32_t padded = starts[head.buckets];
  for (int64_t i = 0; i < std::max(head.queries, head.keys); ++i) {
    const bool asks = rule != Rule::rank && i < head.queries;
    const int64_t b = asks ? head.in_q[i] : 0;
    if (asks && rule == Rule::bucket) around_bucket(head, starts, b, next[b], arcs.from + i, arcs.length + i);
    if (i < head.keys) {
      const int32_t place = head.keep && !head.keep[i] ? padded++ : next[head.in_k[i]]++;
      arcs.order[place] = int32_t(i);
      arcs.place[i] = place;
    }
    if (asks && rule == Rule::causal)
      behind_position(head, starts, b, next[b] - starts[b], arcs.from + i, arcs.length + i);
  }
  sort_tokens(head.in_q, rule == Rule::rank ? head.influence : nullptr, head.queries, head.buckets, next, arcs.sorted);
  if (rule == Rule::rank)
    for (int64_t rank = 0; rank < head.queries; ++rank) {
      const int64_t i = arcs.sorted[rank];
      around_rank(head, rank, arcs.from + i, arcs.length + i);
    }
}

}  // namespace sparing
