#include <cstring>

#include "kernels.h"
#include "yoso/sampling.h"

namespace sparing {
namespace {

using Optional = std::optional<Tensor>;
using Numbers = std::vector<int64_t>;

constexpr int64_t kRowsOfATask = 256;

int64_t hashes_at_once(int64_t hashes) { return hashes < kHashesAtOnce ? hashes : kHashesAtOnce; }

Tensor codes(Tensor x, Tensor streams, Tensor bits, int64_t seed, Numbers purposes, int64_t hashes, bool gaussian) {
  return with_wide_type("x", x, [&]<class T>() {
    STD_TORCH_CHECK(x.dim() == 4, "x must have 4 axes");
    const int64_t items = x.size(0), heads = x.size(1), count = x.size(2), depth = x.size(3);
    const Sampling sampling(streams, bits, seed, purposes, hashes, gaussian, items, heads, depth);
    const Side<T> side(stored<T>("x", x, items, heads, count, depth), nullptr, items, heads, count,
                       hashes_at_once(hashes));
    Tensor out = fresh({items, heads, count, hashes}, ScalarType::Long);
    int64_t *to = out.mutable_data_ptr<int64_t>(), done = 0;
    for (const Chunk& chunk : sampling.chunks) {
      hash_sides<T>(sampling, chunk, items, heads, depth, {&side});
      for (int64_t unit = 0; unit < items * heads; ++unit)
        for (int64_t h = 0; h < chunk.hashes; ++h)
          for (int64_t t = 0; t < count; ++t)
            to[(unit * count + t) * hashes + done + h] = side.coded.codes[(unit * chunk.hashes + h) * count + t];
      done += chunk.hashes;
    }
    return out;
  });
}

// The checked tensors and sampling settings of a call.
template <class T>
struct Call {
  int64_t items, heads, queries, keys, depth, width;
  Sampling sampling;
  Side<T> q, k;

  Call(const Tensor& q_, const Tensor& k_, int64_t width, const Optional& keep, const Tensor& streams,
       const Tensor& bits, int64_t seed, const Numbers& purposes, int64_t hashes, bool gaussian)
      : items(axis("q", q_, 0)),
        heads(q_.size(1)),
        queries(q_.size(2)),
        keys(axis("k", k_, 2)),
        depth(q_.size(3)),
        width(width),
        sampling(streams, bits, seed, purposes, hashes, gaussian, items, heads, depth),
        q(stored<T>("q", q_, items, heads, queries, depth), nullptr, items, heads, queries, hashes_at_once(hashes)),
        k(stored<T>("k", k_, items, heads, keys, depth), mask("keep", keep, items, keys), items, heads, keys,
          hashes_at_once(hashes)) {}

  static int64_t axis(const char* name, const Tensor& tensor, int64_t which) {
    STD_TORCH_CHECK(tensor.dim() == 4, name, " must have 4 axes");
    return tensor.size(which);
  }

