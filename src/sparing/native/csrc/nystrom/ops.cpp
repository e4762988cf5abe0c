#include "common/tensors.h"
#include "kernels.h"

namespace sparing {
namespace {

template <class T>
Inverse<T> describe(const Tensor& a, const Tensor& start, int64_t steps) {
  STD_TORCH_CHECK(a.dim() == 3, "a must have 3 axes");
  STD_TORCH_CHECK(steps >= 1, "steps must be at least 1");
  Inverse<T> call{};
  call.matrices = a.size(0), call.size = a.size(1), call.steps = steps;
  call.a = packed<T>("a", a, {call.matrices, call.size, call.size});
  call.start = packed<T>("start", start, {call.matrices, call.size, call.size});
  return call;
}

Tensor forward(Tensor a, Tensor start, int64_t steps) {
  return with_type("a", a, [&]<class T>() {
    Inverse<T> call = describe<T>(a, start, steps);
    Tensor out = fresh({call.matrices, call.size, call.size}, type_of<T>());
    call.out = out.mutable_data_ptr<T>();
    const InverseKernels<T>& use = kernels().of<T>().inverse;
    in_parallel<T>(call.matrices, 1, use.scratch(call, false),
                   [&](int64_t begin, int64_t end, T* scratch) { use.forward(call, begin, end, scratch); });
    return out;
  });
}

std::tuple<Tensor, Tensor> backward(Tensor grad, Tensor a, Tensor start, int64_t steps) {
  return with_type("a", a, [&]<class T>() {
    Inverse<T> call = describe<T>(a, start, steps);
    call.grad = packed<T>("grad", grad, {call.matrices, call.size, call.size});
    Tensor grad_a = fresh({call.matrices, call.size, call.size}, type_of<T>());
    Tensor grad_start = fresh({call.matrices, call.size, call.size}, type_of<T>());
    call.grad_a = grad_a.mutable_data_ptr<T>();
    call.grad_start = grad_start.mutable_data_ptr<T>();
    const InverseKernels<T>& use = kernels().of<T>().inverse;
    in_parallel<T>(call.matrices, 1, use.scratch(call, true),
                   [&](int64_t begin, int64_t end, T* scratch) { use.backward(call, begin, end, scratch); });
    return std::make_tuple(grad_a, grad_start);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparing, CPU, library) {
  library.impl("inverse_iteration", TORCH_BOX(&forward));
  library.impl("inverse_iteration_backward", TORCH_BOX(&backward));
}

}  // namespace sparing
