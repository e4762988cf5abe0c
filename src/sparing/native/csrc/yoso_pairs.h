// The gradient of yoso with respect to one side, mine, of unit vectors u:
//
//   out_i = sum over the hashes and the tokens j of theirs with the code of i of (left_i . left_j) slope(u_i . u_j) u_j
//
// with the slope 1, or, exactly, that of the probability of a collision. Pairs that collide in several hashes are visited
// once. Where a bucket is so full that its pairs cost more than the outer products left_j^T u_j, these are summed first
// and then multiplied by each left_i: never more than O((r + c) e d) for r and c tokens. Where the order of the tokens
// matters, a bucket is cut into tiles of a few tokens: the tile that i stands in goes pair by pair, whole tiles before or
// after it through a running sum of outer products. What is summed how, and in which order, then never depends on tokens
// that i may not see. The exact slope needs every pair.

namespace yoso {

inline constexpr int32_t kTile = 32;
inline constexpr int64_t kPairCost = 2;  // time of a pair's multiply-add over one inside an outer product

// Tokens sorted by code, in their order inside each bucket.
struct Buckets {
  int32_t* first;  // [2^bits + 1]; the sign bit marks buckets that go through outer products
  int32_t* order;  // [tokens]

  SPARING_INLINE int32_t begin(int64_t code) const { return first[code] & 0x7fffffff; }
  SPARING_INLINE int32_t end(int64_t code) const { return first[code + 1] & 0x7fffffff; }
  SPARING_INLINE bool full(int64_t code) const { return first[code] < 0; }

  void sort(const uint16_t* codes, int64_t count, int bits) const {
    const int64_t buckets = int64_t(1) << bits;
    for (int64_t c = 0; c <= buckets; ++c) first[c] = 0;
    for (int64_t j = 0; j < count; ++j) ++first[codes[j]];
    for (int64_t c = 1; c <= buckets; ++c) first[c] += first[c - 1];
    for (int64_t j = count - 1; j >= 0; --j) order[--first[codes[j]]] = int32_t(j);
  }
};

// The tokens that one of mine meets pair by pair, each once, and in how many hashes.
struct Partners {
  int32_t* list;    // [theirs + 1]
  uint8_t* hashes;  // [theirs]
  int64_t count;
};

template <class T>
struct PairWork {
  int64_t deep, wide;  // padded entries of a vector and of a left
  T* rows;             // [theirs][wide + deep]: left, then unit vector
  T* left;             // [wide] of one of mine
  T* point;            // [deep] of one of mine
  T* sums;             // [kDeep][deep]
  T* products;         // [width][deep] sum of outer products
  T* weights;          // [theirs]
  Partners partners[2];              // of the token at work and of the next one
  int32_t *order, *firsts;           // [hashes][theirs], [hashes][2^bits + 1]
  int32_t *mine_order, *mine_first;  // [mine], [2^bits + 1]
  uint8_t* marks;                    // [theirs], zero between two tokens

  // Returns how many entries of T everything needs.
  int64_t lay_out(const PairSums<T>& call, T* memory) {
    deep = padded<T>(call.depth), wide = padded<T>(call.width);
    char* base = reinterpret_cast<char*>(memory);
    int64_t used = 0;
    const auto take = [&]<class P>(P*& part, int64_t count) {
      if (memory) part = reinterpret_cast<P*>(base + used);
      used += (count * int64_t(sizeof(P)) + 63) / 64 * 64;
    };
    const int64_t theirs = call.theirs.tokens, buckets = (int64_t(1) << call.most_bits) + 1;
    take(rows, theirs * (wide + deep));
    take(left, wide);
    take(point, deep);
    take(sums, kDeep * deep);
    take(products, call.width * deep);
    take(weights, theirs);
    for (Partners& some : partners) take(some.list, theirs + 1), take(some.hashes, theirs);
    take(order, call.hashes * theirs);
    take(firsts, call.hashes * buckets);
    take(mine_order, call.mine.tokens);
    take(mine_first, buckets);
    take(marks, theirs);
    return used / int64_t(sizeof(T));
  }
};

// One head.
template <class T>
struct Pairs {
  const PairSums<T>& call;
  PairWork<T>& work;
  int64_t item, head, unit, mine_count, theirs_count, buckets;
  const int32_t *mine_places, *their_places;
  int bits;

  Pairs(const PairSums<T>& call, PairWork<T>& work, int64_t unit) : call(call), work(work), unit(unit) {
    item = unit / call.heads, head = unit % call.heads;
    mine_count = call.mine.counts[item], theirs_count = call.theirs.counts[item];
    mine_places = call.mine.places + item * call.mine.tokens;
    their_places = call.theirs.places + item * call.theirs.tokens;
    bits = call.bits[item], buckets = int64_t(1) << bits;
  }

