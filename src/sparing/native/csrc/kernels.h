// What the kernels of every instruction set look like from outside. Plain data only: this header is compiled for the
// plainest instruction set and for the widest.
#pragma once

#include <cstdint>

namespace sparing {

// Tokens of all heads: entry x of a token lies at data[item * item_step + head * head_step + token * token_step + x].
template <class T>
struct Tokens {
  T* data;
  int64_t item_step, head_step, token_step;

  // Always inline: a copy compiled for a wide instruction set must not serve the others.
  __attribute__((always_inline)) T* at(int64_t item, int64_t head, int64_t token) const {
    return data + item * item_step + head * head_step + token * token_step;
  }
};

// Softmax over a band of keys around each query, and over shared keys that every query sees.
template <class T>
struct Window {
  Tokens<const T> q, k, v;
  const uint8_t* keep;    // [items][tokens], 0 for padded keys; null: all are valid
  const int64_t* shared;  // [items][shared_count] positions, -1 for none
  int64_t items, heads, tokens, depth, width, shared_count;
  int64_t left, right;  // keys on each side of the query
  bool causal;          // shared keys are seen from their own position on
  T scale;
  T* lse;  // [items][heads][tokens], written by the forward pass, read by the backward pass
  T* out;  // [items][heads][tokens][width], the same
  // backward
  Tokens<const T> grad;
  const T* lse_grad;            // [items][heads][tokens]
  T *grad_q, *grad_k, *grad_v;  // contiguous
};

#include "lsh_call.h"
}  // namespace sparing

#include "top_keys_call.h"
}  // namespace sparing

#include "attend_call.h"
#include "inverse_call.h"
#include "segments_call.h"

namespace sparing {

template <class T>
struct KernelsOf {
  // Working memory in entries of T, and the work from task `begin` to `end`.
  int64_t (*window_scratch)(const Window<T>&, bool backward);
  int64_t (*window_tasks)(const Window<T>&);  // of the forward pass; the backward pass has one per head
  void (*window_forward)(const Window<T>&, int64_t begin, int64_t end, T* scratch);
  void (*window_backward)(const Window<T>&, int64_t begin, int64_t end, T* scratch);
  LshKernels<T> lsh;
  TopKeysKernels<T> top_keys;
  AttendKernels<T> attend;
  SegmentKernels<T> segments;
  InverseKernels<T> inverse;
};

struct Kernels {
  const char* name;
  KernelsOf<float> f32;
  KernelsOf<double> f64;

  template <class T>
  const KernelsOf<T>& of() const {
    if constexpr (sizeof(T) == 4)
      return f32;
    else
      return f64;
  }
};

// Each only to be called where the machine has the instructions; null where it was not compiled in.
const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

// The kernels in use.
const Kernels& kernels();

}  // namespace sparing
