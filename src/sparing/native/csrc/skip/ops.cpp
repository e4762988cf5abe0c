#include <atomic>

#include "attend/blocks.h"
#include "kernels.h"

namespace sparing {
namespace {

using Optional = std::optional<Tensor>;
using Outputs = std::tuple<Tensor, Tensor, Tensor, Tensor>;

void check_setting(double threshold, int64_t stride) {
  STD_TORCH_CHECK(threshold > 0 && threshold <= 1, "threshold must be above 0 and at most 1");
  STD_TORCH_CHECK(stride >= 1 && stride <= kAttendKeys, "stride must be from 1 to ", kAttendKeys);
}

Outputs forward(Tensor q, Tensor k, Tensor v, Optional keep, Optional leading, Optional offsets, double threshold,
                int64_t stride, double scale, bool causal) {
  check_setting(threshold, stride);
  return with_wide_type("q", q, [&]<class T>() -> Outputs {
    Skip<T> call{};
    read_inputs(call, q, k, v, keep, scale, true);
    call.causal = causal, call.threshold = T(threshold), call.stride = stride;
    for (int64_t c = 0; c < kAttendKeys; ++c) call.stands[c] = c % stride == stride - 1;
    STD_TORCH_CHECK(!leading || !offsets, "leading and offsets do not go together");
    const Blocks blocks(call, offsets, leading);
    call.order = leading ? blocks.order.data() : nullptr;
    const SoftmaxOutputs made = make_outputs(call);
    Tensor left = fresh({call.items, call.heads, call.queries}, type_of<T>());
    Tensor touched = fresh({call.items, call.heads, call.queries}, type_of<T>());
    call.left = left.mutable_data_ptr<T>(), call.touched = touched.mutable_data_ptr<T>();
    const SkipKernels<T>& use = kernels().of<T>().skip;
    // Blocks differ in length: each thread takes the next one when it is done.
    const int64_t tasks = call.heads * call.block_count, threads = torch::stable::get_num_threads();
    std::atomic<int64_t> next{0};
    in_parallel<T>(std::min(tasks, threads), 1, use.scratch(call), [&](int64_t, int64_t, T* scratch) {
      for (int64_t task; (task = next.fetch_add(1)) < tasks;) use.forward(call, task, task + 1, scratch);
    });
    return {std::get<0>(made), std::get<1>(made), left, touched};
  });
}

template <class E>
Outputs attend_last(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& keep, double threshold,
                    int64_t stride, double scale) {
  using T = Wide<E>;
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k and v must have 4 axes");
  check_setting(threshold, stride);
  SkipStep<E> call{};
  call.items = q.size(0), call.heads = q.size(1), call.queries = q.size(2), call.depth = q.size(3);
  call.keys = k.size(2), call.width = v.size(3);
  const int64_t b = call.items, h = call.heads, n = call.queries, kv = k.size(1);
  STD_TORCH_CHECK(kv >= 1 && h % kv == 0, "the heads of q must be a multiple of those of k");
  STD_TORCH_CHECK(n <= call.keys, "q has more tokens than k");
  call.groups = h / kv, call.scale = T(scale), call.threshold = T(threshold), call.stride = stride;
  call.q = tokens<E>("q", q, b, h, n, call.depth);
  call.k = tokens<E>("k", k, b, kv, call.keys, call.depth);
  call.v = tokens<E>("v", v, b, kv, call.keys, call.width);
  const uint8_t* valid = mask("keep", keep, b, call.keys);
  std::vector<int64_t> place(valid ? b * call.keys : 0), seen(b * n);
  for (int64_t item = 0; item < b; ++item) {
    int64_t count = 0;
    for (int64_t j = 0; j < call.keys; ++j) {
      const bool there = !valid || valid[item * call.keys + j];
      if (valid && there) place[item * call.keys + count] = j;
      count += there;
      const int64_t own = j - (call.keys - n);
      if (own >= 0) seen[item * n + own] = there ? count : 0;  // rows of padding see nothing
    }
  }
  call.place = valid ? place.data() : nullptr, call.seen = seen.data();
  Tensor out = fresh({b, h, n, call.width}, type_of<E>()), lse = fresh({b, h, n}, type_of<T>());
  Tensor left = fresh({b, h, n}, type_of<T>()), touched = fresh({b, h, n}, type_of<T>());
  call.out = static_cast<E*>(out.mutable_data_ptr()), call.lse = lse.mutable_data_ptr<T>();
  call.left = left.mutable_data_ptr<T>(), call.touched = touched.mutable_data_ptr<T>();
  const SkipStepKernels<E>& use = kernels().stored<E>().skip_step;
  in_parallel<T>(b * h * n, 1, use.scratch(call),
                 [&](int64_t begin, int64_t end, T* scratch) { use.forward(call, begin, end, scratch); });
  return {out, lse, left, touched};
}

Outputs step(Tensor q, Tensor k, Tensor v, Optional keep, double threshold, int64_t stride, double scale) {
  return with_stored_type("q", q, [&]<class E>() { return attend_last<E>(q, k, v, keep, threshold, stride, scale); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparing, CPU, library) {
  library.impl("skip", TORCH_BOX(&forward));
  library.impl("skip_step", TORCH_BOX(&step));
}

}  // namespace sparing
