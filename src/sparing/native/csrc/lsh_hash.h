// Buckets by random rotations (rotation_buckets in Python).
//
// The largest of |R x| is looked for in 16-bit integers, which are multiplied twice as fast as float32; how far the
// rounding can move a product is known, and rows that could still be the largest are compared in float64. The bucket
// is therefore the one that float64 finds.

inline constexpr int kHashed = kWide * lanes<float>;  // tokens that are hashed together
inline constexpr int kHashBlock = 8 * kHashed;        // tokens of a task
inline constexpr double kRoundedNorm = 32000.0;       // of rounded vectors: an entry fits 16 bits, a product 31

// The sums of the products of two pairs of 16-bit numbers, in each lane.
SPARING_INLINE Vec<int32_t> pair_products(Vec<int32_t> a, Vec<int32_t> b) {
#if defined(__x86_64__) && SPARING_BYTES == 64 && !defined(SPARING_EMULATE_AVX512)
  return reinterpret_cast<Vec<int32_t>>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__x86_64__) && SPARING_BYTES == 32
  return reinterpret_cast<Vec<int32_t>>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__x86_64__) && SPARING_BYTES == 16
  return reinterpret_cast<Vec<int32_t>>(_mm_madd_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
  return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// out[i][lane] = rows[.][i] . columns[.][lane] for i < kDeep
SPARING_INLINE void pair_tile(const int32_t* rows, int64_t pairs, const int32_t* columns, int32_t* out) {
  constexpr int kLanes = lanes<int32_t>;
  Vec<int32_t> sums[kDeep][kWide] = {};
  for (int64_t k = 0; k < pairs; ++k) {
    Vec<int32_t> column[kWide];
    for (int j = 0; j < kWide; ++j) column[j] = load<int32_t>(columns + k * kHashed + j * kLanes);
    for (int i = 0; i < kDeep; ++i) {
      const Vec<int32_t> x = all(rows[k * kDeep + i]);
      for (int j = 0; j < kWide; ++j) sums[i][j] += pair_products(x, column[j]);
    }
  }
  for (int i = 0; i < kDeep; ++i)
    for (int j = 0; j < kWide; ++j) store<int32_t>(out + i * kHashed + j * kLanes, sums[i][j]);
}

SPARING_INLINE int32_t pair_of(int32_t low, int32_t high) { return (low & 0xffff) | int32_t(uint32_t(high) << 16); }

template <class T>
int64_t hash_pairs(const RotationHash<T>& call) {
  return (call.depth + 1) / 2;
}

template <class T>
int64_t hash_tiles(const RotationHash<T>& call) {  // of kDeep rows, the last filled up
  return (call.rows + kDeep - 1) / kDeep;
}

template <class T>
int64_t rounded_size(const RotationHash<T>& call) {
  return hash_tiles(call) * kDeep * hash_pairs(call);
}

template <class T>
void round_rotations(const RotationHash<T>& call, int64_t begin, int64_t end) {
  const int64_t pairs = hash_pairs(call);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t head = task / call.rounds, round = task % call.rounds;
    const auto row = [&](int64_t i) {
      return call.rotations + ((head * call.rows + i) * call.rounds + round) * call.depth;
    };
    double longest = 0.0;
    for (int64_t i = 0; i < call.rows; ++i) {
      double square = 0.0;
      for (int64_t k = 0; k < call.depth; ++k) square += row(i)[k] * row(i)[k];
      longest = square > longest ? square : longest;
    }
    longest = __builtin_sqrt(longest);
    const double scale = longest > 0.0 ? kRoundedNorm / longest : 0.0;
    double worst = 0.0;
    int32_t* table = call.rounded + task * rounded_size(call);
    for (int64_t i = 0; i < rounded_size(call); ++i) table[i] = 0;
    for (int64_t i = 0; i < call.rows; ++i) {
      int32_t* to = table + i / kDeep * kDeep * pairs + i % kDeep;
      double square = 0.0;
      const auto rounded = [&](int64_t k) {
        if (k >= call.depth) return 0;
        const double exact = row(i)[k] * scale;
        const int32_t near = int32_t(exact + (exact < 0.0 ? -0.5 : 0.5));
        square += (exact - near) * (exact - near);
        return near;
      };
      for (int64_t p = 0; p < pairs; ++p) {
        const int32_t low = rounded(2 * p), high = rounded(2 * p + 1);
        to[p * kDeep] = pair_of(low, high);
      }
      worst = square > worst ? square : worst;
    }
    call.slack[task] = __builtin_sqrt(worst);
  }
}

