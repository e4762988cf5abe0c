// The tensors of a call of softmax attention: inputs that are checked, and results that are allocated.
#pragma once

#include <optional>
#include <tuple>

#include "common/softmax_call.h"
#include "common/tensors.h"

namespace sparing {

// Sets sizes, scale and inputs. grouped: query heads may share the heads of k and v.
template <class T>
void read_inputs(SoftmaxCall<T>& call, const Tensor& q, const Tensor& k, const Tensor& v,
                 const std::optional<Tensor>& keep, double scale, bool grouped = false) {
  STD_TORCH_CHECK(q.dim() == 4, "q must have 4 axes");
  STD_TORCH_CHECK(k.dim() == 4, "k must have 4 axes");
  STD_TORCH_CHECK(v.dim() == 4, "v must have 4 axes");
  call.items = q.size(0), call.heads = q.size(1), call.queries = q.size(2), call.depth = q.size(3);
  call.keys = k.size(2), call.width = v.size(3);
  call.scale = T(scale);
  call.q = stored<T>("q", q, call.items, call.heads, call.queries, call.depth);
  const int64_t kv_heads = grouped ? k.size(1) : call.heads;
  STD_TORCH_CHECK(kv_heads == call.heads || (kv_heads > 0 && call.heads % kv_heads == 0),
                  "k has a number of heads that does not divide that of q");
  call.groups = kv_heads ? call.heads / kv_heads : 1;
  call.k = stored<T>("k", k, call.items, kv_heads, call.keys, call.depth);
  call.v = stored<T>("v", v, call.items, kv_heads, call.keys, call.width);
  call.keep = mask("keep", keep, call.items, call.keys);
}

// (output, log-sum-exp, and the largest score and total of each query for the backward pass)
using SoftmaxOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <class T>
SoftmaxOutputs make_outputs(SoftmaxCall<T>& call) {
  const int64_t b = call.items, h = call.heads, m = call.queries;
  Tensor out = fresh({b, h, m, call.width}, type_of<T>()), lse = fresh({b, h, m}, type_of<T>());
  Tensor top = fresh({b, h, m}, type_of<T>()), total = fresh({b, h, m}, type_of<T>());
  call.out = out.mutable_data_ptr<T>();
  call.lse = lse.mutable_data_ptr<T>();
  call.norm = {top.mutable_data_ptr<T>(), total.mutable_data_ptr<T>()};
  return {out, lse, top, total};
}

// Sets what the backward pass reads: results of the forward pass and their gradients.
template <class T>
void read_outputs(SoftmaxCall<T>& call, const Tensor& grad, const Tensor& lse_grad, const Tensor& out,
                  const Tensor& top, const Tensor& total) {
  const int64_t b = call.items, h = call.heads, m = call.queries;
  check_wide("q", call.q), check_wide("k", call.k), check_wide("v", call.v);
  call.grad = tokens<T>("grad", grad, b, h, m, call.width);
  call.lse_grad = packed<T>("lse_grad", lse_grad, {b, h, m});
  // These are only read.
  call.out = const_cast<T*>(packed<T>("out", out, {b, h, m, call.width}));
  call.norm = {const_cast<T*>(packed<T>("top", top, {b, h, m})), const_cast<T*>(packed<T>("total", total, {b, h, m}))};
}

// (gradients of q, k and v)
using SoftmaxGradients = std::tuple<Tensor, Tensor, Tensor>;

template <class T>
SoftmaxGradients make_gradients(SoftmaxCall<T>& call) {
  const int64_t b = call.items, h = call.heads;
  Tensor grad_q = fresh({b, h, call.queries, call.depth}, type_of<T>());
  Tensor grad_k = fresh({b, h, call.keys, call.depth}, type_of<T>());
  Tensor grad_v = fresh({b, h, call.keys, call.width}, type_of<T>());
  call.grad_q = grad_q.mutable_data_ptr<T>();
  call.grad_k = grad_k.mutable_data_ptr<T>();
  call.grad_v = grad_v.mutable_data_ptr<T>();
  return {grad_q, grad_k, grad_v};
}

}  // namespace sparing
