// Attention to few keys, and to summaries of clusters of the others (multipole in Python).
//
// Queries are taken in blocks of neighbours, which see the same clusters. A block scores all summaries, picks for each
// query the clusters to expand, and absorbs the rest of the summaries and the keys near by. Then each cluster absorbs
// its members into the queries that expanded it, many queries at a time: a small matrix product per cluster.

inline constexpr int64_t kQueries = 4096;      // queries of a task, at most
inline constexpr int64_t kExpansions = 1 << 20;  // expansions of a task, at most
inline constexpr int64_t kVisitors = 24;            // queries that meet a cluster's members at once, to suit the cache

inline constexpr int kChains = 4;                // searches that do not wait for each other

// Scores are taken relative to the largest one, or to one that is not so far below it that exp of the distance matters.
template <class T>
inline constexpr T kFar = T(16);

// What some queries have absorbed.
template <class T>
struct Absorbed {
  T *sums, *top, *total;  // [queries][stride], [queries], [queries][lanes]: the sum over lanes counts
  int64_t stride;         // padded width
  int64_t rest, total_rest;  // where the rests of sums and totals stand
};

template <class T>
struct MultipoleMemory {
  Block<T> block;
  T* scores;               // [clusters][kRows]
  T *worth, *left;         // [clusters][lanes] what expanding them is worth to some queries, and takes
  T *gone, *gone_weight;   // [stretch][kRows] members of a cluster that are exact already
  Absorbed<T> absorbed;    // by the queries of the task
  T* values;               // [kRows][padded width] of members of a cluster
  T *shift, *missed;       // [queries]
  T* sizes;                // [clusters] members
  Int<T> *slot;            // [clusters] row of `gone`, or -1
  Int<T> *visible;         // [clusters]
  Int<T> *pair_query, *pair_cluster, *sorted, *first;  // expansions; [clusters + 1]
};

template <class T>
int64_t multipole_expansions(const Multipole<T>& call) {  // of a query, at most
  const int64_t most = call.budget < call.clusters ? call.budget : call.clusters;
  return most > 0 ? most : 1;
}

template <class T>
int64_t multipole_queries(const Multipole<T>& call) {
  int64_t count = kExpansions / multipole_expansions(call) / kRows * kRows;
  count = count < kRows ? kRows : count > kQueries ? kQueries : count;
  const int64_t all = (call.queries + kRows - 1) / kRows * kRows;
  return count < all ? count : all;
}

template <class T>
int64_t multipole_stretch(const Multipole<T>& call) {  // keys near a block that may lie in clusters
  const int64_t reach = call.before + (call.after > 0 ? call.after : 0) + kRows + 1;
  return reach < call.keys ? reach : call.keys;
}

template <class T>
int64_t lay_out(const Multipole<T>& call, T* memory, MultipoleMemory<T>* parts) {
  parts->block.depth = call.depth, parts->block.width = call.width;
  int64_t used = (lay_out<T>(&parts->block, memory, false) + 15) / 16 * 16;
  const auto take = [&]<class U>(U** part, int64_t count) {
    static_assert(sizeof(U) == sizeof(T));
    if (memory) *part = reinterpret_cast<U*>(memory + used);
    used += (count + 15) / 16 * 16;
  };
  const int64_t queries = multipole_queries(call), pairs = queries * multipole_expansions(call);
  take(&parts->scores, call.clusters * kRows);
  take(&parts->worth, (call.clusters + kChains) * lanes<T>);
  take(&parts->left, (call.clusters + kChains) * lanes<T>);
  take(&parts->gone, multipole_stretch(call) * kRows);
  take(&parts->gone_weight, multipole_stretch(call) * kRows);
  parts->absorbed.stride = padded<T>(call.width);
  parts->absorbed.rest = queries * parts->absorbed.stride, parts->absorbed.total_rest = queries * lanes<T>;
  take(&parts->absorbed.sums, 2 * parts->absorbed.rest);
  take(&parts->absorbed.top, queries);
  take(&parts->absorbed.total, 2 * parts->absorbed.total_rest);
  take(&parts->values, kRows * parts->absorbed.stride);
  take(&parts->shift, queries);
  take(&parts->missed, queries);
  take(&parts->sizes, call.clusters);
  take(&parts->slot, call.clusters);
  take(&parts->visible, call.clusters);
  take(&parts->pair_query, pairs);
  take(&parts->pair_cluster, pairs);
  take(&parts->sorted, pairs);
  take(&parts->first, call.clusters + 1);
  return used;
}

template <class T>
int64_t multipole_scratch(const Multipole<T>& call) {
  MultipoleMemory<T> parts{};
  return lay_out<T>(call, nullptr, &parts);
}

template <class T>
int64_t multipole_tasks(const Multipole<T>& call) {
  const int64_t each = multipole_queries(call);
  return call.items * call.heads * ((call.queries + each - 1) / each);
}

// Keys that every lane of a block looks at, or only some.
template <class T>
struct NearMask {
  static constexpr bool masks = true;
  const Int<T>* place;        // of the keys
  const Int<T>*own, *seen;    // of the lanes
  Int<T> before, after, sinks, tail;  // tail: last keys that all lanes look at
  Int<T> from;                // all keys from here on; causal

