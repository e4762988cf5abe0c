// The blocks of queries that exact attention and methods like it work on, and the positions of the visible keys.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "attend/call.h"
#include "common/softmax_tensors.h"

namespace sparing {

struct Blocks {
  std::vector<AttendBlock> blocks;
  std::vector<int64_t> valid, before, order;

  // leading: (items, queries), true for queries that come first, in blocks of their own; the places of a block are then
  // those of `order`.
  template <class T>
  Blocks(Attend<T>& call, const std::optional<Tensor>& offsets, const std::optional<Tensor>& leading = std::nullopt) {
    if (call.keep || call.bias) list_valid(call);
    const std::vector<int64_t> counts = list_order(call, leading);
    const int64_t one[] = {0, call.queries};
    const int64_t *bounds = one, sequences = offsets ? read_offsets(call, *offsets, &bounds) : 1;
    // Every thread should find some blocks; larger ones read the keys less often.
    const int64_t threads = torch::stable::get_num_threads();
    const int64_t share = call.items * call.heads * call.queries / (4 * threads);
    const int64_t size = share < kAttendBlock ? kAttendBlock / 2 : kAttendBlock;
    for (int64_t item = 0; item < call.items; ++item)
      for (int64_t s = 0; s < sequences; ++s) {
        const int64_t start = offsets ? bounds[s] : 0, stop = offsets ? bounds[s + 1] : call.keys;
        const int64_t middle = leading ? counts[item] : bounds[s + 1];
        for (int64_t first = bounds[s]; first < bounds[s + 1];) {
          const int64_t end = first < middle ? middle : bounds[s + 1], count = std::min(size, end - first);
          blocks.push_back({item, start, stop, first, count});
          first += count;
        }
      }
    // The longest ones first, so that threads end together.
    std::stable_sort(blocks.begin(), blocks.end(),
                     [&](const AttendBlock& a, const AttendBlock& b) { return work(call, a) > work(call, b); });
    call.blocks = blocks.data(), call.block_count = int64_t(blocks.size());
  }

 private:
  // Lists the leading queries of each item before its others, and returns how many there are of them.
  template <class T>
  std::vector<int64_t> list_order(const Attend<T>& call, const std::optional<Tensor>& leading) {
    std::vector<int64_t> counts;
    if (!leading) return counts;
    const uint8_t* leads = mask("leading", leading, call.items, call.queries);
    for (int64_t item = 0; item < call.items; ++item) {
      for (const bool wanted : {true, false}) {
        for (int64_t i = 0; i < call.queries; ++i)
          if (bool(leads[item * call.queries + i]) == wanted) order.push_back(i);
        if (wanted) counts.push_back(int64_t(order.size()) - item * call.queries);
      }
    }
    return counts;
  }

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
    int64_t last = block.first + block.count - 1;
    if (!order.empty()) last = order[block.item * call.queries + last];
    const int64_t stop = call.causal ? std::min(last + 1, block.stop) : block.stop;
    const int64_t* ranks = valid.empty() ? nullptr : before.data() + block.item * (call.keys + 1);
    return block.count * (ranks ? ranks[stop] - ranks[block.start] : stop - block.start);
  }
};

}  // namespace sparing
