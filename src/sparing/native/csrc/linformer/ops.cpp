#include "common/tensors.h"
#include "kernels.h"

namespace sparing {
namespace {

using Optional = std::optional<Tensor>;

template <class T>
Signs<T> describe(const Tensor& x, const Optional& keep, const Tensor& streams, int64_t seed, int64_t purpose,
                  int64_t tokens, int64_t slots) {
  STD_TORCH_CHECK(slots >= 1, "slots must be at least 1");
  STD_TORCH_CHECK(tokens >= 0, "tokens must not be negative");
  STD_TORCH_CHECK(purpose >= 0 && purpose <= int64_t(UINT32_MAX), "purpose must fit 32 bits");
  Signs<T> call{};
  call.items = x.size(0), call.heads = x.size(1), call.width = x.size(3);
  call.tokens = tokens, call.slots = slots;
  call.keep = mask("keep", keep, call.items, tokens);
  call.streams = packed<int64_t>("streams", streams, {call.heads});
  call.seed = uint64_t(seed);
  call.purpose = uint32_t(purpose);
  return call;
}

template <class T>
Tensor run(Signs<T> call, bool backward) {
  Tensor out = fresh({call.items, call.heads, backward ? call.tokens : call.slots, call.width}, type_of<T>());
  call.out = out.mutable_data_ptr<T>();
  const SignKernels<T>& use = kernels().of<T>().signs;
  in_parallel<T>(use.tasks(call, backward), 1, use.scratch(call, backward),
                 [&](int64_t begin, int64_t end, T* scratch) {
                   (backward ? use.backward : use.forward)(call, begin, end, scratch);
                 });
  return out;
}

Tensor forward(Tensor x, Optional keep, Tensor streams, int64_t seed, int64_t purpose, int64_t slots) {
  return with_type("x", x, [&]<class T>() {
    STD_TORCH_CHECK(x.dim() == 4, "x must have 4 axes");
    Signs<T> call = describe<T>(x, keep, streams, seed, purpose, x.size(2), slots);
    call.x = tokens<T>("x", x, call.items, call.heads, call.tokens, call.width);
    return run(call, false);
  });
}

Tensor backward(Tensor grad, Optional keep, Tensor streams, int64_t seed, int64_t purpose, int64_t count) {
  return with_type("grad", grad, [&]<class T>() {
    STD_TORCH_CHECK(grad.dim() == 4, "grad must have 4 axes");
    Signs<T> call = describe<T>(grad, keep, streams, seed, purpose, count, grad.size(2));
    call.x = tokens<T>("grad", grad, call.items, call.heads, call.slots, call.width);
    return run(call, true);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparing, CPU, library) {
  library.impl("sign_projection", TORCH_BOX(&forward));
  library.impl("sign_projection_backward", TORCH_BOX(&backward));
}

}  // namespace sparing
