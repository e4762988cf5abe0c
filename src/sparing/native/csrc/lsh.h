// Softmax over the keys that hash rounds show (lsh in Python).

// Copies of the keys that neighbouring strips look at in one round: sorted keys lie anywhere in memory, and a page of
// memory has to be found for each.
template <class T>
struct LshWindow {
  int64_t low, high;           // places
  int64_t fetched;             // the place up to which memory was asked for
  int32_t *token, *place;      // [window], [rounds][window]: the key at a place, and its place in earlier rounds
  T *keys, *values;            // [window][padded depth or width]
  T *key_grads, *value_grads;  // the same, then their rests, backward only
};

// A strip of queries in one round.
template <class T>
struct LshStrip {
  int64_t count;           // queries
  int64_t low, high;       // places that some query sees
  const int32_t* query;    // [count]
  int32_t first[kStrip<T> / kMixed], last[kStrip<T> / kMixed];  // the keys that some of kMixed neighbours see
  Int<T>*from, *length;    // [rounds][kStrip] arcs of the queries in this round and in earlier ones
  T *queries, *scores;     // [depth][kStrip], [span][kStrip]
  T top[kStrip<T>];        // the largest score
  T* sums;                 // [kStrip][padded width], then their rests, forward only
  T *grads, *slopes;       // [width][kStrip], [span][kStrip], backward only
  T *query_rows, *grad_rows, *query_grads;  // [kStrip][padded depth or width], the last with rests, backward only
};

// Lays the parts out in `memory` and returns how many entries of T they need.
template <class T>
int64_t lay_out_lsh(LshWindow<T>* window, LshStrip<T>* strip, const Lsh<T>& call, T* memory, bool backward) {
  int64_t used = 0;
  const auto take = [&]<class Part>(Part** part, int64_t count) {
    if (memory) *part = reinterpret_cast<Part*>(memory + used);
    const int64_t bytes = (count * int64_t(sizeof(Part)) + 63) / 64 * 64;
    used += bytes / int64_t(sizeof(T));
  };
  const int64_t deep = padded<T>(call.depth), wide = padded<T>(call.width);
  take(&strip->queries, call.depth * kStrip<T>);
  take(&strip->scores, call.span * kStrip<T>);
  take(&strip->from, call.rounds * kStrip<T>);
  take(&strip->length, call.rounds * kStrip<T>);
  take(&window->token, call.window);
  take(&window->place, call.rounds * call.window);
  take(&window->keys, call.window * deep);
  take(&window->values, call.window * wide);
  if (!backward) {
    take(&strip->sums, 2 * kStrip<T> * wide);
  } else {
    take(&window->key_grads, 2 * call.window * deep);
    take(&window->value_grads, 2 * call.window * wide);
    take(&strip->grads, call.width * kStrip<T>);
    take(&strip->slopes, call.span * kStrip<T>);
    take(&strip->query_rows, kStrip<T> * deep);
    take(&strip->grad_rows, kStrip<T> * wide);
    take(&strip->query_grads, 2 * kStrip<T> * deep);
  }
  return used;
}

// Counts how many of the sorted queries from `first` on, at most `most`, cover no more than `limit` places together.
template <class T>
int64_t fitting(const Lsh<T>& call, const Arcs& now, int64_t first, int64_t most, int64_t limit, int64_t* low,
                int64_t* high) {
  *low = *high = 0;
  int64_t count = 0;
  for (; count < most && first + count < call.queries; ++count) {
    const int64_t i = now.sorted[first + count], begin = now.from[i], end = begin + now.length[i];
    if (begin == end) continue;
    const bool none = *low == *high;
    const int64_t lowest = none || begin < *low ? begin : *low, highest = none || end > *high ? end : *high;
    if (highest - lowest > limit) break;
    *low = lowest, *high = highest;
  }
  return count;
}