  SPARING_INLINE IntVec<T> operator()(int64_t c, int r) const {
    const IntVec<T> mine = load<Int<T>>(own + r), end = load<Int<T>>(seen + r);
    const IntVec<T> key = place[c] - IntVec<T>{};
    const IntVec<T> near = (key >= mine - before) & (key <= mine + after);
    return (key < end) & (near | (key < sinks) | (key >= from) | (key >= end - tail));
  }
};

// Keys that a block looks at.
template <class T>
struct Exact {
  int64_t count = 0;
  bool joined = false;  // neighbours of each other, all but sinks and last keys
  Int<T> place[kKeys];
  const T *keys[kKeys], *values[kKeys];
  int64_t row[kKeys];  // of the scores of the summary that stands for a key; -1: there is none
  T share[kKeys];
};

// exp(x) - 1 for x >= 0
template <class T>
SPARING_INLINE Vec<T> surplus(Vec<T> x) {
  // The difference would lose the digits of a small x.
  const Vec<T> small = x * (T(1) + x * (T(0.5) + x * (T(1) / T(6) + x * (T(1) / T(24)))));
  return x < T(0.03) ? small : exponential(x) - T(1);
}

// Of the mass of all keys: summaries of less are left out, if there is a tolerance.
template <class T>
SPARING_INLINE T light_share(T tolerance, int64_t clusters) {
  const T fair = T(1) / T(clusters > 1 ? clusters : 1);
  return (tolerance < fair ? tolerance : fair) / T(16);
}

// The number of the level that a cluster belongs to.
template <class T>
SPARING_INLINE int level_with(const Multipole<T>& call, int64_t cluster) {
  int level = 0;
  while (level + 1 < call.levels && cluster >= call.level[level + 1].base) ++level;
  return level;
}

// One block of queries against all summaries and the keys near by.
template <class T>
struct MultipoleBlock {
  const Multipole<T>& call;
  MultipoleMemory<T>& memory;
  int64_t item, head, unit, first, count;  // first query
  Int<T> own[kRows] = {}, seen[kRows] = {};
  int64_t shown = 0;     // clusters that the block sees
  int64_t members = 0;   // and how many keys are in them
  int64_t slots = 0;     // clusters that have members near by
  int64_t low = 0, high = -1;  // keys near by
  Int<T> from = 0;  // causal: all keys from here on are exact
  T near_top[kRows] = {}, near_total[kRows] = {};  // of the keys near by, if there is a tolerance
  T least[kRows] = {};                             // what a cluster must be worth to be expanded
  T light[kRows] = {};                             // summaries of less mass are left out

  const Level<T>& level_of(int64_t key) const {
    // Clusters of blocks stand in for those of the chunk that is not complete, and the last complete one is described
    // by other queries than those before it.
    if (!call.block || call.levels < 2) return call.level[0];
    const int64_t size = call.level[1].size, mine = own[0] / size * size;
    return call.level[key >= mine ? 0 : key >= mine - size ? 1 : 2];
  }

  // The cluster that stands for a key, or -1.
  int64_t cluster_of(int64_t key) const {
    if (!call.levels || key >= from) return -1;
    const Level<T>& level = level_of(key);
    const int64_t label = level.labels[unit * call.keys + key];
    return label < 0 ? -1 : level.base + label;
  }

  T share_of(int64_t key) const { return level_of(key).shares[unit * call.keys + key]; }

  int64_t size_of(int64_t cluster) const {
    const int32_t* bounds = call.bounds + unit * (call.clusters + call.levels);
    const int64_t at = cluster + level_with(call, cluster);
    return bounds[at + 1] - bounds[at];
  }

