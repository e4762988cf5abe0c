#pragma once

#include "common/half.h"
#include "common/tokens.h"

namespace sparing {

inline constexpr int64_t kMultipoleGroup = 16;  // keys whose codes lie together
inline constexpr int64_t kKeyChannels = 8;      // channels of keys whose codes lie together, in 4 bytes
inline constexpr int64_t kMultipoleTile = 8;    // most queries that are taken together
inline constexpr int64_t kValueChannels = 16;   // channels of values whose codes lie together

// Attention to keys and values that also have a copy of few bits, in blocks. Keys of a large estimated weight are read;
// the copies stand for the others. Keys are numbered by rank, valid ones first.
template <class E>
struct MultipoleCall {
  using T = Wide<E>;
  Tokens<const E> q, k, v;
  int64_t items, heads, groups, queries, keys, depth, width;  // groups: query heads per key head
  const int64_t* place;                                       // [items][places] position of a rank; null: the same
  int64_t places;
  const int64_t *seen, *near;       // [items][queries] keys that a query sees; the first key from which on it reads all
  int64_t block, blocks, bits;      // keys per block, number of blocks that there is room for, bits per value
  const uint8_t* key_codes;         // [items][key heads][blocks][block / 16][depth / 8, rounded up][16][4]
  const T *key_low, *key_step;      // [items][key heads][blocks][depth]: a key is about low + step * code
  const uint8_t* value_codes;       // [items][key heads][blocks][block / 16][lanes of bytes][4][16][4], see values.h
  const T *value_low, *value_step;  // [items][key heads][blocks][width]
  int64_t sinks;                    // number of first keys that are always read
  int64_t tile;                     // queries that are taken together
  bool vnni;                        // AVX-512 VNNI may be used
  T least_share, scale;             // least_share: a key with at least this share of a query's weight is read
  E* out;                           // [items][heads][queries][width]
  T *lse, *error, *read;            // [items][heads][queries]; read: number of keys
};

template <class E>
struct MultipoleKernels {
  int64_t (*scratch)(const MultipoleCall<E>&);  // entries of Wide<E>
  void (*forward)(const MultipoleCall<E>&, int64_t begin, int64_t end, Wide<E>* scratch);
};

}  // namespace sparing
