#include <algorithm>

#include "common/tensors.h"
#include "kernels.h"

namespace sparing {
namespace {

Tensor cluster(Tensor x, Tensor valid, Tensor start, Tensor start_used, Tensor lesson, Tensor lesson_used,
               int64_t steps) {
  STD_TORCH_CHECK(x.dim() == 3, "x must have 3 axes");
  STD_TORCH_CHECK(start.dim() == 2 && lesson.dim() == 2, "start and lesson must have 2 axes");
  STD_TORCH_CHECK(steps >= 0, "steps must not be negative");
  KMeans call{};
  call.units = x.size(0), call.rows = x.size(1), call.depth = x.size(2);
  call.centres = start.size(1), call.taught = lesson.size(1), call.steps = steps;
  STD_TORCH_CHECK(call.centres >= 1 && call.centres < (int64_t(1) << 30), "start must name 1 to 2^30 centres");
  call.x = packed<float>("x", x, {call.units, call.rows, call.depth});
  call.valid = mask("valid", valid, call.units, call.rows);
  call.start = packed<int64_t>("start", start, {call.units, call.centres});
  call.start_used = mask("start_used", start_used, call.units, call.centres);
  call.lesson = packed<int64_t>("lesson", lesson, {call.units, call.taught});
  call.lesson_used = mask("lesson_used", lesson_used, call.units, call.taught);
  for (int64_t i = 0; i < call.units * call.centres; ++i)
    STD_TORCH_CHECK(call.start[i] >= 0 && call.start[i] < call.rows, "start holds a row that x does not have");
  for (int64_t i = 0; i < call.units * call.taught; ++i)
    STD_TORCH_CHECK(call.lesson[i] >= 0 && call.lesson[i] < call.rows, "lesson holds a row that x does not have");
  Tensor labels = fresh({call.units, call.rows}, ScalarType::Long);
  call.labels = labels.mutable_data_ptr<int64_t>();
  const KMeansKernels& use = kernels().kmeans;
  in_parallel<float>(call.units, 1, use.scratch(call),
                     [&](int64_t begin, int64_t end, float* scratch) { use.run(call, begin, end, scratch); });
  return labels;
}

Tensor metric_rows(Tensor k, Tensor factor, Tensor valid, int64_t limit) {
  return with_type("k", k, [&]<class T>() {
    STD_TORCH_CHECK(k.dim() == 4, "k must have 4 axes");
    STD_TORCH_CHECK(valid.dim() == 3, "valid must have 3 axes");
    MetricRows<T> call{};
    call.items = k.size(0), call.heads = k.size(1), call.depth = k.size(3), call.limit = limit;
    call.chunks = valid.size(1), call.size = valid.size(2);
    STD_TORCH_CHECK(call.chunks * call.size <= k.size(2), "valid has more keys than k");
    call.k = tokens<T>("k", k, call.items, call.heads, k.size(2), call.depth);
    call.factor = packed<double>("factor", factor, {call.items, call.heads, call.chunks, call.depth, call.depth});
    call.valid = reinterpret_cast<const uint8_t*>(packed<bool>("valid", valid, {call.items, call.chunks, call.size}));
    Tensor out = fresh({call.items * call.heads * call.chunks, call.size, call.depth}, ScalarType::Float);
    call.out = out.mutable_data_ptr<float>();
    const MetricKernels<T>& use = kernels().of<T>().metric;
    in_parallel<double>(call.items * call.heads * call.chunks, 1, use.scratch(call),
                        [&](int64_t begin, int64_t end, double* scratch) { use.run(call, begin, end, scratch); });
    return out;
  });
}

// Sorts the keys of one level of one head by cluster, and finds where each cluster begins. Labels have been checked.
void sort_members(const int64_t* labels, int64_t keys, int64_t clusters, int32_t* members, int32_t* bounds) {
  for (int64_t c = 0; c <= clusters; ++c) bounds[c] = 0;
  for (int64_t j = 0; j < keys; ++j) {
    if (labels[j] < 0) continue;
    ++bounds[labels[j] + 1];
  }
  for (int64_t c = 0; c < clusters; ++c) bounds[c + 1] += bounds[c];
  std::vector<int32_t> next(bounds, bounds + clusters);
  for (int64_t j = 0; j < keys; ++j)
    if (labels[j] >= 0) members[next[size_t(labels[j])]++] = int32_t(j);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> summarise(Tensor k, Tensor v, Tensor labels,
                                                                             Tensor mean, Tensor covariance,
                                                                             int64_t clusters, double scale,
                                                                             double faintest, double nothing) {
  return with_type("k", k, [&]<class T>() {
    STD_TORCH_CHECK(k.dim() == 4 && v.dim() == 4 && mean.dim() == 4, "k, v and mean must have 4 axes");
    STD_TORCH_CHECK(clusters >= 1 && clusters < (int64_t(1) << 30), "clusters must be 1 to 2^30");
    Poles<T> call{};
    call.items = k.size(0), call.heads = k.size(1), call.keys = k.size(2), call.depth = k.size(3);
    call.width = v.size(3), call.chunks = mean.size(2), call.clusters = clusters;
    const int64_t b = call.items, h = call.heads, n = call.keys, every = clusters * call.chunks;
    STD_TORCH_CHECK(n < (int64_t(1) << 30), "keys are numbered in 32 bits: at most 2^30 of them");
    call.k = tokens<T>("k", k, b, h, n, call.depth);
    call.v = tokens<T>("v", v, b, h, n, call.width);
    call.mean = packed<T>("mean", mean, {b, h, call.chunks, call.depth});
    call.covariance = packed<T>("covariance", covariance, {b, h, call.chunks, call.depth, call.depth});
    call.labels = packed<int64_t>("labels", labels, {b, h, n});
    call.scale = T(scale), call.faintest = T(faintest), call.nothing = T(nothing);
    for (int64_t i = 0; i < b * h * n; ++i)
      STD_TORCH_CHECK(call.labels[i] >= -1 && call.labels[i] < every, "labels holds a cluster beyond the last");
    std::vector<int32_t> members(size_t(b * h * n)), bounds(size_t(b * h * (every + 1)));
    call.members = members.data(), call.bounds = bounds.data();
    Tensor pole_keys = fresh({b, h, every, call.depth}, type_of<T>());
    Tensor pole_values = fresh({b, h, every, call.width}, type_of<T>());
    Tensor offset = fresh({b, h, every}, type_of<T>()), weight = fresh({b, h, every}, type_of<T>());
    Tensor spread = fresh({b, h, every}, type_of<T>()), scatter = fresh({b, h, every}, type_of<T>());
    Tensor shares = fresh({b, h, n}, type_of<T>());
    call.pole_keys = pole_keys.mutable_data_ptr<T>(), call.pole_values = pole_values.mutable_data_ptr<T>();
    call.offset = offset.mutable_data_ptr<T>(), call.weight = weight.mutable_data_ptr<T>();
    call.spread = spread.mutable_data_ptr<T>(), call.scatter = scatter.mutable_data_ptr<T>();
    call.shares = shares.mutable_data_ptr<T>();
    torch::stable::parallel_for(0, b * h, 1, [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit) {
        sort_members(call.labels + unit * n, n, every, members.data() + unit * n, bounds.data() + unit * (every + 1));
        for (int64_t j = 0; j < n; ++j) call.shares[unit * n + j] = T(0);  // keys outside all clusters
      }
    });
    const PoleKernels<T>& use = kernels().of<T>().poles;
    in_parallel<T>(b * h * call.chunks, 1, use.scratch(call),
                   [&](int64_t begin, int64_t end, T* scratch) { use.run(call, begin, end, scratch); });
    return std::make_tuple(pole_keys, pole_values, offset, weight, spread, scatter, shares);
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attend(Tensor q, Tensor k, Tensor v, Tensor seen, Tensor own,
                                                          Tensor mean, Tensor variance, Tensor pole_keys,
                                                          Tensor pole_values, Tensor offset, Tensor weight,
                                                          Tensor spread, Tensor scatter, Tensor labels, Tensor shares,
                                                          Tensor levels, int64_t before, int64_t after, int64_t sinks,
                                                          int64_t block, int64_t budget, bool second, bool by_mass,
                                                          double cap, double tolerance, double scale) {
  return with_type("q", q, [&]<class T>() {
    STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k and v must have 4 axes");
    STD_TORCH_CHECK(pole_keys.dim() == 4, "pole_keys must have 4 axes");
    KeyClusters<T> call{};
    call.items = q.size(0), call.heads = q.size(1), call.queries = q.size(2), call.depth = q.size(3);
    call.keys = k.size(2), call.width = v.size(3), call.clusters = pole_keys.size(2);
    const int64_t b = call.items, h = call.heads, n = call.queries, c = call.clusters;
    constexpr int64_t kMost = int64_t(1) << 30;
    STD_TORCH_CHECK(call.keys < kMost && n < kMost && c < kMost, "tokens are numbered in 32 bits: at most 2^30");
    STD_TORCH_CHECK(sinks >= 0 && block >= 0 && budget >= 0, "sinks, block and keys must not be negative");
    STD_TORCH_CHECK(before >= -1 && after >= -1, "before and after must be at least -1");
    call.q = tokens<T>("q", q, b, h, n, call.depth);
    call.k = tokens<T>("k", k, b, h, call.keys, call.depth);
    call.v = tokens<T>("v", v, b, h, call.keys, call.width);
    call.seen = packed<int64_t>("seen", seen, {b, n});
    call.own = packed<int64_t>("own", own, {b, n});
    for (int64_t i = 0; i < b * n; ++i) {
      STD_TORCH_CHECK(call.seen[i] >= 0 && call.seen[i] <= call.keys, "seen counts keys that are not there");
      STD_TORCH_CHECK(call.own[i] >= -1 && call.own[i] < call.keys, "own names a key that is not there");
      const bool steady = i % n == 0 || (call.own[i] >= call.own[i - 1] && call.own[i] <= call.own[i - 1] + 1);
      STD_TORCH_CHECK(steady, "own must grow by at most one from query to query");
    }
    STD_TORCH_CHECK(mean.dim() == 4, "mean must have 4 axes");
    call.means = mean.size(2);
    call.mean = packed<T>("mean", mean, {b, h, call.means, call.depth});
    call.variance = packed<T>("variance", variance, {b, h, call.means});
    call.pole_keys = packed<T>("pole_keys", pole_keys, {b, h, c, call.depth});
    call.pole_values = packed<T>("pole_values", pole_values, {b, h, c, call.width});
    call.offset = packed<T>("offset", offset, {b, h, c});
    call.weight = packed<T>("weight", weight, {b, h, c});
    call.spread = packed<T>("spread", spread, {b, h, c});
    call.scatter = packed<T>("scatter", scatter, {b, h, c});
    call.before = before < call.keys ? before : call.keys, call.after = after < call.keys ? after : call.keys;
    call.sinks = sinks < call.keys ? sinks : call.keys;
    call.block = block, call.budget = budget < call.keys ? budget : call.keys;
    call.second = second, call.by_mass = by_mass, call.cap = T(cap), call.scale = T(scale);
    STD_TORCH_CHECK(tolerance >= 0, "tolerance must not be negative");
    call.tolerance = T(tolerance);
    STD_TORCH_CHECK(levels.dim() == 2, "levels must have 2 axes");
    call.levels = levels.size(0);
    STD_TORCH_CHECK(block ? call.levels <= 3 : call.levels == 1, "there must be one level, or up to three if causal");
    const int64_t* describe = packed<int64_t>("levels", levels, {call.levels, 3});
    const int64_t* every_label = packed<int64_t>("labels", labels, {call.levels, b, h, call.keys});
    const T* every_share = packed<T>("shares", shares, {call.levels, b, h, call.keys});
    std::vector<int32_t> members(size_t(call.levels * b * h * call.keys));
    std::vector<int32_t> bounds(size_t(b * h * (c + call.levels)));
    int64_t base = 0;
    for (int64_t i = 0; i < call.levels; ++i) {
      Level<T>& level = call.level[i];
      level.size = describe[3 * i], level.clusters = describe[3 * i + 1];
      const int64_t chunks = describe[3 * i + 2];
      STD_TORCH_CHECK(level.size >= 1 && level.clusters >= 0 && chunks >= 0, "levels holds a negative size");
      STD_TORCH_CHECK(level.clusters < kMost && chunks < kMost, "levels holds a size beyond 2^30");
      STD_TORCH_CHECK(!block || (i ? level.size % block == 0 : level.size == block), "chunks must be whole blocks");
      level.base = base, level.total = level.clusters * chunks, base += level.total;
      level.labels = every_label + i * b * h * call.keys;
      level.shares = every_share + i * b * h * call.keys;
      level.members = members.data() + i * b * h * call.keys;
      for (int64_t j = 0; j < b * h * call.keys; ++j)
        STD_TORCH_CHECK(level.labels[j] >= -1 && level.labels[j] < level.total,
                        "labels holds a cluster beyond the last");
      if (block)
        for (int64_t j = 0; j < b * n; ++j)
          STD_TORCH_CHECK(call.own[j] / level.size <= chunks + (i == 2),
                          "there are fewer chunks than the queries need");
    }
    STD_TORCH_CHECK(call.levels < 3 || call.level[2].size == call.level[1].size, "the last two levels must be alike");
    if (call.levels == 2)  // the third begins with the second chunk
      for (int64_t j = 0; j < b * n; ++j)
        STD_TORCH_CHECK(call.own[j] / call.level[1].size <= 1, "there are fewer levels than the queries need");
    STD_TORCH_CHECK(!call.levels || call.means == describe[2], "there must be one mean per chunk of the first level");
    STD_TORCH_CHECK(base == c, "there must be one summary per cluster");
    torch::stable::parallel_for(0, b * h, 1, [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit)
        for (int64_t i = 0; i < call.levels; ++i) {
          const Level<T>& level = call.level[i];
          sort_members(level.labels + unit * call.keys, call.keys, level.total,
                       members.data() + (i * b * h + unit) * call.keys,
                       bounds.data() + unit * (c + call.levels) + level.base + i);
        }
    });
    call.bounds = bounds.data();
    Tensor out = fresh({b, h, n, call.width}, type_of<T>());
    Tensor lse = fresh({b, h, n}, type_of<T>());
    Tensor error = fresh({b, h, n}, type_of<T>());
    Tensor read = fresh({b, h, n}, ScalarType::Long), summaries = fresh({b, h, n}, ScalarType::Long);
    call.out = out.mutable_data_ptr<T>(), call.lse = lse.mutable_data_ptr<T>();
    call.error = error.mutable_data_ptr<T>();
    call.read = read.mutable_data_ptr<int64_t>(), call.summaries = summaries.mutable_data_ptr<int64_t>();
    const KeyClustersKernels<T>& use = kernels().of<T>().key_clusters;
    in_parallel<T>(use.tasks(call), 1, use.scratch(call),
                   [&](int64_t begin, int64_t end, T* scratch) { use.forward(call, begin, end, scratch); });
    return std::make_tuple(out, lse, error, read, summaries);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparing, CPU, library) {
  library.impl("kmeans", TORCH_BOX(&cluster));
  library.impl("metric_rows", TORCH_BOX(&metric_rows));
  library.impl("summaries", TORCH_BOX(&summarise));
  library.impl("key_clusters", TORCH_BOX(&attend));
}

}  // namespace sparing