  void show(int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      const int64_t size = size_of(c);
      if (!size) continue;
      memory.sizes[shown] = T(size);
      memory.visible[shown++] = Int<T>(c);
      members += size;
    }
  }

  // Which clusters and which keys near by the block looks at.
  void look_around() {
    const Int<T> mine = own[0], last = own[count - 1];
    from = Int<T>(call.keys);
    if (call.block) {
      from = mine < 0 ? 0 : Int<T>(mine / call.block * call.block);
      if (call.levels && mine >= 0) {
        const Level<T>& fine = call.level[0];
        int64_t old = 0;
        if (call.levels > 1) {
          const Level<T>&last = call.level[1], &before = call.level[2];
          old = mine / last.size;
          if (old > 1) show(before.base, before.base + (old - 1) * before.clusters);
          if (old > 0) show(last.base + (old - 1) * last.clusters, last.base + old * last.clusters);
          old = old * (last.size / fine.size);
        }
        show(old * fine.clusters, mine / fine.size * fine.clusters);
      }
      low = mine - call.before < from ? mine - call.before : from;
      high = last;
    } else {
      if (call.levels) show(0, call.level[0].total);
      if (call.before >= 0) low = mine - call.before, high = last + call.after;
    }
    low = low < 0 ? 0 : low;
    high = high < call.keys - 1 ? high : call.keys - 1;
  }

  NearMask<T> mask(const Int<T>* place) const {
    return {place,
            own,
            seen,
            Int<T>(call.before),
            Int<T>(call.after),
            Int<T>(call.sinks),
            Int<T>(call.block ? 0 : call.sinks),
            from};
  }

  // Members of clusters that lie near by: counted, and weighed, per lane.
  void count_near() {
    for (int64_t c = 0; c < shown; ++c) memory.slot[memory.visible[c]] = -1;
    if (!shown) return;
    for (int64_t key = low; key <= high; ++key) {
      const int64_t cluster = cluster_of(key);
      if (cluster < 0) continue;
      Int<T>& slot = memory.slot[cluster];
      if (slot < 0) {
        slot = Int<T>(slots++);
        for (int r = 0; r < kRows; ++r)
          memory.gone[slot * kRows + r] = T(0), memory.gone_weight[slot * kRows + r] = T(0);
      }
      const Int<T> place = Int<T>(key);
      const NearMask<T> near = mask(&place);
      const T share = share_of(key);
      for (int r = 0; r < kRows; r += lanes<T>) {
        const IntVec<T> hit = near(0, r);
        T *number = memory.gone + slot * kRows + r, *weight = memory.gone_weight + slot * kRows + r;
        store<T>(number, load<T>(number) + (hit ? all(T(1)) : Vec<T>{}));
        store<T>(weight, load<T>(weight) + (hit ? all(share) : Vec<T>{}));
      }
    }
  }

  // How far the queries are from their mean: |q - mean|^2 over the mean of that.
  void sound(T* alarm) const {
    int64_t at = call.block ? own[0] / call.block - 1 : 0;
    at = unit * call.means + (at > 0 ? at : 0);
    const T* mean = call.mean + at * call.depth;
    const T spread = call.variance[at] * call.scale * call.scale;
    const T calm = spread >= kNormal<T> ? T(1) / spread : T(0);
    for (int r = 0; r < memory.block.used; r += lanes<T>) {
      Vec<T> total{};
      for (int64_t k = 0; k < call.depth; ++k) {
        const Vec<T> away = load<T>(memory.block.queries + k * kRows + r) - call.scale * mean[k];
        total += away * away;
      }
      store<T>(alarm + r, total * calm);
    }
  }

  // Scores of all summaries, in memory.scores.
  void score() {
    Block<T>& block = memory.block;
    const T* rows[kKeys];
    for (int64_t c = 0; c < shown; c += kKeys) {
      const int64_t some = shown - c < kKeys ? shown - c : kKeys;
      for (int64_t i = 0; i < some; ++i)
        rows[i] = call.pole_keys + (unit * call.clusters + memory.visible[c + i]) * call.depth;
      dots<T>(rows, some, call.depth, block.queries, memory.scores + c * kRows, block.used);
    }
  }

  // The mean scatter of the keys in clusters.
  T usual_scatter() const {
    T sum = T(0);
    for (int64_t c = 0; c < shown; ++c) sum += memory.sizes[c] * call.scatter[unit * call.clusters + memory.visible[c]];
    return sum / T(members);
  }

  // What a cluster must be worth per key, in units of the squared mass of all keys.
  T bound() const {
    return call.tolerance > T(0) ? call.tolerance * call.tolerance * (call.by_mass ? T(1) : usual_scatter()) : T(0);
  }

  // exp(score - shift) in memory.scores, what expanding a cluster is worth per key and how many keys it takes in
  // memory.worth and memory.left, for the lanes from r on.
  void value(int r, const T* alarm, T bound, T* shift) {
    constexpr int N = lanes<T>;
    const Vec<T> loud = load<T>(alarm + r);
    const int64_t poles = unit * call.clusters;
    Vec<T> top = all(kNever<T>);
    for (int64_t c = 0; c < shown; ++c) {
      const int64_t at = poles + memory.visible[c];
      T* score = memory.scores + c * kRows + r;
      Vec<T> x = load<T>(score) + call.offset[at];
      if (call.second) {
        const Vec<T> variance = loud * call.spread[at];
        x += T(0.5) * (variance < call.cap ? variance : all(call.cap));
      }
      store<T>(score, x);
      top = larger<T>(top, x);
    }
    const Vec<T> by = top == kNever<T> ? Vec<T>{} : top;
    store<T>(shift + r, by);
    Vec<T> total = load<T>(near_total + r) * exponential(load<T>(near_top + r) - by);
    for (int64_t c = 0; c < shown; ++c) {
      const int64_t at = poles + memory.visible[c];
      T* score = memory.scores + c * kRows + r;
      const int64_t slot = memory.slot[memory.visible[c]];
      Vec<T> f = exponential_below(load<T>(score) - by), mass = f * call.weight[at], left = all(memory.sizes[c]);
      if (slot >= 0) {
        left -= load<T>(memory.gone + slot * kRows + r);
        f = left > T(0) ? f : Vec<T>{};
        mass = left > T(0) ? f * (call.weight[at] - load<T>(memory.gone_weight + slot * kRows + r)) : Vec<T>{};
      }
      store<T>(score, f);
      total += mass;
      store<T>(memory.left + c * N, left);
      const Vec<T> worth = mass * mass / (left > T(1) ? left : all(T(1)));
      store<T>(memory.worth + c * N, call.by_mass ? worth : worth * error_factor(at, loud));
    }
    store<T>(least + r, bound > T(0) ? total * total * bound : Vec<T>{});  // the square may overflow
    store<T>(light + r, total * light_share(call.tolerance, shown));
    for (int64_t c = shown; c < shown + kChains; ++c) store<T>(memory.worth + c * N, all(T(-1)));
  }

  SPARING_INLINE Vec<T> error_factor(int64_t at, Vec<T> loud) const {
    const Vec<T> variance = loud * call.spread[at];
    return surplus<T>(variance < call.cap ? variance : all(call.cap)) * call.scatter[at];
  }

  // Of the clusters that fit, for each lane the one that is worth most, of equal ones the first; -1 if there is none.
  SPARING_INLINE IntVec<T> best_fit(Vec<T> budget, Vec<T> least) const {
    constexpr int N = lanes<T>;
    const int64_t part = (shown + kChains - 1) / kChains;
    Vec<T> best[kChains];
    IntVec<T> which[kChains], at{};
    for (int j = 0; j < kChains; ++j) best[j] = least, which[j] = Int<T>(-1) - IntVec<T>{};
    for (int64_t i = 0; i < part; ++i, at += 1)
      for (int j = 0; j < kChains; ++j) {
        const int64_t c = (j * part + i) * N;
        const Vec<T> worth = load<T>(memory.worth + c);
        const IntVec<T> better = (worth > best[j]) & (load<T>(memory.left + c) <= budget);
        best[j] = better ? worth : best[j];
        which[j] = better ? at : which[j];
      }
    for (int j = 1; j < kChains; ++j) {
      const IntVec<T> better = best[j] > best[0];
      best[0] = better ? best[j] : best[0];
      which[0] = better ? which[j] + Int<T>(j * part) : which[0];
    }
    return which[0];
  }

  // Expands the clusters that are worth most to the lanes from r on, and returns the number of expansions so far.
  int64_t choose(int r, int64_t pairs, int64_t first_in_task, const T* alarm, T* missed, int64_t* read,
                 int64_t* summaries) {
    constexpr int N = lanes<T>;
    const auto expand = [&](int64_t c, int lane) {
      memory.scores[c * kRows + r + lane] = T(0);
      memory.worth[c * N + lane] = T(-1);
      memory.pair_query[pairs] = Int<T>(first_in_task + r + lane);
      memory.pair_cluster[pairs++] = memory.visible[c];
    };
    Vec<T> near{};
    for (int64_t s = 0; s < slots; ++s) near += load<T>(memory.gone + s * kRows + r);
    Vec<T> budget = all(T(call.budget)), opened{};
    for (int lane = 0; lane < N; ++lane) {
      if (r + lane >= count) budget[lane] = T(-1);
      if (r + lane >= count || call.tolerance > T(0) || T(members) - near[lane] > T(call.budget)) continue;
      for (int64_t c = 0; c < shown; ++c)
        if (memory.left[c * N + lane] > T(0)) expand(c, lane);
      opened[lane] = T(members) - near[lane];
      budget[lane] = T(-1);
    }
    for (;;) {
      const IntVec<T> which = best_fit(budget, load<T>(least + r));
      const uint32_t found = held<T>(which >= 0);
      if (!found) break;
      for (int lane = 0; lane < N; ++lane) {
        if (!(found >> lane & 1)) continue;
        const T size = memory.left[which[lane] * N + lane];
        budget[lane] -= size, opened[lane] += size;
        expand(which[lane], lane);
      }
    }
    Vec<T> error{}, spared{};
    for (int64_t c = 0; c < shown; ++c) {
      const Vec<T> worth = load<T>(memory.worth + c * N);
      const Vec<T> left = load<T>(memory.left + c * N);
      Vec<T> kept = worth > T(0) ? worth * left : Vec<T>{};
      if (call.by_mass) kept *= error_factor(unit * call.clusters + memory.visible[c], load<T>(alarm + r));
      error += kept;
      if (call.tolerance > T(0)) {
        T* score = memory.scores + c * kRows + r;
        const int64_t slot = memory.slot[memory.visible[c]];
        Vec<T> weight = all(call.weight[unit * call.clusters + memory.visible[c]]);
        if (slot >= 0) weight -= load<T>(memory.gone_weight + slot * kRows + r);
        const Vec<T> f = load<T>(score);
        store<T>(score, f * weight < load<T>(light + r) ? Vec<T>{} : f);
      }
      spared += (worth >= T(0)) & (left > T(0)) ? all(T(1)) : Vec<T>{};
    }
    for (int lane = 0; lane < N && r + lane < count; ++lane) {
      missed[r + lane] = error[lane];
      read[r + lane] = int64_t(opened[lane]);
      summaries[r + lane] = int64_t(spared[lane]);
    }
    return pairs;
  }

  // A cluster that nobody reads may have had a score so far above all others that nothing is left of theirs: for such
  // lanes, exp(score - shift) again, with the largest score that is left as shift. What is too light stays away.
  void revive(int r, const T* alarm, T* shift) {
    constexpr int N = lanes<T>;
    constexpr T kFaded = sizeof(T) == 4 ? T(0x1p-60) : T(0x1p-500);
    Vec<T> most{};
    for (int64_t c = 0; c < shown; ++c) most = larger<T>(most, load<T>(memory.scores + c * kRows + r));
    for (int lane = 0; lane < N && r + lane < count; ++lane) {
      if (most[lane] >= kFaded || light[r + lane] > T(0)) continue;
      T top = kNever<T>;
      for (int64_t c = 0; c < shown; ++c) {
        if (memory.worth[c * N + lane] < T(0) || !(memory.left[c * N + lane] > T(0))) continue;
        const int64_t at = unit * call.clusters + memory.visible[c];
        const T variance = alarm[r + lane] * call.spread[at];
        T score = call.offset[at] + (call.second ? T(0.5) * (variance < call.cap ? variance : call.cap) : T(0));
        for (int64_t k = 0; k < call.depth; ++k)
          score += memory.block.queries[k * kRows + r + lane] * call.pole_keys[at * call.depth + k];
        memory.scores[c * kRows + r + lane] = score;
        top = score > top ? score : top;
      }
      if (top == kNever<T>) continue;
      shift[r + lane] = top;
      for (int64_t c = 0; c < shown; ++c)
        if (memory.worth[c * N + lane] >= T(0) && memory.left[c * N + lane] > T(0)) {
          T* score = memory.scores + c * kRows + r + lane;
          *score = exponential(all(*score - top))[0];
        }
    }
  }

  // Starts the block with what the summaries add, without the members that lie near by.
  void absorb_summaries(const T* shift) {
    Block<T>& block = memory.block;
    const int64_t poles = unit * call.clusters;
    for (int r = 0; r < block.used; r += lanes<T>) {
      Vec<T> any_left{};
      const Vec<T> total = long_sum<Vec<T>>(shown, 1, [&](int64_t c) {
        const int64_t slot = memory.slot[memory.visible[c]];
        const Vec<T> f = load<T>(memory.scores + c * kRows + r);
        Vec<T> weight = all(call.weight[poles + memory.visible[c]]);
        if (slot >= 0) weight -= load<T>(memory.gone_weight + slot * kRows + r);
        any_left = larger<T>(any_left, f);
        return f * weight;
      });
      store<T>(block.total + r, total);
      store<T>(block.top + r, any_left > T(0) ? load<T>(shift + r) : all(kNever<T>));
    }
    const T* rows[kKeys];
    for (int64_t c = 0; c < shown; c += kKeys) {
      const int64_t some = shown - c < kKeys ? shown - c : kKeys;
      for (int64_t i = 0; i < some; ++i) rows[i] = call.pole_values + (poles + memory.visible[c + i]) * call.width;
      weighted_sums<T>(rows, some, call.width, memory.scores + c * kRows, block.sums, block.used, call.width * kRows);
    }
    // The row of scores of a cluster, for keys that know their cluster only.
    for (int64_t c = 0; c < shown; ++c) memory.slot[memory.visible[c]] = Int<T>(c);
  }

  // Absorbs some exact keys, and takes back what the summaries said for them; adds to `met`, the keys that a lane saw.
  void absorb_exact(const Exact<T>& some, const T* shift, Int<T>* met) {
    Block<T>& block = memory.block;
    const NearMask<T> near = mask(some.place);
    for (int strip = 0; strip < block.used; strip += kStrip<T>) {
      const Range range = some.joined ? seen_by(strip, some) : Range{0, some.count};
      if (range.begin >= range.end) continue;
      dots_strip<T>(some.keys + range.begin, range.end - range.begin, block.depth, block.queries + strip,
                    block.scores + range.begin * kRows + strip);
      for (int r = strip; r < strip + kStrip<T>; r += lanes<T>) {
        Vec<T> high = all(kNever<T>);
        IntVec<T> hits = load<Int<T>>(met + r);
        for (int64_t c = range.begin; c < range.end; ++c) {
          const IntVec<T> hit = near(c, r);
          const Vec<T> score = hit ? load<T>(block.scores + c * kRows + r) : all(kNever<T>);
          store<T>(block.scores + c * kRows + r, score);
          high = larger<T>(high, score);
          hits -= hit;
        }
        store<Int<T>>(met + r, hits);
        Vec<T> top = load<T>(block.top + r), total{};
        if (held<T>(high > top + kFar<T>)) {
          // Lanes that need it only, so that no lane's rounding depends on its neighbours.
          const Vec<T> higher = high > top + kFar<T> ? high : top, by = higher == kNever<T> ? Vec<T>{} : higher;
          block.shrink(r, exponential(top - by));
          top = higher;
          store<T>(block.top + r, top);
        }
        const Vec<T> by = top == kNever<T> ? Vec<T>{} : top, fade = exponential(load<T>(shift + r) - by);
        for (int64_t c = range.begin; c < range.end; ++c) {
          T* at = block.scores + c * kRows + r;
          const Vec<T> score = load<T>(at);
          Vec<T> weight = exponential(score - by);
          total += weight;
          if (some.row[c] >= 0) {
            const Vec<T> said = fade * some.share[c] * load<T>(memory.scores + some.row[c] * kRows + r);
            weight = score == kNever<T> ? Vec<T>{} : weight - said;
          }
          store<T>(at, weight);
        }
        add_to<T>(block.total + r, kRows, total);
      }
      weighted_sums_strip<T>(some.values + range.begin, range.end - range.begin, block.width,
                             block.scores + range.begin * kRows + strip, block.sums + strip, block.width * kRows);
    }
  }

  // The mass of some exact keys, in near_top and near_total.
  void weigh_exact(const Exact<T>& some) {
    Block<T>& block = memory.block;
    const NearMask<T> near = mask(some.place);
    for (int strip = 0; strip < block.used; strip += kStrip<T>) {
      const Range range = some.joined ? seen_by(strip, some) : Range{0, some.count};
      if (range.begin >= range.end) continue;
      dots_strip<T>(some.keys + range.begin, range.end - range.begin, block.depth, block.queries + strip,
                    block.scores + range.begin * kRows + strip);
      for (int r = strip; r < strip + kStrip<T>; r += lanes<T>) {
        const Vec<T> before = load<T>(near_top + r);
        Vec<T> high = before;
        for (int64_t c = range.begin; c < range.end; ++c) {
          T* at = block.scores + c * kRows + r;
          store<T>(at, near(c, r) ? load<T>(at) : all(kNever<T>));
          high = larger<T>(high, load<T>(at));
        }
        const Vec<T> by = high == kNever<T> ? Vec<T>{} : high;
        Vec<T> total = load<T>(near_total + r) * exponential(before - by);
        for (int64_t c = range.begin; c < range.end; ++c)
          total += exponential(load<T>(block.scores + c * kRows + r) - by);
        store<T>(near_top + r, high), store<T>(near_total + r, total);
      }
    }
  }

  void weigh_near() {
    for (int r = 0; r < kRows; ++r) near_top[r] = kNever<T>;
    visit_near([&](const Exact<T>& some) { weigh_exact(some); });
  }

  // Which of some neighbouring keys a strip of lanes may see.
  Range seen_by(int strip, const Exact<T>& some) const {
    const int last = strip + kStrip<T> - 1;
    const int64_t near = own[strip] - call.before, reach = own[last] + call.after + 1;
    const int64_t begin = near < from ? near : from, end = from < seen[last] || reach > seen[last] ? seen[last] : reach;
    const int64_t first = some.place[0], to = end - first < some.count ? end - first : some.count;
    return {begin > first ? begin - first : 0, to};
  }

  void absorb_near(const T* shift, int64_t* read) {
    Int<T> met[kRows] = {};
    visit_near([&](const Exact<T>& some) { absorb_exact(some, shift, met); });
    for (int64_t r = 0; r < count; ++r) read[r] += met[r];
  }

  // The keys near by, the sinks and, if not causal, the last keys, some at a time.
  template <class Visit>
  void visit_near(const Visit& visit) const {
    Exact<T> some;
    const auto flush = [&] {
      if (some.count) visit(some);
      some.count = 0;
    };
    const auto range = [&](int64_t begin, int64_t end) {
      for (int64_t key = begin; key < end; ++key) {
        const int64_t i = some.count++, cluster = shown ? cluster_of(key) : -1;
        some.place[i] = Int<T>(key);
        some.keys[i] = call.k.at(item, head, key);
        some.values[i] = call.v.at(item, head, key);
        some.row[i] = cluster < 0 ? -1 : memory.slot[cluster];
        some.share[i] = cluster < 0 ? T(0) : share_of(key);
        if (some.count == kKeys) flush();
      }
    };
    int64_t last = 0;
    for (int64_t r = 0; r < count; ++r) last = seen[r] > last ? seen[r] : last;
    const int64_t sinks = call.sinks < last ? call.sinks : last;
    const int64_t tail = call.block || last - call.sinks > sinks ? last - (call.block ? 0 : call.sinks) : sinks;
    some.joined = false;
    range(0, sinks);
    range(tail, last);
    flush();
    some.joined = true;
    range(low > sinks ? low : sinks, high + 1 < tail ? high + 1 : tail);
    flush();
  }
};

