// Softmax over the keys that hash rounds show (lsh in Python).

inline constexpr int64_t kLshBlock = 256;  // queries of a task

// A strip of queries in one round, and the keys that they look at.
template <class T>
struct LshStrip {
  typedef typename IntegerOf<T>::type Whole;
  int64_t count;             // queries
  int64_t low, high;         // places that some query sees
  const int32_t* query;      // [count]
  Whole *from, *length;      // [rounds][kStrip] arcs of the queries in this round and in earlier ones
  const T **keys, **values;  // [high - low]
  int32_t* token;            // [high - low]
  T *queries, *scores;       // [depth][kStrip], [high - low][kStrip]
  T *grads, *slopes;         // [width][kStrip], [high - low][kStrip], backward only
};

// Lays the parts of a strip out in `memory` and returns how many entries of T they need.
template <class T>
int64_t lay_out_strip(LshStrip<T>* strip, const Lsh<T>& call, T* memory, bool backward) {
  int64_t used = 0;
  const auto take = [&]<class Part>(Part** part, int64_t count) {
    if (memory) *part = reinterpret_cast<Part*>(memory + used);
    const int64_t bytes = (count * int64_t(sizeof(Part)) + 63) / 64 * 64;
    used += bytes / int64_t(sizeof(T));
  };
  take(&strip->queries, call.depth * kStrip<T>);
  take(&strip->scores, call.longest * kStrip<T>);
  take(&strip->from, call.rounds * kStrip<T>);
  take(&strip->length, call.rounds * kStrip<T>);
  take(&strip->keys, call.longest);
  take(&strip->values, call.longest);
  take(&strip->token, call.longest);
  if (backward) {
    take(&strip->grads, call.width * kStrip<T>);
    take(&strip->slopes, call.longest * kStrip<T>);
  }
  return used;
}

// Takes as many of the queries from `first` to `last` of the sorted ones as fit together, and finds their keys.
template <class T>
void gather_strip(LshStrip<T>& strip, const Lsh<T>& call, const Arcs* arcs, int64_t unit, int64_t round, int64_t first,
                  int64_t last) {
  const Arcs& now = arcs[round];
  const int64_t item = unit / call.heads, head = unit % call.heads;
  strip.query = now.sorted + first;
  strip.count = strip.low = strip.high = 0;
  for (int64_t i = first; i < last && strip.count < kStrip<T>; ++i, ++strip.count) {
    const int64_t low = now.from[now.sorted[i]], high = low + now.length[now.sorted[i]];
    if (low == high) continue;
    const bool empty = strip.low == strip.high;
    const int64_t lowest = empty || low < strip.low ? low : strip.low;
    const int64_t highest = empty || high > strip.high ? high : strip.high;
    if (highest - lowest > call.longest) break;
    strip.low = lowest, strip.high = highest;
  }
  for (int64_t r = 0; r < kStrip<T>; ++r)
    for (int64_t e = call.once ? 0 : round; e <= round; ++e) {
      const bool there = r < strip.count;
      strip.from[e * kStrip<T> + r] = there ? arcs[e].from[strip.query[r]] : 0;
      strip.length[e * kStrip<T> + r] = there ? arcs[e].length[strip.query[r]] : 0;
    }
  for (int64_t p = strip.low; p < strip.high; ++p) {
    const int32_t token = now.order[p < 0 ? p + call.counts[item] : p];
    strip.token[p - strip.low] = token;
    strip.keys[p - strip.low] = call.k.at(item, head, token);
    strip.values[p - strip.low] = call.v.at(item, head, token);
  }
}

template <class T>
struct UnsignedOf;
template <>
struct UnsignedOf<float> {
  using type = uint32_t;
};
template <>
struct UnsignedOf<double> {
  using type = uint64_t;
};

