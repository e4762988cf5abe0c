#include "common/softmax_tensors.h"
#include "kernels.h"

namespace sparing {
namespace {

using Optional = std::optional<Tensor>;

template <class T>
Attend<T> describe(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& keep, const Optional& bias,
                   double scale) {
  Attend<T> call{};
  read_inputs(call, q, k, v, keep, scale);
  call.bias = bias ? packed<T>("bias", *bias, {call.items, call.keys}) : nullptr;
  return call;
}

SoftmaxOutputs forward(Tensor q, Tensor k, Tensor v, Optional keep, Optional bias, double scale) {
  return with_wide_type("q", q, [&]<class T>() {
    Attend<T> call = describe<T>(q, k, v, keep, bias, scale);
    const SoftmaxOutputs made = make_outputs(call);
    const AttendKernels<T>& use = kernels().of<T>().attend;
    in_parallel<T>(use.tasks(call, false), 1, use.scratch(call, false),
                   [&](int64_t begin, int64_t end, T* scratch) { use.forward(call, begin, end, scratch); });
    return made;
  });
}

SoftmaxGradients backward(Tensor grad, Tensor lse_grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor top,
                          Tensor total, Optional keep, Optional bias, double scale) {
  return with_type("q", q, [&]<class T>() {
    Attend<T> call = describe<T>(q, k, v, keep, bias, scale);
    read_outputs(call, grad, lse_grad, out, top, total);
    const SoftmaxGradients made = make_gradients(call);
    const AttendKernels<T>& use = kernels().of<T>().attend;
    in_parallel<T>(use.tasks(call, true), 1, use.scratch(call, true),
                   [&](int64_t begin, int64_t end, T* scratch) { use.backward(call, begin, end, scratch); });
    return made;
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparing, CPU, library) {
  library.impl("attend", TORCH_BOX(&forward));
  library.impl("attend_backward", TORCH_BOX(&backward));
}

}  // namespace sparing