// Hands what the first `count` lanes of a block absorbed to their queries, which have absorbed nothing yet.
template <class T>
void hand_over(const Block<T>& block, int64_t count, const Absorbed<T>& to, int64_t query) {
  constexpr int N = lanes<T>;
  for (int64_t first = 0; first < count; first += N) {
    const int64_t some = count - first < N ? count - first : N;
    for (int64_t r = first; r < first + some; ++r) {
      Vec<T> total{};
      total[0] = block.total[r];
      to.top[query + r] = block.top[r];
      store<T>(to.total + (query + r) * N, total);
      store<T>(to.total + to.total_rest + (query + r) * N, Vec<T>{});
    }
    T* rows = to.sums + (query + first) * to.stride;
    clear(rows + to.rest, some * to.stride);
    int64_t e = 0;
    for (; e + N <= block.width; e += N) {
      Vec<T> square[N];
      for (int i = 0; i < N; ++i) square[i] = load<T>(block.sums + (e + i) * kRows + first);
      turn<T>(square);
      for (int64_t r = 0; r < some; ++r) store<T>(rows + r * to.stride + e, square[r]);
    }
    for (; e < to.stride; ++e)
      for (int64_t r = 0; r < some; ++r)
        rows[r * to.stride + e] = e < block.width ? block.sums[e * kRows + first + r] : T(0);
  }
}