// Which lanes from r on look at this place in round e.
template <class T>
SPARING_INLINE IntVec<T> looks_at(const LshStrip<T>& strip, int64_t e, int64_t place, int r) {
  typedef Vec<typename UnsignedOf<T>::type> Steps;
  const IntVec<T> steps = Int<T>(place) - load<Int<T>>(strip.from + e * kStrip<T> + r);
  const IntVec<T> length = load<Int<T>>(strip.length + e * kStrip<T> + r);
  return reinterpret_cast<Steps>(steps) < reinterpret_cast<Steps>(length);  // negative steps are large
}

// Scores of all keys, -inf where a query does not see the key, or saw it in an earlier round and each counts once.
template <class T, bool wraps>
void strip_scores(LshStrip<T>& strip, const Lsh<T>& call, const Arcs* arcs, int64_t round, int64_t count) {
  strip_dots<T>(strip.keys, strip.high - strip.low, call.depth, strip.queries, strip.scores);
  for (int r = 0; r < kStrip<T>; r += lanes<T>)
    for (int64_t p = strip.low; p < strip.high; ++p) {
      IntVec<T> seen = looks_at(strip, round, p, r);
      const int32_t token = strip.token[p - strip.low];
      for (int64_t e = call.once ? 0 : round; e < round; ++e) {
        const int64_t place = arcs[e].place[token];
        seen &= ~looks_at(strip, e, place, r);
        if constexpr (wraps) seen &= ~looks_at(strip, e, place - count, r);
      }
      T* at = strip.scores + (p - strip.low) * kStrip<T> + r;
      store<T>(at, seen ? load<T>(at) : all(kNever<T>));
    }
}

template <class T>
void strip_scores(LshStrip<T>& strip, const Lsh<T>& call, const Arcs* arcs, int64_t unit, int64_t round) {
  const T* rows[kStrip<T>];
  for (int64_t r = 0; r < strip.count; ++r)
    rows[r] = call.q.at(unit / call.heads, unit % call.heads, strip.query[r]);
  strip_columns<T>(rows, strip.count, call.depth, call.scale, strip.queries);
  const int64_t count = call.counts[unit / call.heads];
  if (call.wraps)
    strip_scores<T, true>(strip, call, arcs, round, count);
  else
    strip_scores<T, false>(strip, call, arcs, round, count);
}

// Adds what a round shows to the sums of its queries: scores to weights, weights to sums.
template <class T>
void absorb_strip(LshStrip<T>& strip, const Lsh<T>& call, int64_t unit, bool fresh) {
  const int64_t keys = strip.high - strip.low;
  T top[kStrip<T>], total[kStrip<T>], factor[kStrip<T>];
  for (int64_t r = 0; r < kStrip<T>; ++r) {
    const bool begun = !fresh && r < strip.count;
    top[r] = begun ? call.lse[unit * call.queries + strip.query[r]] : kNever<T>;
    total[r] = begun ? call.total[unit * call.queries + strip.query[r]] : T(0);
  }
  for (int r = 0; r < kStrip<T>; r += lanes<T>) {
    const Vec<T> before = load<T>(top + r);
    Vec<T> highest = before, sum{};
    for (int64_t c = 0; c < keys; ++c) highest = larger<T>(highest, load<T>(strip.scores + c * kStrip<T> + r));
    const Vec<T> shift = highest == kNever<T> ? Vec<T>{} : highest;
    for (int64_t c = 0; c < keys; ++c) {
      T* at = strip.scores + c * kStrip<T> + r;
      const Vec<T> weight = exponential(load<T>(at) - shift);
      store<T>(at, weight);
      sum += weight;
    }
    const Vec<T> shrink = exponential(before - shift);
    store<T>(factor + r, shrink);
    store<T>(top + r, highest);
    store<T>(total + r, load<T>(total + r) * shrink + sum);
  }
  T* rows[kStrip<T>];
  for (int64_t r = 0; r < strip.count; ++r) {
    const int64_t query = unit * call.queries + strip.query[r];
    rows[r] = call.out + query * call.width;
    for (int64_t e = 0; e < call.width; ++e) rows[r][e] = fresh ? T(0) : rows[r][e] * factor[r];
    call.lse[query] = top[r], call.total[query] = total[r];
  }
  for (int64_t c = 0; c < keys; c += kKeys)
    mix_rows<T>(strip.scores + c * kStrip<T>, 1, kStrip<T>, strip.values + c, keys - c < kKeys ? keys - c : kKeys,
                call.width, rows, strip.count);
}

