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

}  // namespace sparing
