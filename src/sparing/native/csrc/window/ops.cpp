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
  return with_type("q", q, [&]<class T>() {
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

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparing, CPU, library) {
  library.impl("window", TORCH_BOX(&forward));
  library.impl("window_backward", TORCH_BOX(&backward));
}

}  // namespace sparing