// Divides the sums of a query by their total. Where nothing was shown, its own key is, if it may be.
template <class T>
void finish_query(const Lsh<T>& call, int64_t unit, int64_t i) {
  const int64_t item = unit / call.heads, head = unit % call.heads, query = unit * call.queries + i;
  T* out = call.out + query * call.width;
  if (call.total[query] > T(0)) {
    const T inverse = T(1) / call.total[query];
    for (int64_t e = 0; e < call.width; ++e) out[e] *= inverse;
    call.lse[query] = T(__builtin_log(double(call.total[query])) + double(call.lse[query]));
  } else if (call.itself && (!call.keep || call.keep[item * call.keys + i])) {
    const T *q = call.q.at(item, head, i), *k = call.k.at(item, head, i), *v = call.v.at(item, head, i);
    T score = T(0);
    for (int64_t d = 0; d < call.depth; ++d) score += q[d] * k[d];
    for (int64_t e = 0; e < call.width; ++e) out[e] = v[e];
    call.lse[query] = score * call.scale;
  }
}

template <class T>
int64_t lsh_blocks(const Lsh<T>& call) {
  return (call.queries + kLshBlock - 1) / kLshBlock;
}

template <class T>
int64_t lsh_scratch(const Lsh<T>& call, bool backward) {
  LshStrip<T> strip{};
  return lay_out_strip<T>(&strip, call, nullptr, backward) + (backward ? call.queries : 0);
}

template <class T>
void lsh_forward(const Lsh<T>& call, const Arcs* arcs, int64_t unit, int64_t round, int64_t begin, int64_t end,
                 T* scratch) {
  LshStrip<T> strip{};
  lay_out_strip<T>(&strip, call, scratch, false);
  for (int64_t block = begin; block < end; ++block) {
    const int64_t last = (block + 1) * kLshBlock < call.queries ? (block + 1) * kLshBlock : call.queries;
    for (int64_t first = block * kLshBlock; first < last; first += strip.count) {
      gather_strip(strip, call, arcs, unit, round, first, last);
      strip_scores(strip, call, arcs, unit, round);
      absorb_strip(strip, call, unit, round == 0);
      if (round + 1 == call.rounds)
        for (int64_t r = 0; r < strip.count; ++r) finish_query(call, unit, strip.query[r]);
    }
  }
}