// Some members of a cluster, which stand in the lanes, for the queries that expanded it.
template <class T>
struct Members {
  const Int<T>* place;  // ascending
  int64_t count;        // at most kRows

  // Leaves out those that a query looks at anyway; `next` is where the last query's began.
  SPARING_INLINE void leave_out(Int<T> begin, Int<T> end, T* scores, int64_t& next) const {
    while (next > 0 && place[next - 1] >= begin) --next;
    while (next < count && place[next] < begin) ++next;
    for (int64_t i = next; i < count && place[i] < end; ++i) scores[i] = kNever<T>;
  }

  // Turns the scores of a query into weights, relative to the largest score that the query knows or one not far below.
  SPARING_INLINE void weigh(T* scores, int64_t query, const Absorbed<T>& to) const {
    constexpr int N = lanes<T>;
    const int64_t last = (count - 1) / N * N;
    const Vec<T> beyond = iota<T>() < T(count - last) ? load<T>(scores + last) : all(kNever<T>);
    store<T>(scores + last, beyond);
    Vec<T> high = beyond;
    for (int64_t i = 0; i < last; i += N) high = larger<T>(high, load<T>(scores + i));
    if (held<T>(high > to.top[query] + kFar<T>)) {
      const T top = largest<T>(high);
      const Vec<T> factor = exponential(all(to.top[query] - top));
      for (int64_t part = 0; part < 2; ++part) {  // sums and rests
        T *total = to.total + part * to.total_rest + query * N, *sums = to.sums + part * to.rest + query * to.stride;
        store<T>(total, load<T>(total) * factor);
        for (int64_t e = 0; e < to.stride; e += N) store<T>(sums + e, load<T>(sums + e) * factor);
      }
      to.top[query] = top;
    }
    const T shift = to.top[query] == kNever<T> ? T(0) : to.top[query];
    Vec<T> total{};
    for (int64_t i = 0; i <= last; i += N) {
      const Vec<T> weight = exponential(load<T>(scores + i) - shift);
      store<T>(scores + i, weight);
      total += weight;
    }
    add_to<T>(to.total + query * N, to.total_rest, total);
  }
};

