#include <algorithm>

#include "common/tensors.h"
#include "kernels.h"

namespace sparing {
namespace {

using Optional = std::optional<Tensor>;

std::tuple<Tensor, Tensor> received(Tensor q, Tensor k, Optional keep, Optional counted, double scale) {
  return with_type("q", q, [&]<class T>() {
    STD_TORCH_CHECK(q.dim() == 4, "q must have 4 axes");
    STD_TORCH_CHECK(k.dim() == 4, "k must have 4 axes");
    Received<T> call{};
    call.items = q.size(0), call.heads = q.size(1), call.queries = q.size(2), call.depth = q.size(3);
    call.keys = k.size(2);
    STD_TORCH_CHECK(call.keys < (int64_t(1) << 30), "k: keys are numbered in 32 bits, at most 2^30 of them");
    call.scale = T(scale);
    call.q = tokens<T>("q", q, call.items, call.heads, call.queries, call.depth);
    call.k = tokens<T>("k", k, call.items, call.heads, call.keys, call.depth);
    call.keep = mask("keep", keep, call.items, call.keys);
    call.counted = mask("counted", counted, call.items, call.queries);
    // With few heads, several tasks share the queries of a head; a maximum does not depend on the order.
    const int64_t units = call.items * call.heads;
    call.parts = units >= 8 || units == 0 ? 1 : 8 / units;
    Tensor parts = fresh({call.items, call.heads, call.parts, call.keys}, type_of<T>());
    Tensor largest = fresh({call.items, call.heads, call.keys}, type_of<T>());
    Tensor lse = fresh({call.items, call.heads, call.queries}, type_of<T>());
    call.largest = parts.mutable_data_ptr<T>();
    call.lse = lse.mutable_data_ptr<T>();
    const ReceivedKernels<T>& use = kernels().of<T>().received;
    in_parallel<T>(units * call.parts, 1, use.scratch(call),
                   [&](int64_t begin, int64_t end, T* scratch) { use.forward(call, begin, end, scratch); });
    T* to = largest.mutable_data_ptr<T>();
    for (int64_t unit = 0; unit < units; ++unit)
      for (int64_t j = 0; j < call.keys; ++j) {
        const T* from = call.largest + unit * call.parts * call.keys + j;
        T most = from[0];
        for (int64_t p = 1; p < call.parts; ++p) most = std::max(most, from[p * call.keys]);
        to[unit * call.keys + j] = most;
      }
    return std::make_tuple(largest, lse);
  });
}

// The tokens of each head by decreasing count, in chunks that hold either exact tokens only or none.
struct Arrangement {
  std::vector<TokenSlot> order;
  std::vector<int64_t> most;
  std::vector<TokenChunk> chunks;
};

template <class T>
Arrangement arrange(const SampledProjection<T>& call, int64_t chunk) {
  const int64_t d = call.features, all = call.items * call.tokens;
  Arrangement found;
  found.order.resize(size_t(call.heads * all));
  for (int64_t head = 0; head < call.heads; ++head) {
    const auto value = [&](int64_t item, int64_t token) { return (item * call.heads + head) * call.tokens + token; };
    std::vector<int64_t> begins(size_t(d) + 2, 0);  // where the tokens with d samples begin, those with d - 1, ...
    for (int64_t i = 0; i < call.items; ++i)
      for (int64_t j = 0; j < call.tokens; ++j) ++begins[size_t(d - call.counts[value(i, j)] + 1)];
    const int64_t exact = begins[1];
    for (int64_t r = 0; r <= d; ++r) begins[size_t(r + 1)] += begins[size_t(r)];
    TokenSlot* mine = found.order.data() + head * all;
    for (int64_t i = 0; i < call.items; ++i)
      for (int64_t j = 0; j < call.tokens; ++j)
        mine[begins[size_t(d - call.counts[value(i, j)])]++] = {i * call.tokens + j, value(i, j)};
    found.most.push_back(exact < all ? call.counts[mine[exact].value] : 0);
    for (int64_t first = 0; first < all;) {
      const int64_t end = first < exact ? exact : all, size = std::min(chunk, end - first);
      found.chunks.push_back({head, first, size, call.counts[mine[first].value]});
      first += size;
    }
  }
  return found;
}

Tensor project(Tensor x, Tensor weight, Optional bias, Tensor counts, Tensor ranks, Tensor streams, int64_t seed,
               int64_t purpose, bool shared, bool stratified) {
  return with_type("x", x, [&]<class T>() {
    STD_TORCH_CHECK(x.dim() == 3, "x must have 3 axes");
    STD_TORCH_CHECK(weight.dim() == 2, "weight must have 2 axes");
    STD_TORCH_CHECK(counts.dim() == 3, "counts must have 3 axes");
    SampledProjection<T> call{};
    call.items = x.size(0), call.tokens = x.size(1), call.features = x.size(2), call.heads = counts.size(1);
    STD_TORCH_CHECK(call.features > 0 && call.features < (int64_t(1) << 24), "x must have 1 to 2^24 - 1 features");
    STD_TORCH_CHECK(call.heads > 0 && weight.size(0) % call.heads == 0, "weight must have equally many rows per head");
    call.width = weight.size(0) / call.heads;
    const int64_t b = call.items, h = call.heads, n = call.tokens, d = call.features;
    call.x = packed<T>("x", x, {b, n, d});
    call.weight = packed<T>("weight", weight, {h * call.width, d});
    call.bias = bias ? packed<T>("bias", *bias, {h * call.width}) : nullptr;
    call.counts = packed<int64_t>("counts", counts, {b, h, n});
    call.ranks = packed<int64_t>("ranks", ranks, {b, h, n});
    call.streams = packed<int64_t>("streams", streams, {h});
    for (int64_t i = 0; i < b * h * n; ++i) {
      STD_TORCH_CHECK(call.counts[i] >= 0 && call.counts[i] <= d, "counts holds a number beyond the features");
      STD_TORCH_CHECK(call.ranks[i] >= 0 && call.ranks[i] < (int64_t(1) << 38), "ranks holds a number out of range");
    }
    call.seed = uint64_t(seed), call.purpose = uint32_t(purpose);
    call.shared = shared, call.stratified = stratified;
    const ProjectionKernels<T>& use = kernels().of<T>().projection;
    Tensor out = fresh({b, h, n, call.width}, type_of<T>());
    Tensor rows = fresh({h, use.row_entries(call)}, type_of<T>());
    Tensor inverse = fresh({h, d}, type_of<T>());
    Tensor ladder = fresh({h, d}, ScalarType::Double);
    Tensor starts = fresh({h, kStarts}, ScalarType::Int);
    Tensor list = fresh({h, d}, ScalarType::Int);
    const bool listed = shared && !stratified;  // strata depend on a token's own count
    Tensor listed_rows = fresh({h, listed ? use.row_entries(call) : 0}, type_of<T>());
    call.out = out.mutable_data_ptr<T>();
    call.rows = rows.mutable_data_ptr<T>();
    call.inverse = inverse.mutable_data_ptr<T>();
    call.ladder = ladder.mutable_data_ptr<double>();
    call.starts = starts.mutable_data_ptr<int32_t>();
    call.list = list.mutable_data_ptr<int32_t>();
    call.listed = listed ? listed_rows.mutable_data_ptr<T>() : nullptr;
    const Arrangement plan = arrange(call, use.chunk);
    call.order = plan.order.data(), call.most = plan.most.data();
    const int64_t scratch_size = use.scratch(call);
    in_parallel<T>(h, 1, scratch_size,
                   [&](int64_t begin, int64_t end, T* scratch) { use.prepare(call, begin, end, scratch); });
    in_parallel<T>(int64_t(plan.chunks.size()), 1, scratch_size, [&](int64_t begin, int64_t end, T* scratch) {
      for (int64_t i = begin; i < end; ++i) use.project(call, &plan.chunks[size_t(i)], scratch);
    });
    return out;
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparing, CPU, library) {
  library.impl("received", TORCH_BOX(&received));
  library.impl("sampled_projection", TORCH_BOX(&project));
}

}  // namespace sparing