  TableSums<T> sums(const Side<T>& from, const Side<T>& to, const Chunk& chunk, Order order, T* out) const {
    TableSums<T> sums{};
    sums.from = from.coded, sums.to = to.coded;
    sums.items = items, sums.heads = heads, sums.width = width, sums.hashes = chunk.hashes;
    sums.bits = sampling.bits.data(), sums.most_bits = sampling.most_bits;
    sums.order = order;
    sums.factor = T(1) / T(sampling.hashes);
    sums.add = &chunk != &sampling.chunks.front();
    sums.out = out;
    return sums;
  }
};

template <class T>
void run(const TableSums<T>& sums) {
  const YosoKernels<T>& use = kernels().of<T>().yoso;
  in_parallel<T>(use.table_tasks(sums), 1, use.table_scratch(sums),
                 [&](int64_t begin, int64_t end, T* scratch) { use.table_sums(sums, begin, end, scratch); });
}

std::tuple<Tensor, Tensor> forward(Tensor q, Tensor k, Tensor v, Optional keep, Tensor streams, Tensor bits,
                                   int64_t seed, Numbers purposes, int64_t hashes, bool gaussian, bool causal,
                                   bool exact, std::optional<double> unit) {
  static_cast<void>(exact);  // only the backward pass depends on it
  return with_wide_type("q", q, [&]<class T>() {
    STD_TORCH_CHECK(v.dim() == 4, "v must have 4 axes");
    const Call<T> call(q, k, v.size(3), keep, streams, bits, seed, purposes, hashes, gaussian);
    Tensor out = fresh({call.items, call.heads, call.queries, call.width}, type_of<T>());
    for (const Chunk& chunk : call.sampling.chunks) {
      hash_sides<T>(call.sampling, chunk, call.items, call.heads, call.depth, {&call.q, &call.k});
      TableSums<T> sums =
          call.sums(call.k, call.q, chunk, causal ? Order::past : Order::all, out.mutable_data_ptr<T>());
      sums.values.x = stored<T>("v", v, call.items, call.heads, call.keys, call.width);
      run(sums);
    }
    if (!unit) return std::make_tuple(out, fresh({0}, type_of<T>()));
    Tensor inverse = fresh({call.items, call.heads, call.queries}, type_of<T>());
    const UnitRows<T> rows{out.mutable_data_ptr<T>(), call.width, *unit, inverse.mutable_data_ptr<T>()};
    torch::stable::parallel_for(
        0, call.items * call.heads * call.queries, kRowsOfATask,
        [&](int64_t begin, int64_t end) { kernels().of<T>().yoso.unit_rows(rows, begin, end); });
    return std::make_tuple(out, inverse);
  });
}

template <class T>
void run(const PairSums<T>& sums) {
  const YosoKernels<T>& use = kernels().of<T>().yoso;
  in_parallel<T>(sums.items * sums.heads, 1, use.pair_scratch(sums),
                 [&](int64_t begin, int64_t end, T* scratch) { use.pair_sums(sums, begin, end, scratch); });
}

// Returns the gradient of the sums, given that of the output. `out` and `inverse` come from the forward pass.
template <class T>
Values<T> gradient_of_sums(const Call<T>& call, const Tensor& grad, const Optional& out, const Optional& inverse,
                           bool unit, std::vector<double>& along) {
  Values<T> values{};
  values.x = stored<T>("grad", grad, call.items, call.heads, call.queries, call.width);
  check_wide("grad", values.x);
  if (!unit) return values;
  STD_TORCH_CHECK(out && inverse, "out and inverse must be given for rows of unit length");
  values.heads = call.heads, values.tokens = call.queries, values.width = call.width;
  values.unit = tokens<T>("out", *out, call.items, call.heads, call.queries, call.width);
  values.inverse = packed<T>("inverse", *inverse, {call.items, call.heads, call.queries});
  along.resize(size_t(call.items * call.heads * call.queries));
  values.along = along.data();
  torch::stable::parallel_for(0, int64_t(along.size()), kRowsOfATask, [&](int64_t begin, int64_t end) {
    kernels().of<T>().yoso.find_along(values, begin, end);
  });
  return values;
}

// Returns an empty tensor if the gradient is not wanted. Padded tokens are set to zero here, all others later.
template <class T>
Tensor gradient(bool wanted, bool padded, int64_t items, int64_t heads, int64_t count, int64_t width) {
  if (!wanted) return fresh({0}, type_of<T>());
  Tensor grad = fresh({items, heads, count, width}, type_of<T>());
  if (padded) std::memset(grad.mutable_data_ptr<T>(), 0, size_t(items * heads * count * width) * sizeof(T));
  return grad;
}

std::tuple<Tensor, Tensor, Tensor> backward(Tensor grad, Optional out, Optional inverse, Tensor q, Tensor k, Tensor v,
                                            Optional keep, Tensor streams, Tensor bits, int64_t seed, Numbers purposes,
                                            int64_t hashes, bool gaussian, bool causal, bool exact,
                                            std::optional<double> unit, bool to_q, bool to_k, bool to_v) {
  return with_type("q", q, [&]<class T>() {
    STD_TORCH_CHECK(v.dim() == 4, "v must have 4 axes");
    const Call<T> call(q, k, v.size(3), keep, streams, bits, seed, purposes, hashes, gaussian);
    const StoredTokens<T> values = stored<T>("v", v, call.items, call.heads, call.keys, call.width);
    check_wide("q", call.q.x), check_wide("k", call.k.x), check_wide("v", values);
    std::vector<double> along;
    const Values<T> grads = gradient_of_sums(call, grad, out, inverse, unit.has_value(), along);
    const bool padded = keep.has_value();
    Tensor grad_q = gradient<T>(to_q, false, call.items, call.heads, call.queries, call.depth);
    Tensor grad_k = gradient<T>(to_k, padded, call.items, call.heads, call.keys, call.depth);
    Tensor grad_v = gradient<T>(to_v, padded, call.items, call.heads, call.keys, call.width);
    for (const Chunk& chunk : call.sampling.chunks) {
      hash_sides<T>(call.sampling, chunk, call.items, call.heads, call.depth, {&call.q, &call.k});
      if (to_v) {
        TableSums<T> sums =
            call.sums(call.q, call.k, chunk, causal ? Order::future : Order::all, grad_v.mutable_data_ptr<T>());
        sums.values = grads;
        run(sums);
      }
      if (!to_q && !to_k) continue;
      PairSums<T> pairs{};
      pairs.queries = call.q.coded, pairs.keys = call.k.coded;
      pairs.grads = grads, pairs.values.x = values, pairs.q = call.q.x, pairs.k = call.k.x;
      pairs.items = call.items, pairs.heads = call.heads, pairs.depth = call.depth, pairs.width = call.width;
      pairs.hashes = chunk.hashes, pairs.bits = call.sampling.bits.data(), pairs.most_bits = call.sampling.most_bits;
      pairs.causal = causal, pairs.exact = exact;
      pairs.factor = (exact ? 1.0 : 0.5) / double(call.sampling.hashes);
      pairs.add = &chunk != &call.sampling.chunks.front(), pairs.last = &chunk == &call.sampling.chunks.back();
      pairs.grad_q = to_q ? grad_q.mutable_data_ptr<T>() : nullptr;
      pairs.grad_k = to_k ? grad_k.mutable_data_ptr<T>() : nullptr;
      run(pairs);
    }
    return std::make_tuple(grad_q, grad_k, grad_v);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparing, CPU, library) {
  library.impl("yoso_codes", TORCH_BOX(&codes));
  library.impl("yoso", TORCH_BOX(&forward));
  library.impl("yoso_backward", TORCH_BOX(&backward));
}

}  // namespace sparing
