#include <algorithm>
#include <atomic>

#include "common/tensors.h"
#include "kernels.h"

namespace sparing {
namespace {

using Optional = std::optional<Tensor>;

template <class E>
std::tuple<Tensor, Tensor> attend(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& place,
                                  const Tensor& seen, const Tensor& near, const Tensor& key_codes,
                                  const Tensor& key_scales, const Tensor& value_codes, const Tensor& value_scales,
                                  int64_t block, int64_t bits, int64_t sinks, double least_share, double scale) {
  using T = Wide<E>;
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k and v must have 4 axes");
  MultipoleCall<E> call{};
  call.items = q.size(0), call.heads = q.size(1), call.queries = q.size(2), call.depth = q.size(3);
  call.keys = k.size(2), call.width = v.size(3);
  const int64_t b = call.items, h = call.heads, n = call.queries, kv = k.size(1);
  constexpr int64_t kMost = int64_t(1) << 30;
  STD_TORCH_CHECK(call.keys < kMost && n < kMost && block < kMost, "tokens are numbered in 32 bits: at most 2^30");
  STD_TORCH_CHECK(kv >= 1 && h % kv == 0, "the heads of q must be a multiple of those of k");
  STD_TORCH_CHECK(block >= kMultipoleGroup && block % kMultipoleGroup == 0, "block must be a multiple of 16");
  STD_TORCH_CHECK(bits == 2 || bits == 4, "bits must be 2 or 4");
  STD_TORCH_CHECK(sinks >= 0 && least_share >= 0, "sinks and least_share must not be negative");
  STD_TORCH_CHECK(key_codes.dim() == 6 && value_codes.dim() == 6, "key_codes and value_codes must have 6 axes");
  call.groups = h / kv;
  call.q = tokens<E>("q", q, b, h, n, call.depth);
  call.k = tokens<E>("k", k, b, kv, call.keys, call.depth);
  call.v = tokens<E>("v", v, b, kv, call.keys, call.width);
  call.block = block, call.bits = bits, call.blocks = key_codes.size(2);
  call.sinks = std::min(sinks, call.keys), call.least_share = T(least_share), call.scale = T(scale);
  const int64_t chunks = (call.depth + kKeyChannels - 1) / kKeyChannels, each = kValueChannels * 8 / bits;
  call.key_codes = packed<uint8_t>("key_codes", key_codes, {b, kv, call.blocks, block / kMultipoleGroup, chunks, 64});
  call.value_codes = packed<uint8_t>(
      "value_codes", value_codes, {b, kv, call.blocks, block / kMultipoleGroup, (call.width + each - 1) / each, 256});
  call.key_low = packed<T>("key_scales", key_scales, {2, b, kv, call.blocks, call.depth});
  call.key_step = call.key_low + b * kv * call.blocks * call.depth;
  call.value_low = packed<T>("value_scales", value_scales, {2, b, kv, call.blocks, call.width});
  call.value_step = call.value_low + b * kv * call.blocks * call.width;
  call.seen = packed<int64_t>("seen", seen, {b, n});
  call.near = packed<int64_t>("near", near, {b, n});
  if (place) {
    STD_TORCH_CHECK(place->dim() == 2, "place must have 2 axes");
    call.places = place->size(1);
    call.place = packed<int64_t>("place", *place, {b, call.places});
  }
  for (int64_t i = 0; i < b; ++i) {
    int64_t last = 0;
    for (int64_t j = 0; j < n; ++j) {
      const int64_t count = call.seen[i * n + j], first = call.near[i * n + j];
      STD_TORCH_CHECK(count <= call.keys, "seen counts more keys than there are");
      STD_TORCH_CHECK(count <= 0 || (first >= 0 && first <= count), "near must be from 0 to seen");
      last = std::max(last, count);
    }
    STD_TORCH_CHECK(!place || last <= call.places, "place does not reach up to seen");
    for (int64_t rank = 0; place && rank < last; ++rank) {
      const int64_t at = call.place[i * call.places + rank];
      STD_TORCH_CHECK(at >= 0 && at < call.keys, "place holds a position that k does not have");
    }
  }
  Tensor out = fresh({b, h, n, call.width}, type_of<E>()), notes = fresh({3, b, h, n}, type_of<T>());
  call.out = static_cast<E*>(out.mutable_data_ptr());
  call.lse = notes.mutable_data_ptr<T>(), call.error = call.lse + b * h * n, call.read = call.error + b * h * n;
  const Kernels& chosen = kernels();
  const MultipoleKernels<E>& use = chosen.stored<E>().multipole;
  call.vnni = chosen.vnni;
  // Queries read different numbers of keys: each thread takes the next tile when it is done.
  const int64_t threads = torch::stable::get_num_threads(), of_unit = n * call.groups;
  call.tile = std::clamp<int64_t>((b * h * n + threads - 1) / threads, 1,
                                  std::min(kMultipoleTile, std::max<int64_t>(of_unit, 1)));
  const int64_t tiles = b * kv * ((of_unit + call.tile - 1) / call.tile);
  std::atomic<int64_t> next{0};
  in_parallel<T>(std::min(tiles, threads), 1, use.scratch(call), [&](int64_t, int64_t, T* scratch) {
    for (int64_t tile; (tile = next.fetch_add(1)) < tiles;) use.forward(call, tile, tile + 1, scratch);
  });
  return {out, notes};
}

std::tuple<Tensor, Tensor> multipole(Tensor q, Tensor k, Tensor v, Optional place, Tensor seen, Tensor near,
                                     Tensor key_codes, Tensor key_scales, Tensor value_codes, Tensor value_scales,
                                     int64_t block, int64_t bits, int64_t sinks, double least_share, double scale) {
  return with_stored_type("q", q, [&]<class E>() {
    return attend<E>(q, k, v, place, seen, near, key_codes, key_scales, value_codes, value_scales, block, bits, sinks,
                     least_share, scale);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparing, CPU, library) { library.impl("multipole", TORCH_BOX(&multipole)); }

}  // namespace sparing