  const uint16_t* mine_codes(int64_t hash) const {
    return call.mine.codes + (unit * call.hashes + hash) * call.mine.tokens;
  }
  Buckets bucket(int64_t hash) const {
    return {work.firsts + hash * (buckets + 1), work.order + hash * call.theirs.tokens};
  }
  T* out(int64_t i) const { return call.out + (unit * call.mine.tokens + mine_places[i]) * call.depth; }
  const T* row(int64_t j) const { return work.rows + j * (work.wide + work.deep); }

  // How many of the sorted tokens begin..end stand before a place.
  int32_t before(const int32_t* order, int32_t begin, int32_t end, int32_t place) const {
    int32_t low = begin, high = end;
    while (low < high) {
      const int32_t middle = low + (high - low) / 2;
      if (their_places[order[middle]] < place)
        low = middle + 1;
      else
        high = middle;
    }
    return low - begin;
  }

  void gather_rows() const {
    for (int64_t j = 0; j < theirs_count; ++j) {
      T* to = work.rows + j * (work.wide + work.deep);
      const T* left = call.their_left.at(item, head, their_places[j]);
      for (int64_t e = 0; e < work.wide; ++e) to[e] = e < call.width ? left[e] : T(0);
      const T* point = call.their_point.at(item, head, their_places[j]);
      const Shrink unit_of = to_unit(point, call.depth, kNoDirection);
      for (int64_t k = 0; k < work.deep; ++k) to[work.wide + k] = k < call.depth ? T(unit_of(double(point[k]))) : T(0);
    }
  }

  // Sorts theirs; marks the buckets that outer products serve, and says whether there are any.
  bool sort(int64_t hash) const {
    const Buckets theirs = bucket(hash);
    theirs.sort(call.theirs.codes + (unit * call.hashes + hash) * call.theirs.tokens, theirs_count, bits);
    const int64_t outer = call.width * call.depth, pair = kPairCost * (call.width + call.depth);
    int32_t largest = 0;
    for (int64_t c = 0; c < buckets; ++c) {
      const int32_t size = theirs.end(c) - theirs.begin(c);
      largest = size > largest ? size : largest;
    }
    if (call.exact || (call.order == Order::all ? largest * pair <= outer : largest < kTile)) return false;
    const Buckets mine{work.mine_first, work.mine_order};
    mine.sort(mine_codes(hash), mine_count, bits);
    bool any = false;
    for (int64_t c = 0; c < buckets; ++c) {
      const int64_t r = mine.end(c) - mine.begin(c), s = theirs.end(c) - theirs.begin(c);
      if (call.order == Order::all ? r * s * pair <= (r + s) * outer : s < kTile || r == 0) continue;
      theirs.first[c] |= int32_t(0x80000000), any = true;
    }
    return any;
  }

  // products += left_j^T u_j for `count` tokens
  void add_products(const int32_t* tokens, int64_t count) const {
    const int64_t deep = work.deep;
    for (int64_t first = 0; first < count; first += kTile) {
      const int64_t some = count - first < kTile ? count - first : kTile;
      const T* rows[kTile];
      for (int64_t t = 0; t < some; ++t) rows[t] = row(tokens[first + t]);
      for (int64_t k = 0; k < deep; k += kWide * lanes<T>)
        in_tiles<kDeep>(call.width, [&]<int M>(int64_t e) {
          Vec<T> sums[M][kWide];
          for (int i = 0; i < M; ++i)
            for (int p = 0; p < kWide; ++p) sums[i][p] = load<T>(work.products + (e + i) * deep + k + p * lanes<T>);
          for (int64_t t = 0; t < some; ++t) {
            Vec<T> point[kWide];
            for (int p = 0; p < kWide; ++p) point[p] = load<T>(rows[t] + work.wide + k + p * lanes<T>);
            for (int i = 0; i < M; ++i)
              for (int p = 0; p < kWide; ++p) sums[i][p] += all(rows[t][e + i]) * point[p];
          }
          for (int i = 0; i < M; ++i)
            for (int p = 0; p < kWide; ++p) store<T>(work.products + (e + i) * deep + k + p * lanes<T>, sums[i][p]);
        });
    }
  }

  // out_i += left_i products for `count` of mine
  void multiply(const int32_t* tokens, int64_t count) const {
    const int64_t deep = work.deep;
    in_tiles<kDeep>(count, [&]<int M>(int64_t first) {
      const T* left[M];
      for (int i = 0; i < M; ++i) left[i] = call.mine_left.at(item, head, mine_places[tokens[first + i]]);
      for (int64_t k = 0; k < deep; k += kWide * lanes<T>) {
        Vec<T> sums[M][kWide] = {};
        for (int64_t e = 0; e < call.width; ++e) {
          Vec<T> product[kWide];
          for (int p = 0; p < kWide; ++p) product[p] = load<T>(work.products + e * deep + k + p * lanes<T>);
          for (int i = 0; i < M; ++i)
            for (int p = 0; p < kWide; ++p) sums[i][p] += all(left[i][e]) * product[p];
        }
        for (int i = 0; i < M; ++i)
          for (int p = 0; p < kWide; ++p) store<T>(work.sums + i * deep + k + p * lanes<T>, sums[i][p]);
      }
      for (int i = 0; i < M; ++i) {
        T* to = out(tokens[first + i]);
        for (int64_t k = 0; k < call.depth; ++k) to[k] += work.sums[i * deep + k];
      }
    });
  }

