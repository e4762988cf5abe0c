// Attention through features: sums over keys for each feature, and sums over features for each query.

// Sums over keys that grow block by block, each weight divided by exp(level).
template <class T>
struct FeatureState {
  int64_t features, width;
  T* sums;   // [features][padded width]
  T* mass;   // [features][lanes], one number for each lane of the blocks
  T* rows;   // [kRows][padded width] weighted values of a block
  T* share;  // [kRows] factor of each lane
  T level;
};

template <class T>
FeatureState<T> feature_state(Supply<T>& supply, int64_t features, int64_t width, T* sums) {
  const int64_t wide = padded<T>(width);
  return {features, width, sums ? sums : supply.take(features * wide), supply.take(features * lanes<T>),
          supply.take(kRows * wide), supply.take(kRows), kNever<T>};
}

template <class T>
void clear(FeatureState<T>& state) {
  for (int64_t i = 0; i < state.features * padded<T>(state.width); ++i) state.sums[i] = T(0);
  for (int64_t i = 0; i < state.features * lanes<T>; ++i) state.mass[i] = T(0);
  state.level = kNever<T>;
}

template <class T>
SPARING_INLINE T exponential_of(T x) {
  return exponential(all(x))[0];
}

// Divides the state by exp(level - its own level).
template <class T>
void raise_level(FeatureState<T>& state, T level) {
  if (level <= state.level) return;
  const T factor = exponential_of<T>(state.level - level);
  for (int64_t i = 0; i < state.features * padded<T>(state.width); ++i) state.sums[i] *= factor;
  for (int64_t i = 0; i < state.features * lanes<T>; ++i) state.mass[i] *= factor;
  state.level = level;
}

// Adds `count` keys.
template <class T>
void absorb_keys(FeatureState<T>& state, const FeatureBlock<T>& block, const T* const* values, int64_t count) {
  if (!count) return;
  const int64_t wide = padded<T>(state.width);
  T level = state.level;
  for (int64_t r = 0; r < count; ++r)
    if (block.log[r] > level) level = block.log[r];
  raise_level(state, level);
  for (int r = 0; r < kRows; r += lanes<T>) store<T>(state.share + r, exponential(load<T>(block.log + r) - level));
  for (int64_t r = 0; r < kRows; ++r) {
    T* row = state.rows + r * wide;
    const bool seen = r < count;
    if (!seen) state.share[r] = T(0);
    for (int64_t e = 0; e < wide; ++e) row[e] = seen && e < state.width ? state.share[r] * values[r][e] : T(0);
  }
  in_feature_tiles(state.features, [&](int64_t f, int64_t some) {
    T* rows[kKeys];
    for (int64_t c = 0; c < some; ++c) {
      rows[c] = state.sums + (f + c) * wide;
      T* mass = state.mass + (f + c) * lanes<T>;
      Vec<T> total = load<T>(mass);
      for (int r = 0; r < kRows; r += lanes<T>)
        total += load<T>(block.phi + (f + c) * kRows + r) * load<T>(state.share + r);
      store<T>(mass, total);
    }
    spread<T>(block.phi + f * kRows, some, state.rows, wide, rows);
  });
}

template <class T>
int64_t feature_sums_scratch(const FeatureSums<T>& call) {
  Supply<T> supply{nullptr};
  feature_block(supply, call.from);
  T aside;
  feature_state(supply, call.from.features, call.width, &aside);
  return supply.used;
}

template <class T>
void feature_sums(const FeatureSums<T>& call, int64_t begin, int64_t end, T* scratch) {
  const Featured<T>& from = call.from;
  Supply<T> supply{scratch};
  FeatureBlock<T> block = feature_block(supply, from);
  const int64_t size = from.features * padded<T>(call.width);
  FeatureState<T> state = feature_state(supply, from.features, call.width, call.part_sums);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t unit = task / call.chunks, item = unit / from.heads, head = unit % from.heads;
    const int64_t first = task % call.chunks * call.chunk;
    const int64_t last = first + call.chunk < from.tokens ? first + call.chunk : from.tokens;
    state.sums = call.part_sums + task * size;
    clear(state);
    for (int64_t j = first; j < last;) {
      const T *keys[kRows], *values[kRows];
      int64_t count = 0;
      for (; j < last && count < kRows; ++j) {
        if (call.keep && !call.keep[item * from.tokens + j]) continue;
        keys[count] = from.x.at(item, head, j);
        values[count++] = call.values.at(item, head, j);
      }
      if (!count) continue;
      features_of(from, item, head, keys, count, block);
      absorb_keys(state, block, values, count);
    }
    for (int64_t f = 0; f < from.features; ++f)
      call.part_mass[task * from.features + f] = sum<T>(load<T>(state.mass + f * lanes<T>));
    call.part_level[task] = state.level;
  }
}

