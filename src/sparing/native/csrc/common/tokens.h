#pragma once

#include <cstdint>

namespace sparing {

// Tokens of all heads: entry x of a token is at data[item * item_step + head * head_step + token * token_step + x].
template <class T>
struct Tokens {
  T* data;
  int64_t item_step, head_step, token_step;

  // Always inline: a copy compiled for a wide instruction set must not serve the others.
  __attribute__((always_inline)) T* at(int64_t item, int64_t head, int64_t token) const {
    return data + item * item_step + head * head_step + token * token_step;
  }
};

enum class Storage : int32_t { as_is, bfloat16, float16 };

// Tokens of all heads that are computed on in T. If T is float, they may be stored in 16 bits: kernels then widen the
// rows that they need at a time (row_of() in widen.h).
template <class T>
struct StoredTokens {
  const void* data;
  int64_t item_step, head_step, token_step;  // in entries
  Storage storage;

  // Only for tokens that are stored as they are.
  __attribute__((always_inline)) const T* at(int64_t item, int64_t head, int64_t token) const {
    return static_cast<const T*>(data) + offset(item, head, token);
  }

  __attribute__((always_inline)) int64_t offset(int64_t item, int64_t head, int64_t token) const {
    return item * item_step + head * head_step + token * token_step;
  }

  // Returns how many entries of memory `rows` widened rows take.
  __attribute__((always_inline)) int64_t room(int64_t rows, int64_t width) const {
    return storage == Storage::as_is ? 0 : rows * width;
  }
};

}  // namespace sparing
