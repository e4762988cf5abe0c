#include "common/softmax_tensors.h"
#include "kernels.h"
#include "lsh/arcs.h"

namespace sparing {
namespace {

using Optional = std::optional<Tensor>;

constexpr int64_t kBlock = 512;  // least number of queries per task

Tensor buckets(Tensor x, Tensor rotations, Tensor used) {
  return with_wide_type("x", x, [&]<class T>() {
    STD_TORCH_CHECK(x.dim() == 4, "x must have 4 axes");
    STD_TORCH_CHECK(rotations.dim() == 4, "rotations must have 4 axes");
    RotationHash<T> call{};
    call.items = x.size(0), call.heads = x.size(1), call.tokens = x.size(2), call.depth = x.size(3);
    call.rows = rotations.size(1), call.rounds = rotations.size(2);
    STD_TORCH_CHECK(call.depth <= (1 << 16), "x may have at most 65536 entries per token");
    STD_TORCH_CHECK(call.rows < (1 << 30), "rotations may have at most 2^30 rows");
    call.x = stored<T>("x", x, call.items, call.heads, call.tokens, call.depth);
    call.rotations = packed<double>("rotations", rotations, {call.heads, call.rows, call.rounds, call.depth});
    call.used = packed<int64_t>("used", used, {call.items});
    for (int64_t i = 0; i < call.items; ++i)
      STD_TORCH_CHECK(call.used[i] >= 0 && call.used[i] <= call.rows, "used holds more rows than there are");
    Tensor out = fresh({call.rounds, call.items, call.heads, call.tokens}, ScalarType::Int);
    call.out = out.mutable_data_ptr<int32_t>();
    const int64_t tables = call.heads * call.rounds;
    const LshKernels<T>& use = kernels().of<T>().lsh;
    Tensor rounded = fresh({tables, use.rounded_size(call)}, ScalarType::Int);
    Tensor near = fresh({tables, call.rows, call.depth}, type_of<T>());
    std::vector<RotationBounds> bounds(static_cast<size_t>(tables));
    call.rounded = rounded.mutable_data_ptr<int32_t>();
    call.near = near.mutable_data_ptr<T>();
    call.bounds = bounds.data();
    in_parallel<int32_t>(tables, 1, 0,
                         [&](int64_t begin, int64_t end, int32_t*) { use.round_rotations(call, begin, end); });
    in_parallel<int32_t>(use.hash_tasks(call), 1, use.hash_scratch(call),
                         [&](int64_t begin, int64_t end, int32_t* scratch) { use.hash(call, begin, end, scratch); });
    return out;
  });
}

// An attention call with the buckets that decide which keys are seen.
template <class T>
struct Described {
  Lsh<T> call{};
  Rule rule{};
  int64_t buckets = 0, chunk = 0;
  const int32_t *in_q = nullptr, *in_k = nullptr;
  const uint8_t* influence = nullptr;
  std::vector<int64_t> counts;

  int64_t arc_entries() const {  // int32 entries for the arcs of one head in one round
    return 2 * call.keys + 3 * call.queries;
  }

  int64_t arc_memory() const {  // int32 entries for the arcs of one head in all rounds, and for finding them
    return call.rounds * arc_entries() + arc_scratch(buckets);
  }

  void find(int64_t unit, int64_t round, const Arcs& arcs, int32_t* scratch) const {
    const int64_t item = unit / call.heads, at = round * call.items * call.heads + unit;
    BucketsOfHead head{};
    head.in_q = in_q + at * call.queries, head.in_k = in_k + at * call.keys;
    head.keep = call.keep ? call.keep + item * call.keys : nullptr;
    head.influence = influence ? influence + item * call.queries : nullptr;
    head.queries = call.queries, head.keys = call.keys, head.count = counts[item];
    head.buckets = buckets, head.chunk = chunk;
    find_arcs(rule, head, arcs, scratch);
  }

  // Returns the arcs of one head in all rounds, which point into `memory` and are not yet set.
  std::vector<Arcs> lay_out(int32_t* memory) const {
    std::vector<Arcs> arcs;
    for (int64_t round = 0; round < call.rounds; ++round, memory += arc_entries()) {
      int32_t* rest = memory + 2 * call.keys;
      arcs.push_back({memory, memory + call.keys, rest, rest + call.queries, rest + 2 * call.queries});
    }
    return arcs;
  }

