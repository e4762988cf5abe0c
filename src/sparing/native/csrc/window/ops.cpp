#include "common/tensors.h"
#include "kernels.h"

namespace sparing {
namespace {

using Optional = std::optional<Tensor>;

template <class T>
Window<T> describe(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& keep, const Optional& shared,
                   int64_t left, int64_t right, bool causal, double scale) {
  STD_TORCH_CHECK(q.dim() == 4, "q must have 4 axes");
  STD_TORCH_CHECK(v.dim() == 4, "v must have 4 axes");
  Window<T> call{};
  call.items = q.size(0), call.heads = q.size(1), call.tokens = q.size(2), call.depth = q.size(3);
  call.width = v.size(3);
  STD_TORCH_CHECK(call.tokens < (int64_t(1) << 30), "windows are counted in 32 bits: at most 2^30 tokens");
  STD_TORCH_CHECK(left >= 0 && right >= 0, "left and right must not be negative");
  call.left = left < call.tokens ? left : call.tokens;
  call.right = right < call.tokens ? right : call.tokens;
  call.causal = causal;
  call.scale = T(scale);
  call.q = tokens<T>("q", q, call.items, call.heads, call.tokens, call.depth);
  call.k = tokens<T>("k", k, call.items, call.heads, call.tokens, call.depth);
  call.v = tokens<T>("v", v, call.items, call.heads, call.tokens, call.width);
  call.keep = mask("keep", keep, call.items, call.tokens);
  if (shared) {
    STD_TORCH_CHECK(shared->dim() == 2, "shared must have 2 axes");
    call.shared_count = shared->size(1);
    call.shared = packed<int64_t>("shared", *shared, {call.items, call.shared_count});
    for (int64_t i = 0; i < call.items * call.shared_count; ++i)
      STD_TORCH_CHECK(call.shared[i] >= -1 && call.shared[i] < call.tokens, "shared holds a position beyond the keys");
  }
  return call;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> forward(Tensor q, Tensor k, Tensor v, Optional keep, Optional shared,
                                                   int64_t left, int64_t right, bool causal, double scale) {
  return with_type("q", q, [&]<class T>() {
    Window<T> call = describe<T>(q, k, v, keep, shared, left, right, causal, scale);
    Tensor out = fresh({call.items, call.heads, call.tokens, call.width}, type_of<T>());
    Tensor lse = fresh({call.items, call.heads, call.tokens}, type_of<T>());
    Tensor top = fresh({call.items, call.heads, call.tokens}, type_of<T>());
    Tensor total = fresh({call.items, call.heads, call.tokens}, type_of<T>());
    call.out = out.mutable_data_ptr<T>();
    call.lse = lse.mutable_data_ptr<T>();
    call.norm = {top.mutable_data_ptr<T>(), total.mutable_data_ptr<T>()};
    const WindowKernels<T>& use = kernels().of<T>().window;
    in_parallel<T>(use.tasks(call), 1, use.scratch(call, false),
                   [&](int64_t begin, int64_t end, T* scratch) { use.forward(call, begin, end, scratch); });
    return std::make_tuple(out, lse, top, total);
  });
}

std::tuple<Tensor, Tensor, Tensor> backward(Tensor grad, Tensor lse_grad, Tensor q, Tensor k, Tensor v, Tensor out,
                                            Tensor top, Tensor total, Optional keep, Optional shared, int64_t left,
                                            int64_t right, bool causal, double scale) {
  return with_type("q", q, [&]<class T>() {
    Window<T> call = describe<T>(q, k, v, keep, shared, left, right, causal, scale);
    const int64_t b = call.items, h = call.heads, n = call.tokens;
    call.grad = tokens<T>("grad", grad, b, h, n, call.width);
    call.lse_grad = packed<T>("lse_grad", lse_grad, {b, h, n});
    call.out = const_cast<T*>(packed<T>("out", out, {b, h, n, call.width}));  // only read
    call.norm = {const_cast<T*>(packed<T>("top", top, {b, h, n})),            // only read
                 const_cast<T*>(packed<T>("total", total, {b, h, n}))};
    Tensor grad_q = fresh({b, h, n, call.depth}, type_of<T>());
    Tensor grad_k = fresh({b, h, n, call.depth}, type_of<T>());
    Tensor grad_v = fresh({b, h, n, call.width}, type_of<T>());
    call.grad_q = grad_q.mutable_data_ptr<T>();
    call.grad_k = grad_k.mutable_data_ptr<T>();
    call.grad_v = grad_v.mutable_data_ptr<T>();
    const WindowKernels<T>& use = kernels().of<T>().window;
    in_parallel<T>(b * h, 1, use.scratch(call, true),
                   [&](int64_t begin, int64_t end, T* scratch) { use.backward(call, begin, end, scratch); });
    return std::make_tuple(grad_q, grad_k, grad_v);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparing, CPU, library) {
  library.impl("window", TORCH_BOX(&forward));
  library.impl("window_backward", TORCH_BOX(&backward));
}

}  // namespace sparing
