// Sums of a few rows out of many.

// Brings a row near that is needed soon.
template <class T>
SPARING_INLINE void fetch(const T* row, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + i);
}

// sums[e] += sum_c weights[c] rows[list[c]][e] for e < width; rows are `stride` apart, rests `rest` after the sums
template <class T>
SPARING_INLINE void add_rows(const T* weights, const Int<T>* list, int64_t count, const T* rows, int64_t stride,
                             int64_t width, T* sums, int64_t rest) {
  in_runs(count, kRun, [&](int64_t begin, int64_t end) {
    in_tiles<8>(width / lanes<T>, [&]<int M>(int64_t i) {
      const int64_t first = i * lanes<T>;
      Vec<T> total[M] = {};
      for (int64_t c = begin; c < end; ++c) {
        const T* row = rows + list[c] * stride + first;
        const Vec<T> x = all(weights[c]);
        for (int j = 0; j < M; ++j) total[j] += x * load<T>(row + j * lanes<T>);
      }
      for (int j = 0; j < M; ++j) add_to<T>(sums + first + j * lanes<T>, rest, total[j]);
    });
    for (int64_t e = width / lanes<T> * lanes<T>; e < width; ++e) {
      T part = T(0);
      for (int64_t c = begin; c < end; ++c) part += weights[c] * rows[list[c] * stride + e];
      Running<T> total{sums[e], sums[e + rest]};
      total.add(part);
      sums[e] = total.sum, sums[e + rest] = total.rest;
    }
  });
}

// Bit i says whether lane i of a comparison holds. The compiler's own code for this takes the lanes out one by one,
// which costs more than the scores that are compared.
template <class T>
SPARING_INLINE uint32_t held(IntVec<T> mask) {
#if defined(__x86_64__) && SPARING_BYTES == 64 && !defined(SPARING_EMULATE_AVX512)
  if constexpr (sizeof(T) == 4)
    return uint16_t(__builtin_ia32_cvtd2mask512(mask));
  else
    return uint8_t(__builtin_ia32_cvtq2mask512(reinterpret_cast<Vec<long long>>(mask)));
#elif defined(__x86_64__) && SPARING_BYTES == 32
  if constexpr (sizeof(T) == 4)
    return uint32_t(__builtin_ia32_movmskps256(reinterpret_cast<Vec<float>>(mask)));
  else
    return uint32_t(__builtin_ia32_movmskpd256(reinterpret_cast<Vec<double>>(mask)));
#else
  uint32_t bits = 0;
  for (int i = 0; i < lanes<T>; ++i) bits |= uint32_t(mask[i] & 1) << i;
  return bits;
#endif
}