  std::vector<Arcs> arcs_of(int64_t unit, int32_t* memory) const {
    const std::vector<Arcs> arcs = lay_out(memory);
    for (int64_t round = 0; round < call.rounds; ++round)
      find(unit, round, arcs[round], memory + call.rounds * arc_entries());
    return arcs;
  }
};

int64_t beyond(const char* name, const int32_t* buckets, int64_t count) {
  int64_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    STD_TORCH_CHECK(buckets[i] >= 0, name, " holds a negative bucket");
    most = most > buckets[i] + int64_t(1) ? most : buckets[i] + int64_t(1);
  }
  STD_TORCH_CHECK(most <= (int64_t(1) << 30), name, " holds a bucket beyond 2^30");
  return most;
}

template <class T>
void describe(Described<T>& all, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& in_q,
              const Tensor& in_k, const Optional& keep, const Optional& influence, int64_t chunk, int64_t rule,
              bool once, double scale) {
  STD_TORCH_CHECK(in_q.dim() == 4, "in_q must have 4 axes");
  Lsh<T>& call = all.call;
  read_inputs(call, q, k, v, keep, scale);
  call.rounds = in_q.size(0);
  STD_TORCH_CHECK(call.queries < (int64_t(1) << 29) && call.keys < (int64_t(1) << 29),
                  "places are counted in 32 bits: at most 2^29 tokens");
  STD_TORCH_CHECK(chunk >= 1, "chunk must be positive");
  STD_TORCH_CHECK(call.rounds >= 1, "in_q must hold at least one round");
  STD_TORCH_CHECK(rule >= 0 && rule <= 2, "rule must be 0, 1 or 2");
  all.rule = Rule(rule);
  STD_TORCH_CHECK(all.rule != Rule::rank || call.queries == call.keys, "ranks need as many queries as keys");
  all.influence = mask("influence", influence, call.items, call.queries);
  all.in_q = packed<int32_t>("in_q", in_q, {call.rounds, call.items, call.heads, call.queries});
  all.in_k = packed<int32_t>("in_k", in_k, {call.rounds, call.items, call.heads, call.keys});
  const int64_t of_q = beyond("in_q", all.in_q, call.rounds * call.items * call.heads * call.queries);
  const int64_t of_k = beyond("in_k", all.in_k, call.rounds * call.items * call.heads * call.keys);
  all.buckets = of_q > of_k ? of_q : of_k;
  for (int64_t item = 0; item < call.items; ++item) {
    int64_t valid = call.keep ? 0 : call.keys;
    for (int64_t j = 0; call.keep && j < call.keys; ++j) valid += call.keep[item * call.keys + j] != 0;
    all.counts.push_back(valid);
  }
  call.counts = all.counts.data();
  all.chunk = chunk < call.keys ? chunk : (call.keys ? call.keys : 1);  // a longer chunk changes nothing
  const auto at_most_all = [&](int64_t places) { return places < call.keys ? places : call.keys; };
  call.span = at_most_all(3 * all.chunk);
  call.window = at_most_all(2 * all.chunk + (all.chunk > 512 ? all.chunk : 512));
  // In a causal call, places depend on later tokens, and so would the ends of tiles. Terms are therefore added one by
  // one: plainly, which is precise enough for a few hundred, or with compensation. Equal terms, such as those of keys
  // that count in every round, err in the same direction, so fewer of them may be added plainly.
  const bool few = once ? all.chunk <= 256 : call.rounds * at_most_all(2 * all.chunk) <= 384;
  call.in_turn = all.rule == Rule::causal && few;
  call.tile = all.rule == Rule::causal && !call.in_turn ? 1 : 48;
  call.once = once;
  call.wraps = all.rule == Rule::rank;
  call.itself = call.queries == call.keys;
}

template <class T>
void count_hits(const Lsh<T>& call, const std::vector<Arcs>& arcs, int64_t* hits) {
  for (int64_t i = 0; i < call.queries; ++i) {
    hits[i] = 0;
    for (const Arcs& one : arcs) hits[i] += one.length[i];
  }
}

// Computes the heads in parallel, each with all its rounds.
template <class T>
void attend_by_head(const Described<T>& all, int64_t* hits) {
  const Lsh<T>& call = all.call;
  const LshKernels<T>& use = kernels().of<T>().lsh;
  const int64_t own = use.scratch(call, false);
  in_parallel<T>(call.items * call.heads, 1, own + all.arc_memory(), [&](int64_t begin, int64_t end, T* scratch) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const std::vector<Arcs> arcs = all.arcs_of(unit, reinterpret_cast<int32_t*>(scratch + own));
      count_hits(call, arcs, hits + unit * call.queries);
      for (int64_t round = 0; round < call.rounds; ++round)
        use.forward(call, arcs.data(), unit, round, 0, call.queries, scratch);
    }
  });
}

