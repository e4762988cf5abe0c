#include <atomic>

#include "attend/blocks.h"
#include "common/softmax_tensors.h"
#include "kernels.h"

namespace sparing {
namespace {

using Optional = std::optional<Tensor>;

template <class T>
Attend<T> describe(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& keep, const Optional& bias,
                   double scale) {
  Attend<T> call{};
  read_inputs(call, q, k, v, keep, scale, true);
  call.bias = bias ? packed<T>("bias", *bias, {call.items, call.keys}) : nullptr;
  return call;
}

SoftmaxOutputs forward(Tensor q, Tensor k, Tensor v, Optional keep, Optional bias, double scale, bool causal,
                       Optional offsets) {
  return with_wide_type("q", q, [&]<class T>() {
    Attend<T> call = describe<T>(q, k, v, keep, bias, scale);
    call.causal = causal;
    const Blocks blocks(call, offsets);
    const SoftmaxOutputs made = make_outputs(call);
    const AttendKernels<T>& use = kernels().of<T>().attend;
    // Blocks differ in length: each thread takes the next one when it is done.
    const int64_t tasks = use.tasks(call, false), threads = torch::stable::get_num_threads();
    std::atomic<int64_t> next{0};
    in_parallel<T>(std::min(tasks, threads), 1, use.scratch(call, false), [&](int64_t, int64_t, T* scratch) {
      for (int64_t task; (task = next.fetch_add(1)) < tasks;) use.forward(call, task, task + 1, scratch);
    });
    return made;
  });
}

SoftmaxGradients backward(Tensor grad, Tensor lse_grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor top,
                          Tensor total, Optional keep, Optional bias, double scale) {
  return with_type("q", q, [&]<class T>() {
    Attend<T> call = describe<T>(q, k, v, keep, bias, scale);
    STD_TORCH_CHECK(call.groups == 1, "gradients need as many heads of k as of q");
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