// Members of the clusters into the queries that expanded them.
template <class T>
void expand_clusters(const Multipole<T>& call, MultipoleMemory<T>& memory, int64_t item, int64_t head, int64_t begin,
                     int64_t pairs) {
  const int64_t unit = item * call.heads + head;
  const int64_t* own = call.own + item * call.queries + begin;
  for (int64_t c = 0; c <= call.clusters; ++c) memory.first[c] = 0;
  for (int64_t p = 0; p < pairs; ++p) ++memory.first[memory.pair_cluster[p] + 1];
  for (int64_t c = 0; c < call.clusters; ++c) memory.first[c + 1] += memory.first[c];
  for (int64_t p = 0; p < pairs; ++p) memory.sorted[memory.first[memory.pair_cluster[p]]++] = memory.pair_query[p];
  const Absorbed<T>& to = memory.absorbed;
  const T *keys[kRows], *queries[kVisitors];
  T* sums[kVisitors];
  Int<T> place[kRows];
  for (int64_t cluster = 0, from = 0; cluster < call.clusters; ++cluster) {
    const int64_t end = memory.first[cluster];  // counted up to the end above
    if (from == end) continue;
    const int later = level_with(call, cluster);
    const int32_t* bounds = call.bounds + unit * (call.clusters + call.levels) + cluster + later;
    const int32_t* members = call.level[later].members + unit * call.keys;
    const int64_t last = call.level[later].base + call.level[later].total - cluster;
    for (int64_t next = bounds[0]; next < bounds[1]; next += kRows) {
      const int64_t count = bounds[1] - next < kRows ? bounds[1] - next : kRows;
      for (int64_t i = 0; i < count; ++i) {
        place[i] = Int<T>(members[next + i]);
        keys[i] = call.k.at(item, head, place[i]);
        const T* value = call.v.at(item, head, place[i]);
        for (int64_t e = 0; e < to.stride; ++e) memory.values[i * to.stride + e] = e < call.width ? value[e] : T(0);
      }
      T *columns = memory.block.queries, *scores = memory.block.scores;
      transpose<T>(keys, count, call.depth, call.scale, columns);
      const Members<T> here{place, count};
      const int64_t ahead = next + count + kRows < bounds[last] ? next + count + kRows : bounds[last];
      int64_t near = 0;
      for (int64_t first = from; first < end; first += kVisitors) {
        const int64_t some = end - first < kVisitors ? end - first : kVisitors;
        for (int64_t i = 0; i < some; ++i) {
          const int64_t query = memory.sorted[first + i];
          queries[i] = call.q.at(item, head, begin + query);
          sums[i] = to.sums + query * to.stride;
        }
        dots_narrow<T>(queries, some, call.depth, columns, scores, count);
        for (int64_t i = 0; i < some; ++i) {
          const int64_t query = memory.sorted[first + i];
          if (call.before >= 0)
            here.leave_out(Int<T>(own[query] - call.before), Int<T>(own[query] + call.after + 1), scores + i * kRows,
                           near);
          here.weigh(scores + i * kRows, query, to);
          // Members are numbered from cluster to cluster: these are the next.
          if (const int64_t member = next + count + first + i - from; member < ahead) {
            fetch(call.k.at(item, head, members[member]), call.depth);
            fetch(call.v.at(item, head, members[member]), call.width);
          }
          if (first + i + kVisitors >= end) continue;
          // The rows of the next group are scattered over memory.
          const int64_t coming = memory.sorted[first + i + kVisitors];
          fetch(call.q.at(item, head, begin + coming), call.depth);
          fetch(to.sums + coming * to.stride, to.stride);
          fetch(to.total + coming * lanes<T>, lanes<T>);
        }
        spread<T>(scores, some, memory.values, to.stride, sums, count, to.rest);
      }
    }
    from = end;
  }
}