// Writes token x, scaled and rounded, to columns[.][lane]. Returns the norm of its rounding error (a little more), or
// -1 where x is too small or too large for that.
template <class T>
SPARING_INLINE double round_token(const T* x, int64_t depth, int32_t* columns, T* buffer) {
  typedef Int<T> Bits __attribute__((may_alias));
  constexpr T kNearest = sizeof(T) == 4 ? T(12582912.0) : T(6755399441055744.0);  // leaves integers in the low bits
  Vec<T> squares{}, errors{};
  int64_t k = 0;
  for (; k + lanes<T> <= depth; k += lanes<T>) squares += load<T>(x + k) * load<T>(x + k);
  T square = sum<T>(squares), error = T(0);
  for (; k < depth; ++k) square += x[k] * x[k];
  const bool usual = square > T(1e-30) && square < T(1e30);
  const T scale = usual ? T(kRoundedNorm / __builtin_sqrt(double(square))) : T(0);
  for (k = 0; usual && k + lanes<T> <= depth; k += lanes<T>) {
    const Vec<T> exact = load<T>(x + k) * scale, shifted = exact + kNearest, off = exact - (shifted - kNearest);
    errors += off * off;
    store<T>(buffer + k, shifted);
  }
  for (; usual && k < depth; ++k) {
    const T exact = x[k] * scale, shifted = exact + kNearest, off = exact - (shifted - kNearest);
    error += off * off;
    buffer[k] = shifted;
  }
  if (!usual)
    for (k = 0; k < depth; ++k) buffer[k] = kNearest;
  if (depth % 2) buffer[depth] = kNearest;
  const Bits* bits = reinterpret_cast<const Bits*>(buffer);
  for (k = 0; k < depth; k += 2) columns[k / 2 * kHashed] = pair_of(int32_t(bits[k]), int32_t(bits[k + 1]));
  return usual ? __builtin_sqrt(double(sum<T>(errors) + error)) * 1.001 + 0.02 : -1.0;
}

template <class T>
double exact_product(const T* x, const double* row, int64_t depth) {
  double total = 0.0;
  for (int64_t k = 0; k < depth; ++k) total += double(x[k]) * row[k];
  return total;
}

template <class T>
int64_t hash_tasks(const RotationHash<T>& call) {
  return call.items * call.heads * ((call.tokens + kHashBlock - 1) / kHashBlock);
}

template <class T>
int64_t hash_buffer(const RotationHash<T>& call) {  // for round_token, in int32
  return ((call.depth + 1) * int64_t(sizeof(T) / sizeof(int32_t)) + 15) / 16 * 16;
}

template <class T>
int64_t hash_scratch(const RotationHash<T>& call) {
  const int64_t columns = hash_pairs(call) * kHashBlock, products = hash_tiles(call) * kDeep * kHashed;
  return columns + products + hash_buffer(call);
}

