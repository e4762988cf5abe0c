// Softmax attention of a strip of queries: as many as stand in the lanes of a tile. Where few neighbours look at the same
// keys, the blocks of softmax.h would mostly multiply what they mask.
//
// What a lane computes does not depend on the other lanes of the strip, nor on which keys they make it skip: all sums
// run over the keys in their order, and a key that a lane does not see adds exactly zero.

// Rows that are summed at once by mix_rows().
inline constexpr int kMixed = SPARING_REGISTERS == 32 ? 8 : 4;

// scores[c][lane] = rows[c] . columns[.][lane] for c < M
template <class T, int M>
SPARING_INLINE void strip_dot_tile(const T* const* rows, int64_t depth, const T* columns, T* scores) {
  Vec<T> sums[M][kWide] = {};
  const T* row[M];
  for (int i = 0; i < M; ++i) row[i] = rows[i];
  for (int64_t k = 0; k < depth; ++k) {
    Vec<T> column[kWide];
    for (int j = 0; j < kWide; ++j) column[j] = load<T>(columns + k * kStrip<T> + j * lanes<T>);
    for (int i = 0; i < M; ++i) {
      const Vec<T> x = all(row[i][k]);
      for (int j = 0; j < kWide; ++j) sums[i][j] += x * column[j];
    }
  }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < kWide; ++j) store<T>(scores + i * kStrip<T> + j * lanes<T>, sums[i][j]);
}

// scores[c][lane] = rows[c] . columns[.][lane] for c < count
template <class T>
void strip_dots(const T* const* rows, int64_t count, int64_t depth, const T* columns, T* scores) {
  in_tiles<kDeep>(count, [&]<int M>(int64_t c) {
    strip_dot_tile<T, M>(rows + c, depth, columns, scores + c * kStrip<T>);
  });
}

// to[i][...] += sum_c weights[i * across + c * along] from[c][...] for i < M, for N vectors of entries
template <class T, int M, int N>
SPARING_INLINE void mix_tile(const T* weights, int64_t across, int64_t along, const T* const* from, int64_t count,
                             int64_t first, T* const* to) {
  Vec<T> sums[M][N];
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) sums[i][j] = load<T>(to[i] + first + j * lanes<T>);
  for (int64_t c = 0; c < count; ++c) {
    Vec<T> point[N];
    for (int j = 0; j < N; ++j) point[j] = load<T>(from[c] + first + j * lanes<T>);
    for (int i = 0; i < M; ++i) {
      const Vec<T> x = all(weights[i * across + c * along]);
      for (int j = 0; j < N; ++j) sums[i][j] += x * point[j];
    }
  }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) store<T>(to[i] + first + j * lanes<T>, sums[i][j]);
}

// to[i] += sum_c weights[i * across + c * along] from[c] for i < many, rows of `width` entries
template <class T>
void mix_rows(const T* weights, int64_t across, int64_t along, const T* const* from, int64_t count, int64_t width,
              T* const* to, int64_t many) {
  in_tiles<kMixed>(many, [&]<int M>(int64_t i) {
    const T* weight = weights + i * across;
    int64_t e = 0;
    for (; e + kWide * lanes<T> <= width; e += kWide * lanes<T>)
      mix_tile<T, M, kWide>(weight, across, along, from, count, e, to + i);
    for (; e + lanes<T> <= width; e += lanes<T>) mix_tile<T, M, 1>(weight, across, along, from, count, e, to + i);
    for (; e < width; ++e)
      for (int r = 0; r < M; ++r) {
        T sum = to[i + r][e];
        for (int64_t c = 0; c < count; ++c) sum += weight[r * across + c * along] * from[c][e];
        to[i + r][e] = sum;
      }
  });
}

// columns[k][r] = factor * rows[r][k] for r < count; zero for the other lanes
template <class T>
void strip_columns(const T* const* rows, int64_t count, int64_t depth, T factor, T* columns) {
  for (int64_t r = 0; r < kStrip<T>; ++r) {
    const T* row = r < count ? rows[r] : nullptr;
    for (int64_t k = 0; k < depth; ++k) columns[k * kStrip<T> + r] = row ? factor * row[k] : T(0);
  }
}