  void clear_products() const {
    for (int64_t x = 0; x < call.width * work.deep; ++x) work.products[x] = T(0);
  }

  // The part of a full bucket that goes through outer products.
  void full_bucket(const Buckets& theirs, int64_t code) const {
    const Buckets mine{work.mine_first, work.mine_order};
    const int32_t begin = theirs.begin(code), size = theirs.end(code) - begin;
    const int32_t *tokens = theirs.order + begin, *members = mine.order + mine.begin(code);
    const int32_t count = mine.end(code) - mine.begin(code);
    clear_products();
    if (call.order == Order::all) {
      add_products(tokens, size);
      multiply(members, count);
      return;
    }
    // Runs of mine that see the same whole tiles. `added` tiles are in the products.
    const bool past = call.order == Order::past;
    const auto seen = [&](int32_t m) {  // whole tiles that the m-th sees, from the first on or from the last on
      const int32_t place = mine_places[members[m]];
      if (past) return before(theirs.order, begin, begin + size, place + 1) / kTile;
      return (size + kTile - 1) / kTile - 1 - before(theirs.order, begin, begin + size, place) / kTile;
    };
    const int32_t tiles = (size + kTile - 1) / kTile;
    int32_t added = 0, m = past ? 0 : count - 1;
    while (past ? m < count : m >= 0) {
      const int32_t wanted = seen(m);
      int32_t stop = m;
      while (past ? stop < count && seen(stop) == wanted : stop >= 0 && seen(stop) == wanted) stop += past ? 1 : -1;
      for (; added < wanted; ++added) {
        const int32_t tile = past ? added : tiles - 1 - added;
        add_products(tokens + tile * kTile, size - tile * kTile < kTile ? size - tile * kTile : kTile);
      }
      if (wanted > 0) past ? multiply(members + m, stop - m) : multiply(members + stop + 1, m - stop);
      m = stop;
    }
  }

  // Which of the sorted tokens i meets pair by pair.
  SPARING_INLINE void range(const Buckets& theirs, int64_t code, int32_t place, int32_t* from, int32_t* to) const {
    int32_t begin = theirs.begin(code), end = theirs.end(code);
    if (call.order == Order::all) {
      if (theirs.full(code)) end = begin;
    } else if (call.order == Order::past) {
      end = begin + before(theirs.order, begin, end, place + 1);
      if (!call.exact) begin += (end - begin) / kTile * kTile;
    } else {
      const int32_t hidden = before(theirs.order, begin, end, place);
      const int32_t stop = begin + (hidden / kTile + 1) * kTile;
      begin += hidden;
      if (!call.exact) end = stop < end ? stop : end;
    }
    *from = begin, *to = end;
  }

  // Finds the partners of the i-th. Tables and rows lie far apart: they are fetched some tokens ahead.
  void find(int64_t i, Partners* to) const {
    constexpr int64_t far = 6, near = 3;
    const int64_t ahead = i + far < mine_count ? i + far : mine_count - 1;
    const int64_t next = i + near < mine_count ? i + near : mine_count - 1;
    for (int64_t hash = 0; hash < call.hashes; ++hash) {
      const Buckets theirs = bucket(hash);
      const uint16_t* codes = mine_codes(hash);
      __builtin_prefetch(theirs.first + codes[ahead]);
      __builtin_prefetch(theirs.order + theirs.begin(codes[next]));
    }
    int64_t found = 0;
    const int64_t bytes = (work.wide + work.deep) * int64_t(sizeof(T));
    for (int64_t hash = 0; hash < call.hashes; ++hash) {
      const Buckets theirs = bucket(hash);
      int32_t begin, end;
      range(theirs, mine_codes(hash)[i], mine_places[i], &begin, &end);
      for (; begin < end; ++begin) {
        const int32_t j = theirs.order[begin];
        to->list[found] = j;
        if (!work.marks[j]++) {
          ++found;
          const char* at = reinterpret_cast<const char*>(row(j));
          for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(at + line);
        }
      }
    }
    for (int64_t t = 0; t < found; ++t) {
      uint8_t& mark = work.marks[to->list[t]];
      to->hashes[t] = mark, mark = 0;
    }
    to->count = found;
  }

