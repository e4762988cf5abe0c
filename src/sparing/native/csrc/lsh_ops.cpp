#include "lsh_arcs.h"
#include "tensors.h"

namespace sparing {
namespace {

using Optional = std::optional<Tensor>;

Tensor buckets(Tensor x, Tensor rotations, Tensor used) {
  return with_type("x", x, [&]<class T>() {
    STD_TORCH_CHECK(x.dim() == 4, "x must have 4 axes");
    STD_TORCH_CHECK(rotations.dim() == 4, "rotations must have 4 axes");
    RotationHash<T> call{};
    call.items = x.size(0), call.heads = x.size(1), call.tokens = x.size(2), call.depth = x.size(3);
    call.rows = rotations.size(1), call.rounds = rotations.size(2);
    STD_TORCH_CHECK(call.depth <= (1 << 16), "x may have at most 65536 entries per token");
    STD_TORCH_CHECK(call.rows < (1 << 30), "rotations may have at most 2^30 rows");
    call.x = tokens<T>("x", x, call.items, call.heads, call.tokens, call.depth);
    call.rotations = packed<double>("rotations", rotations, {call.heads, call.rows, call.rounds, call.depth});
    call.used = packed<int64_t>("used", used, {call.items});
    for (int64_t i = 0; i < call.items; ++i)
      STD_TORCH_CHECK(call.used[i] >= 0 && call.used[i] <= call.rows, "used holds more rows than there are");
    Tensor out = fresh(x, {call.rounds, call.items, call.heads, call.tokens}, ScalarType::Int);
    call.out = out.mutable_data_ptr<int32_t>();
    const int64_t tables = call.heads * call.rounds;
    const LshKernels<T>& use = kernels().of<T>().lsh;
    Tensor rounded = fresh(x, {tables, use.rounded_size(call)}, ScalarType::Int);
    Tensor slack = fresh(x, {tables}, ScalarType::Double);
    call.rounded = rounded.mutable_data_ptr<int32_t>();
    call.slack = slack.mutable_data_ptr<double>();
    in_parallel<int32_t>(tables, 1, 0,
                         [&](int64_t begin, int64_t end, int32_t*) { use.round_rotations(call, begin, end); });
    in_parallel<int32_t>(use.hash_tasks(call), 1, use.hash_scratch(call),
                         [&](int64_t begin, int64_t end, int32_t* scratch) { use.hash(call, begin, end, scratch); });
    return out;
  });
}

// An attention call with the buckets that decide what it sees.
template <class T>
struct Described {
  Lsh<T> call{};
  Rule rule{};
  int64_t buckets = 0, chunk = 0;
  const int32_t *in_q = nullptr, *in_k = nullptr;
  const uint8_t* influence = nullptr;
  std::vector<int64_t> counts;

  int64_t arc_entries() const {  // of the arcs of one head in one round
    return 2 * call.keys + 3 * call.queries;
  }

