// Backward pass of softmax over the keys that are seen in hash rounds (lsh_backward in Python).
#pragma once

#include "common/simd.h"
#include "common/softmax.h"
#include "common/sums.h"
#include "common/tile.h"
#include "lsh/call.h"
#include "lsh/gather.h"
#include "lsh/scores.h"
#include "lsh/strip.h"

namespace sparing::SPARING_ISA {

// Copies the gradients of the window's keys: from the window to the tensors if `back`, otherwise the other way.
template <class T, bool back>
void move_grads(LshWindow<T>& window, const Lsh<T>& call, int64_t unit) {
  const int64_t deep = padded<T>(call.depth), wide = padded<T>(call.width);
  if (!back) {
    clear(window.key_grads + call.window * deep, (window.high - window.low) * deep);
    clear(window.value_grads + call.window * wide, (window.high - window.low) * wide);
  }
  for (int64_t c = 0; c < window.high - window.low; ++c) {
    T* of_key = call.grad_k + (unit * call.keys + window.token[c]) * call.depth;
    T* of_value = call.grad_v + (unit * call.keys + window.token[c]) * call.width;
    if (back) {
      copy_row<T>(window.key_grads + c * deep, call.depth, call.depth, of_key);
      copy_row<T>(window.value_grads + c * wide, call.width, call.width, of_value);
    } else {
      copy_row<T>(of_key, call.depth, deep, window.key_grads + c * deep);
      copy_row<T>(of_value, call.width, wide, window.value_grads + c * wide);
    }
  }
}

// Adds the gradients of a strip. With weights p and the gradient g of the output,
// d value = p g and d score = p (g . value - delta); the gradients of query and key follow from d score.
template <class T>
void strip_backward(LshStrip<T>& strip, LshWindow<T>& window, const Lsh<T>& call, int64_t unit, const T* delta) {
  const int64_t item = unit / call.heads, head = unit % call.heads;
  const int64_t keys = strip.high - strip.low, at = strip.low - window.low;
  const int64_t deep = padded<T>(call.depth), wide = padded<T>(call.width);
  const T* grads[kStrip<T>];
  T tops[kStrip<T>], inverses[kStrip<T>], less[kStrip<T>];
  for (int64_t r = 0; r < kStrip<T>; ++r) {
    tops[r] = -kNever<T>, inverses[r] = less[r] = T(0);  // weight zero everywhere
    const bool there = r < strip.count;
    const int64_t i = there ? strip.query[r] : 0, query = unit * call.queries + i;
    grads[r] = call.grad.at(item, head, i);
    copy_row<T>(grads[r], there ? call.width : 0, wide, strip.grad_rows + r * wide);
    copy_row<T>(call.q.at(item, head, i), there ? call.depth : 0, deep, strip.query_rows + r * deep);
    copy_row<T>(call.grad_q + query * call.depth, there ? call.depth : 0, deep, strip.query_grads + r * deep);
    if (there && call.norm.total[query] != T(0))
      tops[r] = call.norm.top[query], inverses[r] = inverse_of(call.norm.total[query]), less[r] = delta[i];
  }
  transpose<T, kStrip<T>>(grads, strip.count, call.width, T(1), strip.grads);
  strip_dots<T>(window.values + at * wide, wide, keys, call.width, strip.grads, strip.slopes);
  for (int r = 0; r < kStrip<T>; r += lanes<T>) {
    const Vec<T> top = load<T>(tops + r), inverse = load<T>(inverses + r), minus = load<T>(less + r);
    for (int64_t c = 0; c < keys; ++c) {
      T *score = strip.scores + c * kStrip<T> + r, *slope = strip.slopes + c * kStrip<T> + r;
      const Vec<T> weight = exponential(load<T>(score) - top) * inverse;
      store<T>(score, weight);
      store<T>(slope, weight * (load<T>(slope) - minus) * call.scale);
    }
  }
  clear(strip.query_grads + kStrip<T> * deep, kStrip<T> * deep);
  mix_to_lanes<T>(strip.slopes, window.keys + at * deep, strip.first, strip.last, strip.low, keys, call.tile, deep,
                  strip.query_grads, call.in_turn ? 0 : kStrip<T> * deep);
  // Rests are dropped where a window ends, and in a causal call that depends on later tokens.
  const int64_t rest = call.in_turn || call.tile == 1 ? 0 : call.window;
  mix_from_lanes<T>(strip.slopes, strip.query_rows, keys, deep, window.key_grads + at * deep, rest * deep);
  mix_from_lanes<T>(strip.scores, strip.grad_rows, keys, wide, window.value_grads + at * wide, rest * wide);
  for (int64_t r = 0; r < strip.count; ++r)
    copy_row<T>(strip.query_grads + r * deep, call.depth, call.depth,
                call.grad_q + (unit * call.queries + strip.query[r]) * call.depth);
}

template <class T>
void lsh_backward(const Lsh<T>& call, const Arcs* arcs, int64_t unit, T* scratch) {
  LshWindow<T> window{};
  LshStrip<T> strip{};
  T* delta = scratch + lay_out_lsh<T>(&window, &strip, call, scratch, true);
  const int64_t item = unit / call.heads, head = unit % call.heads;
  T *grad_q = call.grad_q + unit * call.queries * call.depth, *grad_k = call.grad_k + unit * call.keys * call.depth;
  T* grad_v = call.grad_v + unit * call.keys * call.width;
  for (int64_t i = 0; i < call.queries * call.depth; ++i) grad_q[i] = T(0);
  for (int64_t i = 0; i < call.keys * call.depth; ++i) grad_k[i] = T(0);
  for (int64_t i = 0; i < call.keys * call.width; ++i) grad_v[i] = T(0);
  for (int64_t i = 0; i < call.queries; ++i) {
    const T *out = call.out + (unit * call.queries + i) * call.width, *grad = call.grad.at(item, head, i);
    const T lse_grad = call.lse_grad[unit * call.queries + i];
    delta[i] = -lse_grad;
    for (int64_t e = 0; e < call.width; ++e) delta[i] += out[e] * grad[e];
    bool shown = false;
    for (int64_t round = 0; round < call.rounds && !shown; ++round) shown = arcs[round].length[i] > 0;
    if (shown || !call.itself || call.norm.total[unit * call.queries + i] == T(0)) continue;
    const T *q = call.q.at(item, head, i), *k = call.k.at(item, head, i);  // it saw only its own key
    for (int64_t e = 0; e < call.width; ++e) grad_v[i * call.width + e] += grad[e];
    for (int64_t d = 0; d < call.depth; ++d) {
      grad_q[i * call.depth + d] += call.scale * lse_grad * k[d];
      grad_k[i * call.depth + d] += call.scale * lse_grad * q[d];
    }
  }
  for (int64_t round = 0; round < call.rounds; ++round)
    for (int64_t first = 0; first < call.queries;) {
      const int64_t end = first + gather_window(window, call, arcs, unit, round, first, call.queries - first);
      move_grads<T, false>(window, call, unit);
      for (; first < end; first += strip.count) {
        gather_strip(strip, call, arcs, unit, round, first, end - first);
        fetch_next(window, call, arcs[round], unit, first + strip.count);
        strip_scores(strip, window, call, unit, round);
        strip_backward(strip, window, call, unit, delta);
      }
      move_grads<T, true>(window, call, unit);
    }
}

}  // namespace sparing::SPARING_ISA