// Copies the keys from the end of the window to place `high`.
template <class T>
void extend_window(LshWindow<T>& window, const Lsh<T>& call, const Arcs* arcs, int64_t unit, int64_t round,
                   int64_t high) {
  const int64_t item = unit / call.heads, head = unit % call.heads, valid = call.counts[item];
  const int64_t deep = padded<T>(call.depth), wide = padded<T>(call.width);
  for (; window.high < high; ++window.high) {
    const int64_t p = window.high, c = p - window.low, token = arcs[round].order[p < 0 ? p + valid : p];
    window.token[c] = int32_t(token);
    copy_row<T>(call.k.at(item, head, token), call.depth, deep, window.keys + c * deep);
    copy_row<T>(call.v.at(item, head, token), call.width, wide, window.values + c * wide);
    for (int64_t e = 0; call.once && e < round; ++e) window.place[e * call.window + c] = arcs[e].place[token];
  }
}

// Copies the keys that the sorted queries from `first` on look at; returns how many queries that serves.
template <class T>
int64_t gather_window(LshWindow<T>& window, const Lsh<T>& call, const Arcs* arcs, int64_t unit, int64_t round,
                      int64_t first, int64_t most) {
  const int64_t valid = call.counts[unit / call.heads];
  const int64_t limit = valid < call.window ? valid : call.window;  // a key is copied once, also around the end
  int64_t high;
  const int64_t count = fitting(call, arcs[round], first, most, limit, &window.low, &high);
  window.high = window.fetched = window.low;
  extend_window(window, call, arcs, unit, round, high);
  return count;
}

// Moves the window on to the places from `low` to `high`, of which it mostly has copies.
template <class T>
void slide_window(LshWindow<T>& window, const Lsh<T>& call, const Arcs* arcs, int64_t unit, int64_t round, int64_t low,
                  int64_t high) {
  const int64_t deep = padded<T>(call.depth), wide = padded<T>(call.width);
  if (low < window.low || low > window.high) window.low = window.high = window.fetched = low;
  if (high - window.low > call.window) {
    const int64_t gone = low - window.low, kept = window.high - low;
    for (int64_t i = 0; i < kept; ++i) window.token[i] = window.token[gone + i];
    for (int64_t e = 0; call.once && e < round; ++e)
      for (int64_t i = e * call.window; i < e * call.window + kept; ++i) window.place[i] = window.place[gone + i];
    copy_row<T>(window.keys + gone * deep, kept * deep, kept * deep, window.keys);
    copy_row<T>(window.values + gone * wide, kept * wide, kept * wide, window.values);
    window.low = low;
  }
  extend_window(window, call, arcs, unit, round, high);
}

// Takes as many of the sorted queries from `first` on, at most `most`, as fit together.
template <class T>
void gather_strip(LshStrip<T>& strip, const Lsh<T>& call, const Arcs* arcs, int64_t unit, int64_t round, int64_t first,
                  int64_t most) {
  const int64_t item = unit / call.heads, head = unit % call.heads;
  most = most < kStrip<T> ? most : kStrip<T>;
  strip.count = fitting(call, arcs[round], first, most, call.span, &strip.low, &strip.high);
  strip.query = arcs[round].sorted + first;
  for (int64_t e = call.once ? 0 : round; e <= round; ++e)
    for (int64_t r = 0; r < kStrip<T>; ++r) {
      const bool there = r < strip.count;
      strip.from[e * kStrip<T> + r] = there ? arcs[e].from[strip.query[r]] : 0;
      strip.length[e * kStrip<T> + r] = there ? arcs[e].length[strip.query[r]] : 0;
    }
  for (int64_t r = 0; r < kStrip<T>; ++r) {
    const int32_t begin = int32_t(strip.from[round * kStrip<T> + r] - strip.low);
    const int32_t end = begin + int32_t(strip.length[round * kStrip<T> + r]);
    int32_t &first = strip.first[r / kMixed], &last = strip.last[r / kMixed];
    if (r % kMixed == 0) first = last = 0;
    if (begin == end) continue;
    first = first == last || begin < first ? begin : first;
    last = end > last ? end : last;
  }
  const T* rows[kStrip<T>];
  for (int64_t r = 0; r < strip.count; ++r) rows[r] = call.q.at(item, head, strip.query[r]);
  strip_columns<T>(rows, strip.count, call.depth, call.scale, strip.queries);
}

