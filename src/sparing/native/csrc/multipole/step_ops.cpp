#include <algorithm>
#include <atomic>
#include <limits>

#include "common/tensors.h"
#include "kernels.h"

namespace sparing {
namespace {

// Returns the sum of the squares of all entries at positions from `from` up to but not including `to`.
template <class T, class Rows>
double squares(const Rows& rows, int64_t items, int64_t heads, int64_t from, int64_t to, int64_t width) {
  double total = 0;
  for (int64_t item = 0; item < items; ++item)
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t i = from; i < to; ++i) {
        const T* row = rows.at(item, head, i);
        for (int64_t e = 0; e < width; ++e) total += double(row[e]) * double(row[e]);
      }
  return total;
}

std::tuple<Tensor, Tensor, Tensor> step(Tensor q, Tensor k, Tensor v, std::optional<Tensor> place,
                                        std::optional<Tensor> own, Tensor reals, Tensor ints, int64_t clusters,
                                        int64_t ranks, int64_t block, int64_t before, int64_t sinks, int64_t budget,
                                        bool second, bool by_mass, double cap, double tolerance, double scale,
                                        double limit) {
  return with_type("q", q, [&]<class T>() {
    STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k and v must have 4 axes");
    MultipoleStep<T> call{};
    call.items = q.size(0), call.heads = q.size(1), call.queries = q.size(2), call.depth = q.size(3);
    call.keys = k.size(2), call.width = v.size(3), call.clusters = clusters, call.ranks = ranks;
    const int64_t b = call.items, h = call.heads, n = call.queries, kv = k.size(1);
    constexpr int64_t kMost = int64_t(1) << 30;
    STD_TORCH_CHECK(call.keys < kMost && n < kMost && block < kMost, "tokens are numbered in 32 bits: at most 2^30");
    STD_TORCH_CHECK(clusters >= 0 && clusters < kMost, "clusters must be from 0 to 2^30");
    STD_TORCH_CHECK(ranks >= 0 && ranks < kMost, "ranks must be from 0 to 2^30");
    STD_TORCH_CHECK(kv >= 1 && h % kv == 0, "the heads of q must be a multiple of those of k");
    STD_TORCH_CHECK(block >= 1, "block must be at least 1");
    STD_TORCH_CHECK(before >= 0 && sinks >= 0 && budget >= 0, "before, sinks and keys must not be negative");
    STD_TORCH_CHECK(tolerance >= 0, "tolerance must not be negative");
    call.groups = h / kv;
    call.q = tokens<T>("q", q, b, h, n, call.depth);
    call.k = tokens<T>("k", k, b, kv, call.keys, call.depth);
    call.v = tokens<T>("v", v, b, kv, call.keys, call.width);
    packed<T>("reals", reals, {b, h, StepPast<T>::reals(clusters, ranks, call.depth, call.width, block)});
    call.reals = reals.mutable_data_ptr<T>();
    call.ints = packed<int32_t>("ints", ints, {b, h, StepPast<T>::ints(clusters, ranks)});
    const bool checks = limit < std::numeric_limits<double>::infinity();
    STD_TORCH_CHECK(own || n == 1, "own must say where each of several queries stands");
    STD_TORCH_CHECK((own && !checks) || n <= call.keys, "k holds fewer keys than there are queries");
    const std::vector<int64_t> last(own ? 0 : size_t(b), call.keys - 1);
    call.own = own ? packed<int64_t>("own", *own, {b, n}) : last.data();
    call.block = block, call.before = before < call.keys ? before : call.keys;
    call.sinks = sinks < call.keys ? sinks : call.keys, call.budget = budget < call.keys ? budget : call.keys;
    call.second = second, call.by_mass = by_mass, call.cap = T(cap), call.scale = T(scale);
    call.tolerance = T(tolerance);
    for (int64_t i = 0; i < b; ++i) {
      for (int64_t head = 0; head < h; ++head) {
        const int64_t visible = *call.past(i * h + head).visible;
        // Clusters are read by vectors, up to 16 beyond the last.
        STD_TORCH_CHECK(visible >= 0 && (visible == 0 || visible + 16 <= clusters),
                        "ints: more clusters are visible than there are; there must be room for 16 more");
        for (int64_t j = 0; visible && j < n; ++j)
          STD_TORCH_CHECK(call.own[i * n + j] < 0 || call.own[i * n + j] / block * block <= ranks,
                          "ranks does not reach up to the block");
      }
      for (int64_t j = 0; j < n; ++j) {
        const int64_t rank = call.own[i * n + j];
        STD_TORCH_CHECK(rank >= -1 && rank < call.keys, "own names a key that is not there");
      }
    }
    if (place) {
      STD_TORCH_CHECK(place->dim() == 2, "place must have 2 axes");
      call.places = place->size(1);
      call.place = packed<int64_t>("place", *place, {b, call.places});
      for (int64_t i = 0; i < b; ++i) {
        int64_t last = -1;  // ranks after it may hold anything: they are not read
        for (int64_t j = 0; j < n; ++j) last = last > call.own[i * n + j] ? last : call.own[i * n + j];
        STD_TORCH_CHECK(last < call.places, "place does not reach up to own");
        for (int64_t rank = 0; rank <= last; ++rank) {
          const int64_t at = call.place[i * call.places + rank];
          STD_TORCH_CHECK(at >= 0 && at < call.keys, "place holds a position that k does not have");
        }
      }
    }
    Tensor out = fresh({b, h, n, call.width}, type_of<T>()), notes = fresh({4, b, h, n}, type_of<T>());
    Tensor within = fresh({}, ScalarType::Bool);
    call.out = out.mutable_data_ptr<T>();
    call.lse = notes.mutable_data_ptr<T>(), call.error = call.lse + b * h * n;
    call.touched = call.error + b * h * n, call.summaries = call.touched + b * h * n;
    bool& moderate = *static_cast<bool*>(within.mutable_data_ptr());
    moderate = true;
    if (checks) {
      const double size = squares<T>(call.q, b, h, 0, n, call.depth) +
                          squares<T>(call.k, b, kv, call.keys - n, call.keys, call.depth) +
                          squares<T>(call.v, b, kv, call.keys - n, call.keys, call.width);
      moderate = size <= limit * limit;  // false for NaN
    }
    if (!moderate) {
      std::fill_n(call.out, b * h * n * call.width, T(0));
      std::fill_n(call.lse, 4 * b * h * n, T(0));
      return std::make_tuple(out, notes, within);
    }
    const StepKernels<T>& use = kernels().of<T>().step;
    // Heads read different numbers of keys: each thread takes the next one when it is done.
    std::atomic<int64_t> next{0};
    in_parallel<T>(std::min<int64_t>(b * h, torch::stable::get_num_threads()), 1, use.scratch(call),
                   [&](int64_t, int64_t, T* scratch) {
                     for (int64_t unit; (unit = next++) < b * h;) use.forward(call, unit, unit + 1, scratch);
                   });
    if (!own)
      for (int64_t unit = 0; unit < b * h; ++unit)
        std::copy_n(call.q.at(unit / h, unit % h, 0), call.depth,
                    call.past(unit).queries + (call.keys - 1) % block * call.depth);
    return std::make_tuple(out, notes, within);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparing, CPU, library) { library.impl("multipole_step", TORCH_BOX(&step)); }

}  // namespace sparing
