#include "common/tensors.h"
#include "kernels.h"

namespace sparing {
namespace {

using Optional = std::optional<Tensor>;

template <class T>
Segments<T> describe(const Tensor& x, const Optional& keep, int64_t tokens, int64_t segments) {
  STD_TORCH_CHECK(x.dim() == 4, "x must have 4 axes");
  STD_TORCH_CHECK(segments >= 1, "segments must be at least 1");
  STD_TORCH_CHECK(tokens >= 0, "tokens must not be negative");
  Segments<T> call{};
  call.items = x.size(0), call.heads = x.size(1), call.width = x.size(3);
  call.tokens = tokens, call.segments = segments;
  call.keep = mask("keep", keep, call.items, tokens);
  return call;
}

Tensor means(Tensor x, Optional keep, int64_t segments) {
  return with_wide_type("x", x, [&]<class T>() {
    STD_TORCH_CHECK(x.dim() == 4, "x must have 4 axes");
    Segments<T> call = describe<T>(x, keep, x.size(2), segments);
    call.x = stored<T>("x", x, call.items, call.heads, call.tokens, call.width);
    Tensor out = fresh({call.items, call.heads, segments, call.width}, type_of<T>());
    call.out = out.mutable_data_ptr<T>();
    const SegmentKernels<T>& use = kernels().of<T>().segments;
    in_parallel<T>(call.items * call.heads, 1, use.scratch(call),
                   [&](int64_t begin, int64_t end, T* scratch) { use.means(call, begin, end, scratch); });
    return out;
  });
}

Tensor means_backward(Tensor grad, Optional keep, int64_t count) {
  return with_type("grad", grad, [&]<class T>() {
    STD_TORCH_CHECK(grad.dim() == 4, "grad must have 4 axes");
    Segments<T> call = describe<T>(grad, keep, count, grad.size(2));
    call.x = stored<T>("grad", grad, call.items, call.heads, call.segments, call.width);
    Tensor out = fresh({call.items, call.heads, count, call.width}, type_of<T>());
    call.out = out.mutable_data_ptr<T>();
    const SegmentKernels<T>& use = kernels().of<T>().segments;
    in_parallel<T>(call.items * call.heads, 1, 0,
                   [&](int64_t begin, int64_t end, T*) { use.means_backward(call, begin, end); });
    return out;
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparing, CPU, library) {
  library.impl("segment_means", TORCH_BOX(&means));
  library.impl("segment_means_backward", TORCH_BOX(&means_backward));
}

}  // namespace sparing
