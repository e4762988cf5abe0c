#include "common/tensors.h"
#include "kernels.h"

namespace sparing {
namespace {

using Optional = std::optional<Tensor>;

// Tokens with their map; `points` must be given exactly if the map has points.
template <class T>
Featured<T> featured(const char* name, const Tensor& x, const Optional& points, int64_t map, double factor) {
  STD_TORCH_CHECK(map >= 0 && map < int64_t(FeatureMap::count), "map is not one of the known ones");
  STD_TORCH_CHECK(x.dim() == 4, name, " must have 4 axes");
  Featured<T> from{};
  from.map = FeatureMap(map);
  from.items = x.size(0), from.heads = x.size(1), from.tokens = x.size(2), from.depth = x.size(3);
  from.x = stored<T>(name, x, from.items, from.heads, from.tokens, from.depth);
  from.factor = T(factor);
  from.features = from.depth;
  const bool with_points = from.map == FeatureMap::gaussian || from.map == FeatureMap::exponential;
  STD_TORCH_CHECK(with_points == points.has_value(), "points belong to the maps that have some");
  if (points) {
    STD_TORCH_CHECK(points->dim() == 4, "points must have 4 axes");
    from.features = points->size(2);
    from.points = tokens<T>("points", *points, from.items, from.heads, from.features, from.depth);
  }
  return from;
}

// At least eight tokens per feature in a chunk, so that the sums of all chunks take little memory.
template <class Call>
void cut(Call& call) {
  const int64_t features = call.from.features, tokens = call.from.tokens;
  call.chunk = features < 128 ? 1024 : (8 * features + 63) / 64 * 64;
  call.chunks = tokens > call.chunk ? (tokens + call.chunk - 1) / call.chunk : 1;
}

std::tuple<Tensor, Tensor, Tensor> sums(Tensor x, Optional points, Tensor values, Optional keep, int64_t map,
                                        double factor) {
  return with_wide_type("x", x, [&]<class T>() {
    FeatureSums<T> call{};
    call.from = featured<T>("x", x, points, map, factor);
    const int64_t b = call.from.items, h = call.from.heads, n = call.from.tokens, f = call.from.features;
    STD_TORCH_CHECK(values.dim() == 4, "values must have 4 axes");
    call.width = values.size(3);
    call.values = stored<T>("values", values, b, h, n, call.width);
    call.keep = mask("keep", keep, b, n);
    cut(call);
    const FeatureKernels<T>& use = kernels().of<T>().features;
    const int64_t tasks = b * h * call.chunks;
    Tensor part_sums = fresh({tasks, f, use.padded_width(call.width)}, type_of<T>());
    Tensor part_mass = fresh({tasks, f}, type_of<T>());
    Tensor part_level = fresh({tasks}, type_of<T>());
    Tensor sums = fresh({b, h, f, call.width}, type_of<T>());
    Tensor mass = fresh({b, h, f}, type_of<T>());
    Tensor level = fresh({b, h}, type_of<T>());
    call.part_sums = part_sums.mutable_data_ptr<T>();
    call.part_mass = part_mass.mutable_data_ptr<T>();
    call.part_level = part_level.mutable_data_ptr<T>();
    call.sums = sums.mutable_data_ptr<T>();
    call.mass = mass.mutable_data_ptr<T>();
    call.level = level.mutable_data_ptr<T>();
    in_parallel<T>(tasks, 1, use.sums_scratch(call),
                   [&](int64_t begin, int64_t end, T* scratch) { use.sums(call, begin, end, scratch); });
    in_parallel<T>(b * h, 1, 0, [&](int64_t begin, int64_t end, T*) { use.merge(call, begin, end); });
    return std::make_tuple(sums, mass, level);
  });
}

std::tuple<Tensor, Tensor> mix(Tensor x, Optional points, Tensor table, Optional mass, int64_t map, double factor) {
  return with_wide_type("x", x, [&]<class T>() {
    FeatureMix<T> call{};
    call.from = featured<T>("x", x, points, map, factor);
    const int64_t b = call.from.items, h = call.from.heads, n = call.from.tokens, f = call.from.features;
    STD_TORCH_CHECK(table.dim() == 4, "table must have 4 axes");
    call.width = table.size(3);
    call.table = tokens<T>("table", table, b, h, f, call.width);
    if (mass) call.mass = packed<T>("mass", *mass, {b, h, f});
    Tensor out = fresh({b, h, n, call.width}, type_of<T>());
    Tensor total = fresh({b, h, mass ? n : 0}, type_of<T>());
    call.out = out.mutable_data_ptr<T>();
    call.total = total.mutable_data_ptr<T>();
    const FeatureKernels<T>& use = kernels().of<T>().features;
    in_parallel<T>(use.mix_tasks(call), 1, use.mix_scratch(call),
                   [&](int64_t begin, int64_t end, T* scratch) { use.mix(call, begin, end, scratch); });
    return std::make_tuple(out, total);
  });
}

// Fills in what both kinds of gradients have, runs them, and returns those of x and of the points.
template <class T>
std::tuple<Tensor, Tensor> run_grads(FeatureGrads<T>& call) {
  const int64_t b = call.from.items, h = call.from.heads, n = call.from.tokens, d = call.from.depth;
  const int64_t f = call.from.features;
  const bool gaussian = call.from.map == FeatureMap::gaussian;
  const FeatureKernels<T>& use = kernels().of<T>().features;
  check_wide("x", call.from.x);
  cut(call);
  const int64_t tasks = b * h * call.chunks;
  Tensor part_right = fresh({call.mixing ? tasks : 0, f, use.padded_width(call.width)}, type_of<T>());
  Tensor part_mass = fresh({call.mixing ? tasks : 0, f}, type_of<T>());
  Tensor part_points = fresh({gaussian ? tasks : 0, f, use.padded_width(d)}, type_of<T>());
  Tensor grad_x = fresh({b, h, n, d}, type_of<T>());
  Tensor grad_points = gaussian ? fresh({b, h, f, d}, type_of<T>()) : fresh({0}, type_of<T>());
  call.part_right = part_right.mutable_data_ptr<T>();
  call.part_mass = part_mass.mutable_data_ptr<T>();
  call.part_points = part_points.mutable_data_ptr<T>();
  call.grad_x = grad_x.mutable_data_ptr<T>();
  if (gaussian) call.grad_points = grad_points.mutable_data_ptr<T>();
  in_parallel<T>(tasks, 1, use.grads_scratch(call),
                 [&](int64_t begin, int64_t end, T* scratch) { use.grads(call, begin, end, scratch); });
  in_parallel<T>(b * h, 1, 0, [&](int64_t begin, int64_t end, T*) { use.merge_grads(call, begin, end); });
  return {grad_x, grad_points};
}

std::tuple<Tensor, Tensor, Tensor> sums_backward(Tensor grad_sums, Tensor grad_mass, Tensor x, Optional points,
                                                 Tensor values, Optional keep, Tensor level, int64_t map,
                                                 double factor) {
  return with_type("x", x, [&]<class T>() {
    FeatureGrads<T> call{};
    call.from = featured<T>("x", x, points, map, factor);
    const int64_t b = call.from.items, h = call.from.heads, n = call.from.tokens, f = call.from.features;
    STD_TORCH_CHECK(values.dim() == 4, "values must have 4 axes");
    call.width = values.size(3);
    call.left = tokens<T>("values", values, b, h, n, call.width);
    call.right = tokens<T>("grad_sums", grad_sums, b, h, f, call.width);
    call.mass = packed<T>("grad_mass", grad_mass, {b, h, f});
    call.keep = mask("keep", keep, b, n);
    call.level = packed<T>("level", level, {b, h});
    Tensor grad_values = fresh({b, h, n, call.width}, type_of<T>());
    call.grad_left = grad_values.mutable_data_ptr<T>();
    const auto [grad_x, grad_points] = run_grads(call);
    return std::make_tuple(grad_x, grad_points, grad_values);
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> mix_backward(Tensor grad, Tensor x, Optional points, Tensor table,
                                                        Optional mass, Tensor out, Tensor total, int64_t map,
                                                        double factor) {
  return with_type("x", x, [&]<class T>() {
    FeatureGrads<T> call{};
    call.mixing = true;
    call.from = featured<T>("x", x, points, map, factor);
    const int64_t b = call.from.items, h = call.from.heads, n = call.from.tokens, f = call.from.features;
    STD_TORCH_CHECK(table.dim() == 4, "table must have 4 axes");
    call.width = table.size(3);
    call.left = tokens<T>("grad", grad, b, h, n, call.width);
    call.right = tokens<T>("table", table, b, h, f, call.width);
    if (mass) call.mass = packed<T>("mass", *mass, {b, h, f});
    call.out = packed<T>("out", out, {b, h, n, call.width});
    call.total = packed<T>("total", total, {b, h, mass ? n : 0});
    Tensor grad_table = fresh({b, h, f, call.width}, type_of<T>());
    Tensor grad_mass = mass ? fresh({b, h, f}, type_of<T>()) : fresh({0}, type_of<T>());
    call.grad_right = grad_table.mutable_data_ptr<T>();
    if (mass) call.grad_mass = grad_mass.mutable_data_ptr<T>();
    const auto [grad_x, grad_points] = run_grads(call);
    return std::make_tuple(grad_x, grad_points, grad_table, grad_mass);
  });
}

template <class T>
FeatureCausal<T> describe_causal(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& points,
                                 const Optional& keep, int64_t map, double q_factor, double k_factor, bool divide) {
  FeatureCausal<T> call{};
  call.q = featured<T>("q", q, points, map, q_factor);
  call.k = featured<T>("k", k, points, map, k_factor);
  STD_TORCH_CHECK(call.q.map != FeatureMap::gaussian, "map has no causal form");
  check_sizes("k", k, {call.q.items, call.q.heads, call.k.tokens, call.q.depth});
  STD_TORCH_CHECK(v.dim() == 4, "v must have 4 axes");
  call.width = v.size(3);
  call.values = stored<T>("v", v, call.q.items, call.q.heads, call.k.tokens, call.width);
  call.keep = mask("keep", keep, call.q.items, call.k.tokens);
  call.divide = divide;
  return call;
}

std::tuple<Tensor, Tensor> causal(Tensor q, Tensor k, Tensor v, Optional points, Optional keep, int64_t map,
                                  double q_factor, double k_factor, bool divide) {
  return with_wide_type("q", q, [&]<class T>() {
    FeatureCausal<T> call = describe_causal<T>(q, k, v, points, keep, map, q_factor, k_factor, divide);
    const int64_t b = call.q.items, h = call.q.heads, n = call.q.tokens;
    Tensor out = fresh({b, h, n, call.width}, type_of<T>());
    Tensor total = fresh({b, h, n}, type_of<T>());
    call.out = out.mutable_data_ptr<T>();
    call.total = total.mutable_data_ptr<T>();
    const FeatureKernels<T>& use = kernels().of<T>().features;
    in_parallel<T>(b * h, 1, use.causal_scratch(call),
                   [&](int64_t begin, int64_t end, T* scratch) { use.causal(call, begin, end, scratch); });
    return std::make_tuple(out, total);
  });
}

std::tuple<Tensor, Tensor, Tensor> causal_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Optional points,
                                                   Optional keep, Tensor out, Tensor total, int64_t map,
                                                   double q_factor, double k_factor, bool divide) {
  return with_type("q", q, [&]<class T>() {
    FeatureCausal<T> call = describe_causal<T>(q, k, v, points, keep, map, q_factor, k_factor, divide);
    const int64_t b = call.q.items, h = call.q.heads, n = call.q.tokens, n_k = call.k.tokens, d = call.q.depth;
    check_wide("q", call.q.x), check_wide("k", call.k.x), check_wide("v", call.values);
    call.grad = tokens<T>("grad", grad, b, h, n, call.width);
    call.out = const_cast<T*>(packed<T>("out", out, {b, h, n, call.width}));  // only read
    call.total = const_cast<T*>(packed<T>("total", total, {b, h, n}));        // only read
    Tensor grad_q = fresh({b, h, n, d}, type_of<T>());
    Tensor grad_k = fresh({b, h, n_k, d}, type_of<T>());
    Tensor grad_v = fresh({b, h, n_k, call.width}, type_of<T>());
    call.grad_q = grad_q.mutable_data_ptr<T>();
    call.grad_k = grad_k.mutable_data_ptr<T>();
    call.grad_v = grad_v.mutable_data_ptr<T>();
    const FeatureKernels<T>& use = kernels().of<T>().features;
    in_parallel<T>(b * h, 1, use.causal_grads_scratch(call),
                   [&](int64_t begin, int64_t end, T* scratch) { use.causal_grads(call, begin, end, scratch); });
    return std::make_tuple(grad_q, grad_k, grad_v);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparing, CPU, library) {
  library.impl("feature_sums", TORCH_BOX(&sums));
  library.impl("feature_mix", TORCH_BOX(&mix));
  library.impl("feature_sums_backward", TORCH_BOX(&sums_backward));
  library.impl("feature_mix_backward", TORCH_BOX(&mix_backward));
  library.impl("feature_causal", TORCH_BOX(&causal));
  library.impl("feature_causal_backward", TORCH_BOX(&causal_backward));
}

}  // namespace sparing