  // weights[t] = left . left of the t-th token of the list, for M of them
  template <int M>
  SPARING_INLINE void dot_rows(const T* mine, int64_t offset, int64_t width, const int32_t* list, T* weights) const {
    Vec<T> sums[M] = {};
    const T* rows[M];
    for (int m = 0; m < M; ++m) rows[m] = row(list[m]) + offset;
    for (int64_t e = 0; e < width; e += lanes<T>) {
      const Vec<T> x = load<T>(mine + e);
      for (int m = 0; m < M; ++m) sums[m] += x * load<T>(rows[m] + e);
    }
    for (int m = 0; m < M; ++m) weights[m] = folded<T>(sums[m]);
  }

  // sums[k ...] = sum over the partners of weight * vector, for M vectors of entries
  template <int M>
  SPARING_INLINE void weigh(const Partners& with, int64_t k) const {
    Vec<T> sums[M] = {};
    for (int64_t t = 0; t < with.count; ++t) {
      const T* point = row(with.list[t]) + work.wide + k;
      const Vec<T> weight = all(work.weights[t]);
      for (int m = 0; m < M; ++m) sums[m] += weight * load<T>(point + m * lanes<T>);
    }
    for (int m = 0; m < M; ++m) store<T>(work.sums + k + m * lanes<T>, sums[m]);
  }

  // 1 / (pi p sqrt(1 - x^2)) with p = 1 - arccos(x) / pi, as `steepness` in methods/yoso.py
  static double steepness(double x) {
    constexpr double pi = 3.14159265358979323846, steepest = 0.99999950000004166667;  // cos(0.001)
    x = x > steepest ? steepest : x < -steepest ? -steepest : x;
    return 1.0 / ((pi - __builtin_acos(x)) * __builtin_sqrt(1.0 - x * x));
  }

  void visit(int64_t i, const Partners& with) const {
    if (!with.count) return;
    const T* left = call.mine_left.at(item, head, mine_places[i]);
    for (int64_t e = 0; e < call.width; ++e) work.left[e] = left[e];
    in_tiles<4>(with.count, [&]<int M>(int64_t t) {
      dot_rows<M>(work.left, 0, work.wide, with.list + t, work.weights + t);
    });
    if (call.exact) {
      const T* point = call.mine_point.at(item, head, mine_places[i]);
      const Shrink unit_of = to_unit(point, call.depth, kNoDirection);
      for (int64_t k = 0; k < call.depth; ++k) work.point[k] = T(unit_of(double(point[k])));
      for (int64_t t = 0; t < with.count; ++t) {
        T x;
        dot_rows<1>(work.point, work.wide, work.deep, with.list + t, &x);
        work.weights[t] *= T(steepness(double(x)));
      }
    }
    for (int64_t t = 0; t < with.count; ++t) work.weights[t] *= T(with.hashes[t]);
    in_tiles<8>(work.deep / lanes<T>, [&]<int M>(int64_t part) { weigh<M>(with, part * lanes<T>); });
    T* to = out(i);
    for (int64_t k = 0; k < call.depth; ++k) to[k] += work.sums[k];
  }

  void run() const {
    if (!call.add)
      for (int64_t i = 0; i < mine_count; ++i)
        for (int64_t k = 0; k < call.depth; ++k) out(i)[k] = T(0);
    gather_rows();
    for (int64_t x = 0; x < work.wide; ++x) work.left[x] = T(0);
    for (int64_t x = 0; x < work.deep; ++x) work.point[x] = T(0);
    for (int64_t j = 0; j < theirs_count; ++j) work.marks[j] = 0;
    for (int64_t hash = 0; hash < call.hashes; ++hash)
      if (sort(hash))
        for (int64_t c = 0; c < buckets; ++c)
          if (bucket(hash).full(c)) full_bucket(bucket(hash), c);
    if (mine_count) find(0, &work.partners[0]);
    for (int64_t i = 0; i < mine_count; ++i) {
      if (i + 1 < mine_count) find(i + 1, &work.partners[(i + 1) % 2]);
      visit(i, work.partners[i % 2]);
    }
    if (call.last)  // from the unit vectors to those that were given
      for (int64_t i = 0; i < mine_count; ++i)
        unit_row_backward(call.mine_point.at(item, head, mine_places[i]), out(i), call.depth, kNoDirection,
                          call.factor * bits, out(i));
  }
};

template <class T>
int64_t pair_scratch(const PairSums<T>& call) {
  PairWork<T> work{};
  return work.lay_out(call, nullptr);
}

template <class T>
void pair_sums(const PairSums<T>& call, int64_t begin, int64_t end, T* scratch) {
  PairWork<T> work{};
  work.lay_out(call, scratch);
  for (int64_t unit = begin; unit < end; ++unit) Pairs<T>(call, work, unit).run();
}

}  // namespace yoso