// Buckets of the tokens of one strip in one round, from the products of their roundings.
template <class T>
SPARING_INLINE void find_buckets(const RotationHash<T>& call, const int32_t* products, int64_t rows, int64_t head,
                                 int64_t round, const T* const* tokens, const double* errors, int64_t count,
                                 int32_t* out) {
  constexpr int kLanes = lanes<int32_t>;
  const double slack = call.slack[head * call.rounds + round];
  const auto row = [&](int64_t i) {
    return call.rotations + ((head * call.rows + i) * call.rounds + round) * call.depth;
  };
  int32_t best[kHashed], apart[kHashed], needed[kHashed];
  for (int j = 0; j < kWide; ++j) {
    Vec<int32_t> top = all(int32_t(-1)), next = top, at{}, now{};
    for (int64_t i = 0; i < rows; ++i, now += 1) {
      const Vec<int32_t> product = load<int32_t>(products + i * kHashed + j * kLanes);
      const Vec<int32_t> size = product < 0 ? -product : product;
      next = larger<int32_t>(next, size < top ? size : top);
      at = size > top ? now : at;
      top = larger<int32_t>(top, size);
    }
    store<int32_t>(apart + j * kLanes, top - next);
    store<int32_t>(best + j * kLanes, at);
  }
  // |x.r - x'.r'| <= |x - x'| |r| + |x'| |r - r'|; the norm of x' is that of x, which float32 knows to 0.001, and more.
  // Two products may move towards each other.
  for (int64_t r = 0; r < count; ++r)
    needed[r] = int32_t(2.0 * (errors[r] * kRoundedNorm + (1.001 * kRoundedNorm + errors[r]) * slack + 1.0));
  for (int64_t r = 0; r < count; ++r) {
    const bool known = errors[r] >= 0.0;
    if (known && apart[r] > needed[r]) {
      out[r] = best[r] + (products[best[r] * kHashed + r] > 0 ? int32_t(rows) : 0);
      continue;
    }
    const auto size = [&](int64_t i) { return __builtin_abs(products[i * kHashed + r]); };
    const int32_t limit = known ? size(best[r]) - needed[r] : -1;
    double top = -1.0, along = 0.0;
    for (int64_t i = 0; i < rows; ++i) {
      if (size(i) < limit) continue;
      const double product = exact_product(tokens[r], row(i), call.depth);
      if (__builtin_fabs(product) > top) top = __builtin_fabs(product), along = product, out[r] = int32_t(i);
    }
    if (top < 0.0) out[r] = 0;
    if (along > 0.0) out[r] += int32_t(rows);
  }
}

template <class T>
void hash(const RotationHash<T>& call, int64_t begin, int64_t end, int32_t* scratch) {
  const int64_t pairs = hash_pairs(call), blocks = (call.tokens + kHashBlock - 1) / kHashBlock;
  T* buffer = reinterpret_cast<T*>(scratch);
  int32_t* columns = scratch + hash_buffer(call);
  int32_t* products = columns + pairs * kHashBlock;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t unit = task / blocks, item = unit / call.heads, head = unit % call.heads;
    const int64_t start = task % blocks * kHashBlock;
    const int64_t count = call.tokens - start < kHashBlock ? call.tokens - start : kHashBlock;
    const int64_t rows = call.used[item];
    const T* tokens[kHashBlock];
    double errors[kHashBlock];
    for (int64_t i = 0; rows && i < pairs * kHashBlock; ++i) columns[i] = 0;
    for (int64_t i = 0; rows && i < count; ++i) {
      tokens[i] = call.x.at(item, head, start + i);
      errors[i] = round_token(tokens[i], call.depth, columns + i / kHashed * pairs * kHashed + i % kHashed, buffer);
    }
    for (int64_t round = 0; round < call.rounds; ++round) {
      int32_t* out = call.out + (round * call.items * call.heads + unit) * call.tokens + start;
      const int32_t* rotated = call.rounded + (head * call.rounds + round) * rounded_size(call);
      for (int64_t first = 0; first < count; first += kHashed) {
        const int64_t some = count - first < kHashed ? count - first : kHashed;
        if (!rows) {  // everything is one bucket
          for (int64_t r = 0; r < some; ++r) out[first + r] = 0;
          continue;
        }
        for (int64_t i = 0; i < rows; i += kDeep)
          pair_tile(rotated + i * pairs, pairs, columns + first * pairs, products + i * kHashed);
        find_buckets(call, products, rows, head, round, tokens + first, errors + first, some, out + first);
      }
    }
  }
}
