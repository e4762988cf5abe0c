#include "common/softmax_tensors.h"
#include "kernels.h"

namespace sparing {
namespace {

using Optional = std::optional<Tensor>;

template <class T>
Window<T> describe(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& keep, const Optional& shared,
                   int64_t left, int64_t right, bool causal, double scale) {
  Window<T> call{};
  read_inputs(call, q, k, v, keep, scale);
  STD_TORCH_CHECK(call.keys == call.queries, "k does not have as many tokens as q");
  STD_TORCH_CHECK(call.keys < (int64_t(1) << 30), "windows are counted in 32 bits: at most 2^30 tokens");
  STD_TORCH_CHECK(left >= 0 && right >= 0, "left and right must not be negative");
  call.left = left < call.keys ? left : call.keys;
  call.right = right < call.keys ? right : call.keys;
  call.causal = causal;
  if (shared) {
    STD_TORCH_CHECK(shared->dim() == 2, "shared must have 2 axes");
    call.shared_count = shared->size(1);
    call.shared = packed<int64_t>("shared", *shared, {call.items, call.shared_count});
    for (int64_t i = 0; i < call.items * call.shared_count; ++i)
      STD_TORCH_CHECK(call.shared[i] >= -1 && call.shared[i] < call.keys, "shared holds a position beyond the keys");
  }
  return call;
}

SoftmaxOutputs forward(Tensor q, Tensor k, Tensor v, Optional keep, Optional shared, int64_t left, int64_t right,
                       bool causal, double scale) {
  return with_wide_type("q", q, [&]<class T>() {
    Window<T> call = describe<T>(q, k, v, keep, shared, left, right, causal, scale);
    const SoftmaxOutputs made = make_outputs(call);
    const WindowKernels<T>& use = kernels().of<T>().window;
    in_parallel<T>(use.tasks(call, false), 1, use.scratch(call, false),
                   [&](int64_t begin, int64_t end, T* scratch) { use.forward(call, begin, end, scratch); });
    return made;
  });
}

SoftmaxGradients backward(Tensor grad, Tensor lse_grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor top,
                          Tensor total, Optional keep, Optional shared, int64_t left, int64_t right, bool causal,
                          double scale) {
  return with_type("q", q, [&]<class T>() {
    Window<T> call = describe<T>(q, k, v, keep, shared, left, right, causal, scale);
    read_outputs(call, grad, lse_grad, out, top, total);
    const SoftmaxGradients made = make_gradients(call);
    const WindowKernels<T>& use = kernels().of<T>().window;
    in_parallel<T>(use.tasks(call, true), 1, use.scratch(call, true),
                   [&](int64_t begin, int64_t end, T* scratch) { use.backward(call, begin, end, scratch); });
    return made;
  });
}

template <class E>
std::tuple<Tensor, Tensor> attend_last(const Tensor& q, const Tensor& k, const Tensor& v, int64_t left, int64_t first,
                                       double scale) {
  using T = Wide<E>;
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k and v must have 4 axes");
  WindowStep<E> call{};
  call.items = q.size(0), call.heads = q.size(1), call.queries = q.size(2), call.depth = q.size(3);
  call.keys = k.size(2), call.width = v.size(3);
  const int64_t b = call.items, h = call.heads, n = call.queries, kv = k.size(1);
  STD_TORCH_CHECK(call.keys < (int64_t(1) << 30), "windows are counted in 32 bits: at most 2^30 tokens");
  STD_TORCH_CHECK(kv >= 1 && h % kv == 0, "the heads of q must be a multiple of those of k");
  STD_TORCH_CHECK(n <= call.keys, "q has more tokens than k");
  STD_TORCH_CHECK(left >= 0 && first >= 0, "left and first must not be negative");
  call.groups = h / kv, call.scale = T(scale);
  call.left = std::min(left, call.keys), call.first = std::min(first, call.keys);
  call.q = tokens<E>("q", q, b, h, n, call.depth);
  call.k = tokens<E>("k", k, b, kv, call.keys, call.depth);
  call.v = tokens<E>("v", v, b, kv, call.keys, call.width);
  Tensor out = fresh({b, h, n, call.width}, type_of<E>()), lse = fresh({b, h, n}, type_of<T>());
  call.out = static_cast<E*>(out.mutable_data_ptr()), call.lse = lse.mutable_data_ptr<T>();
  const WindowStepKernels<E>& use = kernels().stored<E>().window_step;
  in_parallel<T>(b * h * n, 1, use.scratch(call),
                 [&](int64_t begin, int64_t end, T* scratch) { use.forward(call, begin, end, scratch); });
  return {out, lse};
}

std::tuple<Tensor, Tensor> step(Tensor q, Tensor k, Tensor v, int64_t left, int64_t first, double scale) {
  return with_stored_type("q", q, [&]<class E>() { return attend_last<E>(q, k, v, left, first, scale); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparing, CPU, library) {
  library.impl("window", TORCH_BOX(&forward));
  library.impl("window_backward", TORCH_BOX(&backward));
  library.impl("window_step", TORCH_BOX(&step));
}

}  // namespace sparing
