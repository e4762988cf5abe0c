// The keys that a query sees when keys are sorted by bucket (maths/arcs.py in Python).
#pragma once

#include "lsh/call.h"

namespace sparing {

enum class Rule { bucket, causal, rank };

// The buckets of one head in one round.
struct BucketsOfHead {
  const int32_t *in_q, *in_k;       // [queries], [keys]
  const uint8_t *keep, *influence;  // [keys], [queries]; null: all
  int64_t queries, keys, count;     // count: valid keys
  int64_t buckets;                  // larger than every bucket
  int64_t chunk;
};

int64_t arc_scratch(int64_t buckets);  // in entries of int32

void find_arcs(Rule rule, const BucketsOfHead& head, const Arcs& arcs, int32_t* scratch);

}  // namespace sparing