  // Room for them.
  Arcs arcs(int32_t* memory) const {
    return {memory, memory + call.keys, memory + 2 * call.keys, memory + 2 * call.keys + call.queries,
            memory + 2 * call.keys + 2 * call.queries};
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
  STD_TORCH_CHECK(q.dim() == 4, "q must have 4 axes");
  STD_TORCH_CHECK(k.dim() == 4, "k must have 4 axes");
  STD_TORCH_CHECK(v.dim() == 4, "v must have 4 axes");
  STD_TORCH_CHECK(in_q.dim() == 4, "in_q must have 4 axes");
  Lsh<T>& call = all.call;
  call.items = q.size(0), call.heads = q.size(1), call.queries = q.size(2), call.depth = q.size(3);
  call.keys = k.size(2), call.width = v.size(3), call.rounds = in_q.size(0);
  STD_TORCH_CHECK(call.queries < (int64_t(1) << 29) && call.keys < (int64_t(1) << 29),
                  "places are counted in 32 bits: at most 2^29 tokens");
  STD_TORCH_CHECK(chunk >= 1, "chunk must be positive");
  STD_TORCH_CHECK(call.rounds >= 1, "in_q must hold at least one round");
  STD_TORCH_CHECK(rule >= 0 && rule <= 2, "rule must be 0, 1 or 2");
  all.rule = Rule(rule);
  STD_TORCH_CHECK(all.rule != Rule::rank || call.queries == call.keys, "ranks need as many queries as keys");
  call.q = tokens<T>("q", q, call.items, call.heads, call.queries, call.depth);
  call.k = tokens<T>("k", k, call.items, call.heads, call.keys, call.depth);
  call.v = tokens<T>("v", v, call.items, call.heads, call.keys, call.width);
  call.keep = mask("keep", keep, call.items, call.keys);
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
  all.chunk = chunk < call.keys ? chunk : (call.keys ? call.keys : 1);  // more changes nothing
  const auto at_most_all = [&](int64_t places) { return places < call.keys ? places : call.keys; };
  call.span = at_most_all(3 * all.chunk);
  call.window = at_most_all(2 * all.chunk + (all.chunk > 512 ? all.chunk : 512));
  call.once = once;
  call.wraps = all.rule == Rule::rank;
  call.itself = call.queries == call.keys;
  call.scale = T(scale);
}

constexpr int64_t kTokensAtOnce = 8192;  // of the heads that go through the rounds together, while they are in the cache

template <class T>
void attend(Described<T>& all, int64_t* hits) {
  Lsh<T>& call = all.call;
  const LshKernels<T>& use = kernels().of<T>().lsh;
  const int64_t units = call.items * call.heads, rounds = call.rounds, blocks = use.blocks(call);
  const int64_t most = call.queries + call.keys ? kTokensAtOnce / (call.queries + call.keys) : 0;
  const int64_t group = most < 1 ? 1 : most < units ? most : units;
  const Scratch memory(group * rounds * all.arc_entries() * int64_t(sizeof(int32_t)));
  STD_TORCH_CHECK(memory, "there is not enough memory for the arcs of ", group, " heads");
  std::vector<Arcs> arcs(group * rounds);
  for (int64_t i = 0; i < group * rounds; ++i) arcs[i] = all.arcs(memory.as<int32_t>() + i * all.arc_entries());
  for (int64_t first = 0; first < units; first += group) {
    const int64_t some = units - first < group ? units - first : group;
    in_parallel<int32_t>(some * rounds, 1, arc_scratch(all.buckets), [&](int64_t begin, int64_t end, int32_t* scratch) {
      for (int64_t i = begin; i < end; ++i) all.find(first + i / rounds, i % rounds, arcs[i], scratch);
    });
    for (int64_t i = 0; i < some * rounds * call.queries; ++i) {
      const int64_t one = i / call.queries, query = i % call.queries;
      int64_t& to = hits[(first + one / rounds) * call.queries + query];
      to = (one % rounds ? to : 0) + arcs[one].length[query];
    }
    for (int64_t round = 0; round < rounds; ++round)
      in_parallel<T>(some * blocks, 1, use.scratch(call, false), [&](int64_t begin, int64_t end, T* scratch) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t unit = i / blocks;
          use.forward(call, arcs.data() + unit * rounds, first + unit, round, i % blocks, scratch);
        }
      });
  }
}

std::tuple<Tensor, Tensor, Tensor> forward(Tensor q, Tensor k, Tensor v, Tensor in_q, Tensor in_k, Optional keep,
                                           Optional influence, int64_t chunk, int64_t rule, bool once, double scale) {
  return with_type("q", q, [&]<class T>() {
    Described<T> all;
    describe<T>(all, q, k, v, in_q, in_k, keep, influence, chunk, rule, once, scale);
    Lsh<T>& call = all.call;
    Tensor out = fresh(q, {call.items, call.heads, call.queries, call.width}, type_of<T>());
    Tensor lse = fresh(q, {call.items, call.heads, call.queries}, type_of<T>());
    Tensor total = fresh(q, {call.items, call.heads, call.queries}, type_of<T>());
    Tensor hits = fresh(q, {call.items, call.heads, call.queries}, ScalarType::Long);
    call.out = out.mutable_data_ptr<T>();
    call.lse = lse.mutable_data_ptr<T>();
    call.total = total.mutable_data_ptr<T>();
    attend(all, hits.mutable_data_ptr<int64_t>());
    return std::make_tuple(out, lse, hits);
  });
}

std::tuple<Tensor, Tensor, Tensor> backward(Tensor grad, Tensor lse_grad, Tensor q, Tensor k, Tensor v, Tensor out,
                                            Tensor lse, Tensor in_q, Tensor in_k, Optional keep, Optional influence,
                                            int64_t chunk, int64_t rule, bool once, double scale) {
  return with_type("q", q, [&]<class T>() {
    Described<T> all;
    describe<T>(all, q, k, v, in_q, in_k, keep, influence, chunk, rule, once, scale);
    Lsh<T>& call = all.call;
    const int64_t b = call.items, h = call.heads, n_q = call.queries, n_k = call.keys;
    call.grad = tokens<T>("grad", grad, b, h, n_q, call.width);
    call.lse_grad = packed<T>("lse_grad", lse_grad, {b, h, n_q});
    call.out = const_cast<T*>(packed<T>("out", out, {b, h, n_q, call.width}));  // only read
    call.lse = const_cast<T*>(packed<T>("lse", lse, {b, h, n_q}));  // only read
    Tensor grad_q = fresh(q, {b, h, n_q, call.depth}, type_of<T>());
    Tensor grad_k = fresh(q, {b, h, n_k, call.depth}, type_of<T>());
    Tensor grad_v = fresh(q, {b, h, n_k, call.width}, type_of<T>());
    call.grad_q = grad_q.mutable_data_ptr<T>();
    call.grad_k = grad_k.mutable_data_ptr<T>();
    call.grad_v = grad_v.mutable_data_ptr<T>();
    const LshKernels<T>& use = kernels().of<T>().lsh;
    const int64_t arc_memory = call.rounds * all.arc_entries() + arc_scratch(all.buckets);  // int32: no larger than T
    in_parallel<T>(b * h, 1, use.scratch(call, true) + arc_memory, [&](int64_t begin, int64_t end, T* scratch) {
      int32_t* memory = reinterpret_cast<int32_t*>(scratch + use.scratch(call, true));
      std::vector<Arcs> arcs(call.rounds);
      for (int64_t unit = begin; unit < end; ++unit) {
        for (int64_t round = 0; round < call.rounds; ++round) {
          arcs[round] = all.arcs(memory + round * all.arc_entries());
          all.find(unit, round, arcs[round], memory + call.rounds * all.arc_entries());
        }
        use.backward(call, arcs.data(), unit, scratch);
      }
    });
    return std::make_tuple(grad_q, grad_k, grad_v);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparing, CPU, library) {
  library.impl("rotation_buckets", TORCH_BOX(&buckets));
  library.impl("lsh", TORCH_BOX(&forward));
  library.impl("lsh_backward", TORCH_BOX(&backward));
}

}  // namespace sparing
