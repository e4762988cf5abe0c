#include "common/tensors.h"
#include "kernels.h"

namespace sparing {
namespace {

std::tuple<Tensor, Tensor, Tensor> forward(Tensor q, Tensor k, Tensor v, std::optional<Tensor> keep, int64_t keys,
                                           bool causal, double scale, bool with_all) {
  return with_wide_type("q", q, [&]<class T>() {
    STD_TORCH_CHECK(q.dim() == 4, "q must have 4 axes");
    STD_TORCH_CHECK(k.dim() == 4, "k must have 4 axes");
    STD_TORCH_CHECK(v.dim() == 4, "v must have 4 axes");
    TopKeys<T> call{};
    call.items = q.size(0), call.heads = q.size(1), call.queries = q.size(2), call.depth = q.size(3);
    call.keys = k.size(2), call.width = v.size(3);
    STD_TORCH_CHECK(call.keys < (int64_t(1) << 30), "keys are numbered in 32 bits: at most 2^30 of them");
    STD_TORCH_CHECK(call.queries < (int64_t(1) << 30), "queries are numbered in 32 bits: at most 2^30 of them");
    STD_TORCH_CHECK(keys >= 1, "keys must be at least 1");
    call.chosen = keys < call.keys ? keys : call.keys;
    call.causal = causal;
    call.scale = T(scale);
    call.q = stored<T>("q", q, call.items, call.heads, call.queries, call.depth);
    call.k = stored<T>("k", k, call.items, call.heads, call.keys, call.depth);
    call.v = stored<T>("v", v, call.items, call.heads, call.keys, call.width);
    call.keep = mask("keep", keep, call.items, call.keys);
    Tensor out = fresh({call.items, call.heads, call.queries, call.width}, type_of<T>());
    Tensor lse = fresh({call.items, call.heads, call.queries}, type_of<T>());
    Tensor all_lse = fresh({call.items, call.heads, with_all ? call.queries : 0}, type_of<T>());
    call.out = out.mutable_data_ptr<T>();
    call.lse = lse.mutable_data_ptr<T>();
    call.all_lse = with_all ? all_lse.mutable_data_ptr<T>() : nullptr;
    const TopKeysKernels<T>& use = kernels().of<T>().top_keys;
    in_parallel<T>(use.tasks(call), 1, use.scratch(call),
                   [&](int64_t begin, int64_t end, T* scratch) { use.forward(call, begin, end, scratch); });
    return std::make_tuple(out, lse, all_lse);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparing, CPU, library) { library.impl("top_keys", TORCH_BOX(&forward)); }

}  // namespace sparing