// Gradients of a strip: with its weights p and g the gradient of the output, d value = p g, d score = p (g . value -
// delta), and from that those of query and key.
template <class T>
void strip_backward(LshStrip<T>& strip, const Lsh<T>& call, int64_t unit, const T* delta) {
  const int64_t item = unit / call.heads, head = unit % call.heads, keys = strip.high - strip.low;
  const T *queries[kStrip<T>], *grads[kStrip<T>];
  T* query_grads[kStrip<T>];
  T shift[kStrip<T>], less[kStrip<T>];
  for (int64_t r = 0; r < kStrip<T>; ++r) {
    shift[r] = -kNever<T>, less[r] = T(0);  // weight zero everywhere
    if (r >= strip.count) continue;
    const int64_t i = strip.query[r];
    queries[r] = call.q.at(item, head, i);
    grads[r] = call.grad.at(item, head, i);
    query_grads[r] = call.grad_q + (unit * call.queries + i) * call.depth;
    const T lse = call.lse[unit * call.queries + i];
    if (lse != kNever<T>) shift[r] = lse, less[r] = delta[i];
  }
  strip_columns<T>(grads, strip.count, call.width, T(1), strip.grads);
  strip_dots<T>(strip.values, keys, call.width, strip.grads, strip.slopes);
  for (int r = 0; r < kStrip<T>; r += lanes<T>) {
    const Vec<T> top = load<T>(shift + r), minus = load<T>(less + r);
    for (int64_t c = 0; c < keys; ++c) {
      T *score = strip.scores + c * kStrip<T> + r, *slope = strip.slopes + c * kStrip<T> + r;
      const Vec<T> weight = exponential(load<T>(score) - top);
      store<T>(score, weight);
      store<T>(slope, weight * (load<T>(slope) - minus) * call.scale);
    }
  }
  for (int64_t c = 0; c < keys; c += kKeys) {
    const int64_t some = keys - c < kKeys ? keys - c : kKeys;
    T *key_grads[kKeys], *value_grads[kKeys];
    for (int64_t i = 0; i < some; ++i) {
      key_grads[i] = call.grad_k + (unit * call.keys + strip.token[c + i]) * call.depth;
      value_grads[i] = call.grad_v + (unit * call.keys + strip.token[c + i]) * call.width;
    }
    const T *weights = strip.scores + c * kStrip<T>, *slopes = strip.slopes + c * kStrip<T>;
    mix_rows<T>(slopes, 1, kStrip<T>, strip.keys + c, some, call.depth, query_grads, strip.count);
    mix_rows<T>(slopes, kStrip<T>, 1, queries, strip.count, call.depth, key_grads, some);
    mix_rows<T>(weights, kStrip<T>, 1, grads, strip.count, call.width, value_grads, some);
  }
}

template <class T>
void lsh_backward(const Lsh<T>& call, const Arcs* arcs, int64_t unit, T* scratch) {
  LshStrip<T> strip{};
  T* delta = scratch + lay_out_strip<T>(&strip, call, scratch, true);
  const int64_t item = unit / call.heads, head = unit % call.heads;
  T *grad_q = call.grad_q + unit * call.queries * call.depth, *grad_k = call.grad_k + unit * call.keys * call.depth;
  T* grad_v = call.grad_v + unit * call.keys * call.width;
  for (int64_t i = 0; i < call.queries * call.depth; ++i) grad_q[i] = T(0);
  for (int64_t i = 0; i < call.keys * call.depth; ++i) grad_k[i] = T(0);
  for (int64_t i = 0; i < call.keys * call.width; ++i) grad_v[i] = T(0);
  for (int64_t i = 0; i < call.queries; ++i) {
    const T *out = call.out + (unit * call.queries + i) * call.width, *grad = call.grad.at(item, head, i);
    const T lse_grad = call.lse_grad[unit * call.queries + i];
    // Summed in the order of strip_dots(): where one key has all the weight, its slope is then zero, as it should be.
    T sum = T(0);
    for (int64_t e = 0; e < call.width; ++e) sum += out[e] * grad[e];
    delta[i] = sum - lse_grad;
    bool shown = false;
    for (int64_t round = 0; round < call.rounds && !shown; ++round) shown = arcs[round].length[i] > 0;
    if (shown || call.lse[unit * call.queries + i] == kNever<T>) continue;
    const T *q = call.q.at(item, head, i), *k = call.k.at(item, head, i);  // it saw its own key alone
    for (int64_t e = 0; e < call.width; ++e) grad_v[i * call.width + e] += grad[e];
    for (int64_t d = 0; d < call.depth; ++d) {
      grad_q[i * call.depth + d] += call.scale * lse_grad * k[d];
      grad_k[i * call.depth + d] += call.scale * lse_grad * q[d];
    }
  }
  for (int64_t round = 0; round < call.rounds; ++round)
    for (int64_t first = 0; first < call.queries; first += strip.count) {
      gather_strip(strip, call, arcs, unit, round, first, call.queries);
      strip_scores(strip, call, arcs, unit, round);
      strip_backward(strip, call, unit, delta);
    }
}