// Asks for the rows that the next strips will need: queries and sums of the next, keys of the one after it.
template <class T>
void fetch_next(LshWindow<T>& window, const Lsh<T>& call, const Arcs& now, int64_t unit, int64_t next) {
  const int64_t item = unit / call.heads, head = unit % call.heads, most = 4 * kStrip<T>;
  const auto fetch = [](const T* row, int64_t width) {
    for (int64_t e = 0; e < width; e += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + e, 0, 2);
  };
  for (int64_t i = next; i < call.queries && i < next + kStrip<T>; ++i) {
    fetch(call.q.at(item, head, now.sorted[i]), call.depth);
    fetch(call.out + (unit * call.queries + now.sorted[i]) * call.width, call.width);
  }
  const int64_t ahead = now.sorted[next + 2 * kStrip<T> < call.queries ? next + 2 * kStrip<T> : call.queries - 1];
  const int64_t begin = window.fetched > window.high ? window.fetched : window.high;
  const int64_t end = now.from[ahead] + now.length[ahead];
  window.fetched = end < begin + most ? end : begin + most;
  for (int64_t p = begin < 0 ? 0 : begin; p < window.fetched; ++p) {
    fetch(call.k.at(item, head, now.order[p]), call.depth);
    fetch(call.v.at(item, head, now.order[p]), call.width);
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

// Arcs of a vector of queries in one round.
template <class T>
struct LaneArcs {
  IntVec<T> from, length;

  SPARING_INLINE IntVec<T> hold(Int<T> place) const {
    typedef Vec<typename UnsignedOf<T>::type> Steps;
    return reinterpret_cast<Steps>(place - from) < reinterpret_cast<Steps>(length);  // negative steps are large
  }
};

template <class T>
LaneArcs<T> lane_arcs(const LshStrip<T>& strip, int64_t round, int r) {
  return {load<Int<T>>(strip.from + round * kStrip<T> + r), load<Int<T>>(strip.length + round * kStrip<T> + r)};
}

// Sets the scores of lanes from r on to -inf where a query does not look at the key in this round, or did so in one of
// N rounds from `first` on. Returns the largest scores.
template <class T, int N>
Vec<T> mask_scores(LshStrip<T>& strip, const LshWindow<T>& window, const Lsh<T>& call, int64_t round, int64_t first,
                   int64_t valid, int r) {
  const LaneArcs<T> now = lane_arcs(strip, round, r);
  LaneArcs<T> earlier[N + 1];
  for (int e = 0; e < N; ++e) earlier[e] = lane_arcs(strip, first + e, r);
  const int32_t* place = window.place + first * call.window + (strip.low - window.low);
  Vec<T> top = all(kNever<T>);
  for (int64_t c = 0; c < strip.high - strip.low; ++c) {
    IntVec<T> seen = now.hold(Int<T>(strip.low + c));
    for (int e = 0; e < N; ++e) seen &= ~earlier[e].hold(Int<T>(place[e * call.window + c]));
    if (call.wraps)
      for (int e = 0; e < N; ++e) seen &= ~earlier[e].hold(Int<T>(place[e * call.window + c] - valid));
    T* at = strip.scores + c * kStrip<T> + r;
    const Vec<T> score = seen ? load<T>(at) : all(kNever<T>);
    top = larger<T>(top, score);
    store<T>(at, score);
  }
  return top;
}

// Scores of all keys, -inf where a query does not see the key, or saw it in an earlier round and each counts once.
template <class T>
void strip_scores(LshStrip<T>& strip, const LshWindow<T>& window, const Lsh<T>& call, int64_t unit, int64_t round) {
  const int64_t deep = padded<T>(call.depth), valid = call.counts[unit / call.heads];
  strip_dots<T>(window.keys + (strip.low - window.low) * deep, deep, strip.high - strip.low, call.depth, strip.queries,
                strip.scores);
  for (int r = 0; r < kStrip<T>; r += lanes<T>) {
    Vec<T> top;
    if (call.once && round > 0)
      in_tiles<3>(round, [&]<int N>(int64_t e) { top = mask_scores<T, N>(strip, window, call, round, e, valid, r); });
    else
      top = mask_scores<T, 0>(strip, window, call, round, 0, valid, r);
    store<T>(strip.top + r, top);
  }
}

// Adds what a round shows to the sums of its queries: scores to weights, weights to sums.
template <class T>
void absorb_strip(LshStrip<T>& strip, const LshWindow<T>& window, const Lsh<T>& call, int64_t unit, bool fresh) {
  const int64_t keys = strip.high - strip.low, wide = padded<T>(call.width);
  T top[kStrip<T>], total[kStrip<T>], factor[kStrip<T>];
  for (int64_t r = 0; r < kStrip<T>; ++r) {
    const bool begun = !fresh && r < strip.count;
    top[r] = begun ? call.norm.top[unit * call.queries + strip.query[r]] : kNever<T>;
    total[r] = begun ? call.norm.total[unit * call.queries + strip.query[r]] : T(0);
  }
  for (int r = 0; r < kStrip<T>; r += lanes<T>) {
    const Vec<T> before = load<T>(top + r);
    const Vec<T> highest = larger<T>(before, load<T>(strip.top + r));
    Running<Vec<T>> sum;
    const Vec<T> shift = highest == kNever<T> ? Vec<T>{} : highest;
    in_places(call.in_turn ? 0 : strip.low, keys, call.in_turn ? keys : call.tile, [&](int64_t begin, int64_t end) {
      Vec<T> part{};
      for (int64_t c = begin; c < end; ++c) {
        T* at = strip.scores + c * kStrip<T> + r;
        const Vec<T> weight = exponential_below(load<T>(at) - shift);
        store<T>(at, weight);
        part += weight;
      }
      sum.add(part);
    });
    const Vec<T> shrink = exponential_below(before - shift);
    store<T>(factor + r, shrink);
    store<T>(top + r, highest);
    store<T>(total + r, load<T>(total + r) * shrink + sum.sum);
  }
  for (int64_t r = 0; r < kStrip<T>; ++r) {
    const bool begun = !fresh && r < strip.count;
    const int64_t query = unit * call.queries + (begun ? strip.query[r] : 0);
    copy_row<T>(call.out + query * call.width, begun ? call.width : 0, wide, strip.sums + r * wide, factor[r]);
  }
  clear(strip.sums + kStrip<T> * wide, kStrip<T> * wide);
  mix_to_lanes<T>(strip.scores, window.values + (strip.low - window.low) * wide, strip.first, strip.last, strip.low,
                  keys, call.tile, wide, strip.sums, call.in_turn ? 0 : kStrip<T> * wide);
  for (int64_t r = 0; r < strip.count; ++r) {
    const int64_t query = unit * call.queries + strip.query[r];
    copy_row<T>(strip.sums + r * wide, call.width, call.width, call.out + query * call.width);
    call.norm.top[query] = top[r], call.norm.total[query] = total[r];
  }
}

// Divides the sums of a query by their total. Where nothing was shown, its own key is, if it may be.
template <class T>
void finish_query(const Lsh<T>& call, int64_t unit, int64_t i) {
  const int64_t item = unit / call.heads, head = unit % call.heads, query = unit * call.queries + i;
  T *out = call.out + query * call.width, *top = call.norm.top + query, *total = call.norm.total + query;
  if (*total != T(0)) {
    const T inverse = inverse_of(*total);
    for (int64_t e = 0; e < call.width; ++e) out[e] *= inverse;
  } else if (call.itself && (!call.keep || call.keep[item * call.keys + i])) {
    const T *q = call.q.at(item, head, i), *k = call.k.at(item, head, i), *v = call.v.at(item, head, i);
    T score = T(0);
    for (int64_t d = 0; d < call.depth; ++d) score += q[d] * k[d];
    for (int64_t e = 0; e < call.width; ++e) out[e] = v[e];
    *top = score * call.scale, *total = T(1);
  }
  call.lse[query] = log_sum_exp(*top, *total);
}

template <class T>
int64_t lsh_scratch(const Lsh<T>& call, bool backward) {
  LshWindow<T> window{};
  LshStrip<T> strip{};
  return lay_out_lsh<T>(&window, &strip, call, nullptr, backward) + (backward ? call.queries : 0);
}

template <class T>
void lsh_forward(const Lsh<T>& call, const Arcs* arcs, int64_t unit, int64_t round, int64_t first, int64_t last,
                 T* scratch) {
  LshWindow<T> window{};
  LshStrip<T> strip{};
  lay_out_lsh<T>(&window, &strip, call, scratch, false);
  for (; first < last; first += strip.count) {
    gather_strip(strip, call, arcs, unit, round, first, last - first);
    slide_window(window, call, arcs, unit, round, strip.low, strip.high);
    fetch_next(window, call, arcs[round], unit, first + strip.count);
    strip_scores(strip, window, call, unit, round);
    absorb_strip(strip, window, call, unit, round == 0);
    if (round + 1 == call.rounds)
      for (int64_t r = 0; r < strip.count; ++r) finish_query(call, unit, strip.query[r]);
  }
}

// Copies the gradients of the window's keys between the tensors and the window.
template <class T, bool back>
void move_grads(LshWindow<T>& window, const Lsh<T>& call, int64_t unit) {
  const int64_t deep = padded<T>(call.depth), wide = padded<T>(call.width);
  if (!back) {
    clear(window.key_grads + call.window * deep, (window.high - window.low) * deep);
    clear(window.value_grads + call.window * wide, (window.high - window.low) * wide);
  }
  for (int64_t c = 0; c < window.high - window.low; ++c) {
    T* of_key = call.grad_k + (unit * call.keys + window.token[c]) * call.depth;
    T* of_value = call.grad_v + (unit * call.keys + window.token[c]) * call.width;
    if (back) {
      copy_row<T>(window.key_grads + c * deep, call.depth, call.depth, of_key);
      copy_row<T>(window.value_grads + c * wide, call.width, call.width, of_value);
    } else {
      copy_row<T>(of_key, call.depth, deep, window.key_grads + c * deep);
      copy_row<T>(of_value, call.width, wide, window.value_grads + c * wide);
    }
  }
}

// Gradients of a strip: with its weights p and g the gradient of the output, d value = p g, d score = p (g . value -
// delta), and from that those of query and key.
template <class T>
void strip_backward(LshStrip<T>& strip, LshWindow<T>& window, const Lsh<T>& call, int64_t unit, const T* delta) {
  const int64_t item = unit / call.heads, head = unit % call.heads;
  const int64_t keys = strip.high - strip.low, at = strip.low - window.low;
  const int64_t deep = padded<T>(call.depth), wide = padded<T>(call.width);
  const T* grads[kStrip<T>];
  T tops[kStrip<T>], inverses[kStrip<T>], less[kStrip<T>];
  for (int64_t r = 0; r < kStrip<T>; ++r) {
    tops[r] = -kNever<T>, inverses[r] = less[r] = T(0);  // weight zero everywhere
    const bool there = r < strip.count;
    const int64_t i = there ? strip.query[r] : 0, query = unit * call.queries + i;
    grads[r] = call.grad.at(item, head, i);
    copy_row<T>(grads[r], there ? call.width : 0, wide, strip.grad_rows + r * wide);
    copy_row<T>(call.q.at(item, head, i), there ? call.depth : 0, deep, strip.query_rows + r * deep);
    copy_row<T>(call.grad_q + query * call.depth, there ? call.depth : 0, deep, strip.query_grads + r * deep);
    if (there && call.norm.total[query] != T(0))
      tops[r] = call.norm.top[query], inverses[r] = inverse_of(call.norm.total[query]), less[r] = delta[i];
  }
  strip_columns<T>(grads, strip.count, call.width, T(1), strip.grads);
  strip_dots<T>(window.values + at * wide, wide, keys, call.width, strip.grads, strip.slopes);
  for (int r = 0; r < kStrip<T>; r += lanes<T>) {
    const Vec<T> top = load<T>(tops + r), inverse = load<T>(inverses + r), minus = load<T>(less + r);
    for (int64_t c = 0; c < keys; ++c) {
      T *score = strip.scores + c * kStrip<T> + r, *slope = strip.slopes + c * kStrip<T> + r;
      const Vec<T> weight = exponential(load<T>(score) - top) * inverse;
      store<T>(score, weight);
      store<T>(slope, weight * (load<T>(slope) - minus) * call.scale);
    }
  }
  clear(strip.query_grads + kStrip<T> * deep, kStrip<T> * deep);
  mix_to_lanes<T>(strip.slopes, window.keys + at * deep, strip.first, strip.last, strip.low, keys, call.tile, deep,
                  strip.query_grads, call.in_turn ? 0 : kStrip<T> * deep);
  const int64_t rest = call.in_turn || call.tile == 1 ? 0 : call.window;  // windows end where later tokens say, too
  mix_from_lanes<T>(strip.slopes, strip.query_rows, keys, deep, window.key_grads + at * deep, rest * deep);
  mix_from_lanes<T>(strip.scores, strip.grad_rows, keys, wide, window.value_grads + at * wide, rest * wide);
  for (int64_t r = 0; r < strip.count; ++r)
    copy_row<T>(strip.query_grads + r * deep, call.depth, call.depth,
                call.grad_q + (unit * call.queries + strip.query[r]) * call.depth);
}

template <class T>
void lsh_backward(const Lsh<T>& call, const Arcs* arcs, int64_t unit, T* scratch) {
  LshWindow<T> window{};
  LshStrip<T> strip{};
  T* delta = scratch + lay_out_lsh<T>(&window, &strip, call, scratch, true);
  const int64_t item = unit / call.heads, head = unit % call.heads;
  T *grad_q = call.grad_q + unit * call.queries * call.depth, *grad_k = call.grad_k + unit * call.keys * call.depth;
  T* grad_v = call.grad_v + unit * call.keys * call.width;
  for (int64_t i = 0; i < call.queries * call.depth; ++i) grad_q[i] = T(0);
  for (int64_t i = 0; i < call.keys * call.depth; ++i) grad_k[i] = T(0);
  for (int64_t i = 0; i < call.keys * call.width; ++i) grad_v[i] = T(0);
  for (int64_t i = 0; i < call.queries; ++i) {
    const T *out = call.out + (unit * call.queries + i) * call.width, *grad = call.grad.at(item, head, i);
    const T lse_grad = call.lse_grad[unit * call.queries + i];
    delta[i] = -lse_grad;
    for (int64_t e = 0; e < call.width; ++e) delta[i] += out[e] * grad[e];
    bool shown = false;
    for (int64_t round = 0; round < call.rounds && !shown; ++round) shown = arcs[round].length[i] > 0;
    if (shown || !call.itself || call.norm.total[unit * call.queries + i] == T(0)) continue;
    const T *q = call.q.at(item, head, i), *k = call.k.at(item, head, i);  // it saw its own key alone
    for (int64_t e = 0; e < call.width; ++e) grad_v[i * call.width + e] += grad[e];
    for (int64_t d = 0; d < call.depth; ++d) {
      grad_q[i * call.depth + d] += call.scale * lse_grad * k[d];
      grad_k[i * call.depth + d] += call.scale * lse_grad * q[d];
    }
  }
  for (int64_t round = 0; round < call.rounds; ++round)
    for (int64_t first = 0; first < call.queries;) {
      const int64_t end = first + gather_window(window, call, arcs, unit, round, first, call.queries - first);
      move_grads<T, false>(window, call, unit);
      for (; first < end; first += strip.count) {
        gather_strip(strip, call, arcs, unit, round, first, end - first);
        fetch_next(window, call, arcs[round], unit, first + strip.count);
        strip_scores(strip, window, call, unit, round);
        strip_backward(strip, window, call, unit, delta);
      }
      move_grads<T, true>(window, call, unit);
    }
}