template <class T>
void feature_merge(const FeatureSums<T>& call, int64_t begin, int64_t end) {
  const int64_t features = call.from.features, wide = padded<T>(call.width);
  for (int64_t unit = begin; unit < end; ++unit) {
    const T* levels = call.part_level + unit * call.chunks;
    T level = kNever<T>;
    for (int64_t c = 0; c < call.chunks; ++c) level = levels[c] > level ? levels[c] : level;
    if (level == kNever<T>) level = T(0);
    T *sums = call.sums + unit * features * call.width, *mass = call.mass + unit * features;
    for (int64_t i = 0; i < features * call.width; ++i) sums[i] = T(0);
    for (int64_t f = 0; f < features; ++f) mass[f] = T(0);
    for (int64_t c = 0; c < call.chunks; ++c) {
      const int64_t task = unit * call.chunks + c;
      const T share = exponential_of<T>(levels[c] - level);
      for (int64_t f = 0; f < features; ++f) {
        const T* part = call.part_sums + (task * features + f) * wide;
        for (int64_t e = 0; e < call.width; ++e) sums[f * call.width + e] += share * part[e];
        mass[f] += share * call.part_mass[task * features + f];
      }
    }
    call.level[unit] = level;
  }
}

// out[r][e] = factors[r] * sums[e][r] for r < count
template <class T>
void write_rows(const T* sums, int64_t width, int64_t count, const T* factors, T* out) {
  constexpr int64_t kLine = 64 / sizeof(T);  // entries of a row that share a cache line
  for (int64_t first = 0; first < width; first += kLine) {
    const int64_t last = first + kLine < width ? first + kLine : width;
    for (int64_t r = 0; r < count; ++r)
      for (int64_t e = first; e < last; ++e) out[r * width + e] = factors[r] * sums[e * kRows + r];
  }
}

// One over a total, or zero where it is too small to divide by.
template <class T>
SPARING_INLINE Vec<T> inverse_total(Vec<T> total) {
  constexpr T smallest = sizeof(T) == 4 ? T(1.17549435e-30) : T(2.2250738585072014e-300);
  return total < smallest ? Vec<T>{} : T(1) / total;
}

template <class T>
int64_t feature_mix_tasks(const FeatureMix<T>& call) {
  return call.from.items * call.from.heads * ((call.from.tokens + kRows - 1) / kRows);
}

template <class T>
int64_t feature_mix_scratch(const FeatureMix<T>& call) {
  Supply<T> supply{nullptr};
  feature_block(supply, call.from);
  supply.take(call.width * kRows);
  return supply.used;
}

template <class T>
void feature_mix(const FeatureMix<T>& call, int64_t begin, int64_t end, T* scratch) {
  const Featured<T>& from = call.from;
  Supply<T> supply{scratch};
  FeatureBlock<T> block = feature_block(supply, from);
  T* sums = supply.take(call.width * kRows);
  const int64_t blocks = (from.tokens + kRows - 1) / kRows;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t unit = task / blocks, item = unit / from.heads, head = unit % from.heads;
    const int64_t first = task % blocks * kRows;
    const int64_t count = from.tokens - first < kRows ? from.tokens - first : kRows;
    const T* queries[kRows];
    for (int64_t r = 0; r < count; ++r) queries[r] = from.x.at(item, head, first + r);
    features_of(from, item, head, queries, count, block);
    for (int64_t i = 0; i < call.width * kRows; ++i) sums[i] = T(0);
    in_feature_tiles(from.features, [&](int64_t f, int64_t some) {
      const T* rows[kKeys];
      for (int64_t c = 0; c < some; ++c) rows[c] = call.table.at(item, head, f + c);
      weighted_sums<T>(rows, some, call.width, block.phi + f * kRows, sums);
    });
    T factors[kRows], totals[kRows];
    for (int r = 0; r < kRows; r += lanes<T>) {
      Vec<T> total{}, factor = all(T(1));
      if (call.mass) {
        const T* mass = call.mass + unit * from.features;
        for (int64_t f = 0; f < from.features; ++f) total += all(mass[f]) * load<T>(block.phi + f * kRows + r);
        factor = inverse_total<T>(total);
      }
      store<T>(factors + r, factor), store<T>(totals + r, total);
    }
    write_rows<T>(sums, call.width, count, factors, call.out + (unit * from.tokens + first) * call.width);
    if (call.mass)
      for (int64_t r = 0; r < count; ++r) call.total[unit * from.tokens + first + r] = totals[r];
  }
}
