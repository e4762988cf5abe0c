#include <algorithm>
#include <cstring>
#include <limits>
#include <tuple>

#include "common/tensors.h"
#include "kernels.h"

namespace sparing {
namespace {

using Optional = std::optional<Tensor>;

std::tuple<Tensor, Tensor> received(Tensor q, Tensor k, Optional keep, Optional counted, double scale) {
  return with_wide_type("q", q, [&]<class T>() {
    STD_TORCH_CHECK(q.dim() == 4, "q must have 4 axes");
    STD_TORCH_CHECK(k.dim() == 4, "k must have 4 axes");
    Received<T> call{};
    call.items = q.size(0), call.heads = q.size(1), call.queries = q.size(2), call.depth = q.size(3);
    call.keys = k.size(2);
    STD_TORCH_CHECK(call.keys < (int64_t(1) << 30), "k: keys are numbered in 32 bits, at most 2^30 of them");
    call.scale = T(scale);
    call.q = stored<T>("q", q, call.items, call.heads, call.queries, call.depth);
    call.k = stored<T>("k", k, call.items, call.heads, call.keys, call.depth);
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

// Checks that a tensor is contiguous and has these sizes; its rows may have 16 bits if T is float.
template <class T>
StoredTokens<T> stored_rows(const char* name, const Tensor& tensor, std::initializer_list<int64_t> sizes) {
  check_sizes(name, tensor, sizes);
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
  const int64_t features = sizes.end()[-1];
  const ScalarType type = tensor.scalar_type();
  Storage storage = Storage::as_is;
  if (sizeof(T) == 4 && type == ScalarType::BFloat16) storage = Storage::bfloat16;
  if (sizeof(T) == 4 && type == ScalarType::Half) storage = Storage::float16;
  STD_TORCH_CHECK(tensor.is_cpu(), name, " must be on the CPU");
  STD_TORCH_CHECK(storage != Storage::as_is || type == type_of<T>(), name, " has the wrong dtype");
  return {tensor.const_data_ptr(), 0, 0, features, storage};
}

using Tables = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // rows, inverse, ladder, starts of ProjectionTables

template <class T>
Tables make_tables(const Tensor& weight, int64_t heads) {
  ProjectionTables<T> call{};
  call.heads = heads, call.features = weight.size(1), call.width = weight.size(0) / heads;
  call.weight = stored_rows<T>("weight", weight, {heads * call.width, call.features});
  call.weight.head_step = call.width * call.features;
  const ProjectionKernels<T>& use = kernels().of<T>().projection;
  Tensor rows = fresh({heads, use.row_entries(call.features, call.width)}, type_of<T>());
  Tensor inverse = fresh({heads, call.features}, type_of<T>());
  Tensor ladder = fresh({heads, call.features}, ScalarType::Double);
  Tensor starts = fresh({heads, kStarts}, ScalarType::Int);
  call.rows = rows.mutable_data_ptr<T>();
  call.inverse = inverse.mutable_data_ptr<T>();
  call.ladder = ladder.mutable_data_ptr<double>();
  call.starts = starts.mutable_data_ptr<int32_t>();
  in_parallel<T>(heads, 1, use.tables_scratch(call),
                 [&](int64_t begin, int64_t end, T* scratch) { use.tables(call, begin, end, scratch); });
  return {rows, inverse, ladder, starts};
}

void check_weight(const Tensor& weight, int64_t heads) {
  STD_TORCH_CHECK(weight.dim() == 2, "weight must have 2 axes");
  STD_TORCH_CHECK(weight.size(1) > 0 && weight.size(1) < (int64_t(1) << 24), "x must have 1 to 2^24 - 1 features");
  STD_TORCH_CHECK(heads > 0 && weight.size(0) % heads == 0, "weight must have equally many rows per head");
}

Tables tables(Tensor weight, int64_t heads) {
  return with_wide_type("weight", weight, [&]<class T>() {
    check_weight(weight, heads);
    return make_tables<T>(weight, heads);
  });
}

// A hash of the bytes, of which each step is invertible: weights that differ in one entry never share it.
Tensor fingerprint(Tensor weight) {
  STD_TORCH_CHECK(weight.is_cpu() && weight.is_contiguous(), "weight must be contiguous and on the CPU");
  constexpr int64_t kParts = 16, kLanes = 4, kWord = 8;
  Tensor out = fresh({kParts}, ScalarType::Long);
  int64_t* to = out.mutable_data_ptr<int64_t>();
  const char* from = static_cast<const char*>(weight.const_data_ptr());
  const int64_t bytes = weight.numel() * weight.element_size();
  const int64_t part = (bytes / kParts + kLanes * kWord) / (kLanes * kWord) * (kLanes * kWord);
  in_parallel<double>(kParts, 1, 0, [&](int64_t begin, int64_t end, double*) {
    for (int64_t p = begin; p < end; ++p) {
      uint64_t lanes[kLanes] = {1, 2, 3, 4};
      const auto mix = [&](int64_t lane, uint64_t word) {
        const uint64_t sum = lanes[lane] + word * 0xc2b2ae3d27d4eb4fu;
        lanes[lane] = (sum << 31 | sum >> 33) * 0x9e3779b185ebca87u;
      };
      const int64_t last = std::min((p + 1) * part, bytes);
      int64_t at = p * part;
      for (; at + kLanes * kWord <= last; at += kLanes * kWord)
        for (int64_t lane = 0; lane < kLanes; ++lane) {
          uint64_t word;
          std::memcpy(&word, from + at + lane * kWord, kWord);
          mix(lane, word);
        }
      for (; at < last; ++at) mix(at % kLanes, uint64_t(static_cast<unsigned char>(from[at])));
      uint64_t sum = 0;
      for (uint64_t lane : lanes) sum = (sum << 17 | sum >> 47) * 0x9e3779b185ebca87u + lane;
      to[p] = int64_t(sum);
    }
  });
  return out;
}

Tensor project(Tensor x, Tensor weight, Optional bias, Tensor counts, Tensor ranks, Tensor streams, int64_t seed,
               int64_t purpose, bool shared, bool stratified, Optional rows, Optional inverse, Optional ladder,
               Optional starts) {
  return with_wide_type("x", x, [&]<class T>() {
    STD_TORCH_CHECK(x.dim() == 3, "x must have 3 axes");
    STD_TORCH_CHECK(counts.dim() == 3, "counts must have 3 axes");
    SampledProjection<T> call{};
    call.items = x.size(0), call.tokens = x.size(1), call.features = x.size(2), call.heads = counts.size(1);
    STD_TORCH_CHECK(call.features > 0, "x must have 1 to 2^24 - 1 features");
    check_weight(weight, call.heads);
    call.width = weight.size(0) / call.heads;
    const int64_t b = call.items, h = call.heads, n = call.tokens, d = call.features;
    call.x = stored_rows<T>("x", x, {b, n, d});
    stored_rows<T>("weight", weight, {h * call.width, d});
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
    const bool given = rows && inverse && ladder && starts;
    const Tables made = given ? Tables{*rows, *inverse, *ladder, *starts} : make_tables<T>(weight, h);
    const int64_t entries = use.row_entries(d, call.width);
    call.rows = packed<T>("rows", std::get<0>(made), {h, entries});
    call.inverse = packed<T>("inverse", std::get<1>(made), {h, d});
    call.ladder = packed<double>("ladder", std::get<2>(made), {h, d});
    call.starts = packed<int32_t>("starts", std::get<3>(made), {h, kStarts});
    for (int64_t i = 0; given && i < h; ++i) {  // so that every search ends, among the features
      STD_TORCH_CHECK(call.ladder[(i + 1) * d - 1] == std::numeric_limits<double>::infinity(), "ladder has no end");
      for (int64_t s = i * kStarts; s < (i + 1) * kStarts; ++s)
        STD_TORCH_CHECK(call.starts[s] >= 0 && call.starts[s] < d, "starts holds a number beyond the features");
    }
    Tensor list = fresh({h, d}, ScalarType::Int);
    const bool listed = shared && !stratified;  // strata depend on a token's own count
    Tensor listed_rows = fresh({h, listed ? entries : 0}, type_of<T>());
    call.out = out.mutable_data_ptr<T>();
    call.list = list.mutable_data_ptr<int32_t>();
    call.listed = listed ? listed_rows.mutable_data_ptr<T>() : nullptr;
    const Arrangement plan = arrange(call, use.chunk);
    call.order = plan.order.data(), call.most = plan.most.data();
    const int64_t scratch_size = use.scratch(call);
    in_parallel<T>(listed ? h : 0, 1, scratch_size,
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
  library.impl("projection_tables", TORCH_BOX(&tables));
  library.impl("weight_fingerprint", TORCH_BOX(&fingerprint));
  library.impl("sampled_projection", TORCH_BOX(&project));
}

}  // namespace sparing
