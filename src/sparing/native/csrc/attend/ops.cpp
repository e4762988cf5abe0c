#include "common/tensors.h"
#include "kernels.h"

namespace sparing {
namespace {

using Optional = std::optional<Tensor>;

template <class T>
Attend<T> describe(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& keep, const Optional& bias,
                   double scale) {
  STD_TORCH_CHECK(q.dim() == 4, "q must have 4 axes");
  STD_TORCH_CHECK(k.dim() == 4, "k must have 4 axes");
  STD_TORCH_CHECK(v.dim() == 4, "v must have 4 axes");
  Attend<T> call{};
  call.items = q.size(0), call.heads = q.size(1), call.queries = q.size(2), call.depth = q.size(3);
  call.keys = k.size(2), call.width = v.size(3);
  call.scale = T(scale);
  call.q = tokens<T>("q", q, call.items, call.heads, call.queries, call.depth);
  call.k = tokens<T>("k", k, call.items, call.heads, call.keys, call.depth);
  call.v = tokens<T>("v", v, call.items, call.heads, call.keys, call.width);
  call.keep = mask("keep", keep, call.items, call.keys);
  call.bias = bias ? packed<T>("bias", *bias, {call.items, call.keys}) : nullptr;
  return call;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> forward(Tensor q, Tensor k, Tensor v, Optional keep, Optional bias,
                                                   double scale) {
  return with_type("q", q, [&]<class T>() {
    Attend<T> call = describe<T>(q, k, v, keep, bias, scale);
    Tensor out = fresh({call.items, call.heads, call.queries, call.width}, type_of<T>());
    Tensor lse = fresh({call.items, call.heads, call.queries}, type_of<T>());
    Tensor top = fresh({call.items, call.heads, call.queries}, type_of<T>());
    Tensor total = fresh({call.items, call.heads, call.queries}, type_of<T>());
    call.out = out.mutable_data_ptr<T>();
    call.lse = lse.mutable_data_ptr<T>();
    call.norm = {top.mutable_data_ptr<T>(), total.mutable_data_ptr<T>()};
    const AttendKernels<T>& use = kernels().of<T>().attend;
    in_parallel<T>(use.tasks(call, false), 1, use.scratch(call, false),
                   [&](int64_t begin, int64_t end, T* scratch) { use.forward(call, begin, end, scratch); });
    return std::make_tuple(out, lse, top, total);
  });
}

std::tuple<Tensor, Tensor, Tensor> backward(Tensor grad, Tensor lse_grad, Tensor q, Tensor k, Tensor v, Tensor out,
                                            Tensor top, Tensor total, Optional keep, Optional bias, double scale) {
  return with_type("q", q, [&]<class T>() {
    Attend<T> call = describe<T>(q, k, v, keep, bias, scale);
    const int64_t b = call.items, h = call.heads, m = call.queries;
    call.grad = tokens<T>("grad", grad, b, h, m, call.width);
    call.lse_grad = packed<T>("lse_grad", lse_grad, {b, h, m});
    call.out = const_cast<T*>(packed<T>("out", out, {b, h, m, call.width}));  // only read
    call.norm = {const_cast<T*>(packed<T>("top", top, {b, h, m})),            // only read
                 const_cast<T*>(packed<T>("total", total, {b, h, m}))};
    Tensor grad_q = fresh({b, h, m, call.depth}, type_of<T>());
    Tensor grad_k = fresh({b, h, call.keys, call.depth}, type_of<T>());
    Tensor grad_v = fresh({b, h, call.keys, call.width}, type_of<T>());
    call.grad_q = grad_q.mutable_data_ptr<T>();
    call.grad_k = grad_k.mutable_data_ptr<T>();
    call.grad_v = grad_v.mutable_data_ptr<T>();
    const AttendKernels<T>& use = kernels().of<T>().attend;
    in_parallel<T>(use.tasks(call, true), 1, use.scratch(call, true),
                   [&](int64_t begin, int64_t end, T* scratch) { use.backward(call, begin, end, scratch); });
    return std::make_tuple(grad_q, grad_k, grad_v);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparing, CPU, library) {
  library.impl("attend", TORCH_BOX(&forward));
  library.impl("attend_backward", TORCH_BOX(&backward));
}

}  // namespace sparing