template <class T>
void multipole_forward(const Multipole<T>& call, int64_t begin_task, int64_t end_task, T* scratch) {
  MultipoleMemory<T> memory{};
  lay_out<T>(call, scratch, &memory);
  const int64_t each = multipole_queries(call), parts = (call.queries + each - 1) / each;
  for (int64_t task = begin_task; task < end_task; ++task) {
    const int64_t unit = task / parts, begin = task % parts * each;
    const int64_t item = unit / call.heads, head = unit % call.heads;
    const int64_t end = begin + each < call.queries ? begin + each : call.queries;
    const int64_t *own = call.own + item * call.queries, *seen = call.seen + item * call.queries;
    int64_t pairs = 0;
    for (int64_t first = begin, count; first < end; first += count) {
      for (count = 1; count < kRows && first + count < end; ++count)
        if (call.block && (own[first + count] + call.block) / call.block != (own[first] + call.block) / call.block)
          break;
      MultipoleBlock<T> here{call, memory, item, head, unit, first, count};
      T alarm[kRows] = {}, shift[kRows] = {};
      const T* queries[kRows];
      for (int64_t r = 0; r < kRows; ++r) {
        const int64_t query = first + (r < count ? r : count - 1);
        here.own[r] = Int<T>(own[query]), here.seen[r] = Int<T>(seen[query]);
        if (r < count) queries[r] = call.q.at(item, head, query);
      }
      memory.block.use(count);
      transpose<T>(queries, count, call.depth, call.scale, memory.block.queries);
      start(memory.block);
      int64_t* read = call.read + unit * call.queries + first;
      int64_t* summaries = call.summaries + unit * call.queries + first;
      for (int64_t r = 0; r < count; ++r)
        read[r] = summaries[r] = 0, memory.missed[first - begin + r] = memory.shift[first - begin + r] = T(0);
      here.look_around();
      if (here.shown) {
        here.count_near();
        here.sound(alarm);
        here.score();
        if (call.tolerance > T(0)) here.weigh_near();
        const T bound = here.bound();
        for (int r = 0; r < memory.block.used; r += lanes<T>) {
          here.value(r, alarm, bound, shift);
          pairs = here.choose(r, pairs, first - begin, alarm, memory.missed + first - begin, read, summaries);
          for (int64_t i = r; i < r + lanes<T> && i < count; ++i) memory.shift[first - begin + i] = shift[i];
          here.revive(r, alarm, shift);
        }
        here.absorb_summaries(shift);
      }
      here.absorb_near(shift, read);
      hand_over(memory.block, count, memory.absorbed, first - begin);
    }
    expand_clusters(call, memory, item, head, begin, pairs);
    for (int64_t query = begin; query < end; ++query) {
      const int64_t at = query - begin, row = unit * call.queries + query;
      const T total = sum<T>(load<T>(memory.absorbed.total + at * lanes<T>));
      const T inverse = total > T(0) ? T(1) / total : T(0);
      const T* sums = memory.absorbed.sums + at * memory.absorbed.stride;
      for (int64_t e = 0; e < call.width; ++e) call.out[row * call.width + e] = sums[e] * inverse;
      const T lse = total > T(0) ? T(__builtin_log(double(total)) + double(memory.absorbed.top[at])) : kNever<T>;
      call.lse[row] = lse;
      const double missed = __builtin_sqrt(double(memory.missed[at]));
      call.error[row] = missed > 0 ? T(missed * __builtin_exp(double(memory.shift[at]) - double(lse))) : T(0);
    }
  }
}

template <class T>
constexpr MultipoleKernels<T> multipole_kernels() {
  return {multipole_scratch<T>, multipole_tasks<T>, multipole_forward<T>};
}