// Computes one head after the other, with the queries of a round in parallel: for calls whose heads would leave threads
// idle.
template <class T>
void attend_by_block(const Described<T>& all, int64_t* hits) {
  const Lsh<T>& call = all.call;
  const LshKernels<T>& use = kernels().of<T>().lsh;
  const Scratch memory(all.arc_memory() * int64_t(sizeof(int32_t)));
  STD_TORCH_CHECK(memory, "there is not enough memory for the arcs of one head");
  const std::vector<Arcs> arcs = all.lay_out(memory.as<int32_t>());
  for (int64_t unit = 0; unit < call.items * call.heads; ++unit) {
    in_parallel<int32_t>(call.rounds, 1, arc_scratch(all.buckets), [&](int64_t begin, int64_t end, int32_t* scratch) {
      for (int64_t round = begin; round < end; ++round) all.find(unit, round, arcs[round], scratch);
    });
    count_hits(call, arcs, hits + unit * call.queries);
    for (int64_t round = 0; round < call.rounds; ++round)
      in_parallel<T>(call.queries, kBlock, use.scratch(call, false), [&](int64_t begin, int64_t end, T* scratch) {
        use.forward(call, arcs.data(), unit, round, begin, end, scratch);
      });
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward(Tensor q, Tensor k, Tensor v, Tensor in_q, Tensor in_k,
                                                           Optional keep, Optional influence, int64_t chunk,
                                                           int64_t rule, bool once, double scale) {
  return with_wide_type("q", q, [&]<class T>() {
    Described<T> all;
    describe<T>(all, q, k, v, in_q, in_k, keep, influence, chunk, rule, once, scale);
    Lsh<T>& call = all.call;
    const auto [out, lse, top, total] = make_outputs(call);
    Tensor hits = fresh({call.items, call.heads, call.queries}, ScalarType::Long);
    const int64_t units = call.items * call.heads, threads = torch::stable::get_num_threads();
    if (units % threads == 0 || units >= 4 * threads)  // threads stay busy to the end, or nearly
      attend_by_head(all, hits.mutable_data_ptr<int64_t>());
    else
      attend_by_block(all, hits.mutable_data_ptr<int64_t>());
    return std::make_tuple(out, lse, top, total, hits);
  });
}

SoftmaxGradients backward(Tensor grad, Tensor lse_grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor top,
                          Tensor total, Tensor in_q, Tensor in_k, Optional keep, Optional influence, int64_t chunk,
                          int64_t rule, bool once, double scale) {
  return with_type("q", q, [&]<class T>() {
    Described<T> all;
    describe<T>(all, q, k, v, in_q, in_k, keep, influence, chunk, rule, once, scale);
    Lsh<T>& call = all.call;
    read_outputs(call, grad, lse_grad, out, top, total);
    const SoftmaxGradients made = make_gradients(call);
    const LshKernels<T>& use = kernels().of<T>().lsh;
    const int64_t own = use.scratch(call, true);
    in_parallel<T>(call.items * call.heads, 1, own + all.arc_memory(), [&](int64_t begin, int64_t end, T* scratch) {
      for (int64_t unit = begin; unit < end; ++unit)
        use.backward(call, all.arcs_of(unit, reinterpret_cast<int32_t*>(scratch + own)).data(), unit, scratch);
    });
    return made;
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparing, CPU, library) {
  library.impl("rotation_buckets", TORCH_BOX(&buckets));
  library.impl("lsh", TORCH_BOX(&forward));
  library.impl("lsh_backward", TORCH_BOX(&backward));
}

}  // namespace sparing
