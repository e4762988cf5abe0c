#include <algorithm>
#include <atomic>
#include <vector>

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

// The blocks of queries of a call, and the positions of its visible keys.
struct Blocks {
  std::vector<AttendBlock> blocks;
  std::vector<int64_t> valid, before;

  template <class T>
  Blocks(Attend<T>& call, const Optional& offsets) {
    if (call.keep || call.bias) list_valid(call);
    const int64_t one[] = {0, call.queries};
    const int64_t *bounds = one, sequences = offsets ? read_offsets(call, *offsets, &bounds) : 1;
    // Every thread should find some blocks; larger ones read the keys less often.
    const int64_t threads = torch::stable::get_num_threads();
    const int64_t share = call.items * call.heads * call.queries / (4 * threads);
    const int64_t size = share < kAttendBlock ? kAttendBlock / 2 : kAttendBlock;
    for (int64_t item = 0; item < call.items; ++item)
      for (int64_t s = 0; s < sequences; ++s) {
        const int64_t start = offsets ? bounds[s] : 0, stop = offsets ? bounds[s + 1] : call.keys;
        for (int64_t first = bounds[s]; first < bounds[s + 1]; first += size)
          blocks.push_back({item, start, stop, first, std::min(size, bounds[s + 1] - first)});
      }
    // The longest ones first, so that threads end together.
    std::stable_sort(blocks.begin(), blocks.end(),
                     [&](const AttendBlock& a, const AttendBlock& b) { return work(call, a) > work(call, b); });
    call.blocks = blocks.data(), call.block_count = int64_t(blocks.size());
  }

 private:
  template <class T>
  void list_valid(Attend<T>& call) {
    valid.resize(call.items * call.keys), before.resize(call.items * (call.keys + 1));
    for (int64_t item = 0; item < call.items; ++item) {
      int64_t count = 0;
      for (int64_t j = 0; j < call.keys; ++j) {
        before[item * (call.keys + 1) + j] = count;
        if (call.sees(item, j)) valid[item * call.keys + count++] = j;
      }
      before[item * (call.keys + 1) + call.keys] = count;
    }
    call.valid = valid.data(), call.valid_before = before.data();
  }

  template <class T>
  static int64_t read_offsets(const Attend<T>& call, const Tensor& offsets, const int64_t** bounds) {
    STD_TORCH_CHECK(offsets.dim() == 1 && offsets.size(0) >= 1, "offsets must have one axis and an entry");
    const int64_t sequences = offsets.size(0) - 1;
    *bounds = packed<int64_t>("offsets", offsets, {sequences + 1});
    STD_TORCH_CHECK(call.items == 1, "offsets need a batch of 1");
    STD_TORCH_CHECK(call.queries == call.keys, "offsets need as many queries as keys");
    STD_TORCH_CHECK((*bounds)[0] == 0 && (*bounds)[sequences] == call.keys,
                    "offsets must go from 0 to the number of tokens");
    for (int64_t s = 0; s < sequences; ++s) STD_TORCH_CHECK((*bounds)[s] <= (*bounds)[s + 1], "offsets must not fall");
    return sequences;
  }

  // Returns how many keys the queries of a block see.
  template <class T>
  int64_t work(const Attend<T>& call, const AttendBlock& block) const {
    const int64_t last = block.first + block.count, stop = call.causal ? std::min(last, block.stop) : block.stop;
    const int64_t* ranks = valid.empty() ? nullptr : before.data() + block.item * (call.keys + 1);
    return block.count * (ranks ? ranks[stop] - ranks[block.start] : stop - block.start);
  }
};

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
