// k-means on rows of whole numbers (kmeans in Python). Every product and sum is exact in float32, so that the result
// does not depend on their order. Rows stand in the lanes.

struct KMeansMemory {
  float *columns, *scores, *centres, *half_norms;  // [depth][kRows], [kKeys][kRows], [centres][depth], [centres]
  double *sums, *counts;                           // [centres][depth], [centres]
};

inline int64_t lay_out(const KMeans& call, float* memory, KMeansMemory* parts) {
  int64_t used = 0;
  const auto take = [&]<class U>(U** part, int64_t count) {
    if (memory) *part = reinterpret_cast<U*>(memory + used);
    used += (count * int64_t(sizeof(U) / sizeof(float)) + 15) / 16 * 16;
  };
  take(&parts->columns, call.depth * kRows);
  take(&parts->scores, int64_t(kKeys) * kRows);
  take(&parts->centres, call.centres * call.depth);
  take(&parts->half_norms, call.centres);
  take(&parts->sums, call.centres * call.depth);
  take(&parts->counts, call.centres);
  return used;
}

inline int64_t kmeans_scratch(const KMeans& call) {
  KMeansMemory parts{};
  return lay_out(call, nullptr, &parts);
}

// The nearest centre of each of `count` <= kRows rows: the largest x.c - c.c / 2, of equal ones the first.
inline void nearest_centres(const KMeans& call, const KMeansMemory& parts, const float* const* rows, int64_t count,
                            int32_t* nearest) {
  transpose<float>(rows, count, call.depth, 1.0f, parts.columns);
  float best[kRows];
  for (int r = 0; r < kRows; ++r) best[r] = kNever<float>, nearest[r] = 0;
  const int64_t used = padded<float>(count);
  const float* centres[kKeys];
  for (int64_t first = 0; first < call.centres; first += kKeys) {
    const int64_t some = call.centres - first < kKeys ? call.centres - first : kKeys;
    for (int64_t c = 0; c < some; ++c) centres[c] = parts.centres + (first + c) * call.depth;
    dots<float>(centres, some, call.depth, parts.columns, parts.scores, used);
    for (int64_t r = 0; r < used; r += lanes<float>) {
      Vec<float> top = load<float>(best + r);
      IntVec<float> which = load<int32_t>(nearest + r);
      for (int64_t c = 0; c < some; ++c) {
        const Vec<float> score = load<float>(parts.scores + c * kRows + r) - parts.half_norms[first + c];
        const IntVec<float> nearer = score > top;
        top = nearer ? score : top;
        which = nearer ? int32_t(first + c) - IntVec<float>{} : which;
      }
      store<float>(best + r, top);
      store<int32_t>(nearest + r, which);
    }
  }
}

inline void find_half_norms(const KMeans& call, const KMeansMemory& parts, const uint8_t* counts) {
  for (int64_t c = 0; c < call.centres; ++c) {
    float total = 0.0f;
    for (int64_t k = 0; k < call.depth; ++k)
      total += parts.centres[c * call.depth + k] * parts.centres[c * call.depth + k];
    parts.half_norms[c] = counts[c] ? total / 2 : -kNever<float>;
  }
}

inline void kmeans(const KMeans& call, int64_t begin, int64_t end, float* scratch) {
  KMeansMemory parts{};
  lay_out(call, scratch, &parts);
  const float* rows[kRows];
  int32_t nearest[kRows];
  for (int64_t unit = begin; unit < end; ++unit) {
    const float* x = call.x + unit * call.rows * call.depth;
    const int64_t* lesson = call.lesson + unit * call.taught;
    const uint8_t* used = call.lesson_used + unit * call.taught;
    const uint8_t* counts = call.start_used + unit * call.centres;
    for (int64_t c = 0; c < call.centres; ++c) {
      const float* from = x + call.start[unit * call.centres + c] * call.depth;
      for (int64_t k = 0; k < call.depth; ++k) parts.centres[c * call.depth + k] = from[k];
    }
    find_half_norms(call, parts, counts);
    for (int64_t step = 0; step < call.steps; ++step) {
      for (int64_t i = 0; i < call.centres * call.depth; ++i) parts.sums[i] = 0.0;
      for (int64_t c = 0; c < call.centres; ++c) parts.counts[c] = 0.0;
      for (int64_t first = 0; first < call.taught; first += kRows) {
        const int64_t some = call.taught - first < kRows ? call.taught - first : kRows;
        for (int64_t r = 0; r < some; ++r) rows[r] = x + lesson[first + r] * call.depth;
        nearest_centres(call, parts, rows, some, nearest);
        for (int64_t r = 0; r < some; ++r) {
          if (!used[first + r]) continue;
          double* sums = parts.sums + nearest[r] * call.depth;
          for (int64_t k = 0; k < call.depth; ++k) sums[k] += double(rows[r][k]);
          parts.counts[nearest[r]] += 1.0;
        }
      }
      for (int64_t c = 0; c < call.centres; ++c) {
        if (parts.counts[c] == 0.0) continue;
        for (int64_t k = 0; k < call.depth; ++k)
          parts.centres[c * call.depth + k] =
              float(__builtin_rint(parts.sums[c * call.depth + k] / parts.counts[c]));
      }
      find_half_norms(call, parts, counts);
    }
    int64_t* labels = call.labels + unit * call.rows;
    const uint8_t* valid = call.valid + unit * call.rows;
    for (int64_t first = 0; first < call.rows; first += kRows) {
      const int64_t some = call.rows - first < kRows ? call.rows - first : kRows;
      for (int64_t r = 0; r < some; ++r) rows[r] = x + (first + r) * call.depth;
      nearest_centres(call, parts, rows, some, nearest);
      for (int64_t r = 0; r < some; ++r) labels[first + r] = valid[first + r] ? nearest[r] : -1;
    }
  }
}

// Rounds the keys of some chunks, seen through the factor of their metric, to whole numbers.
template <class T>
int64_t metric_scratch(const MetricRows<T>& call) {
  return call.depth * kRows + (call.size + kRows - 1) / kRows * kRows * call.depth +
         call.depth * int64_t(sizeof(void*)) / int64_t(sizeof(double));
}

template <class T>
void metric_rows(const MetricRows<T>& call, int64_t begin, int64_t end, double* scratch) {
  const int64_t d = call.depth, blocks = (call.size + kRows - 1) / kRows;
  double *columns = scratch, *turned = scratch + d * kRows;  // [depth][kRows], [blocks][depth][kRows]
  const double** rows = reinterpret_cast<const double**>(turned + blocks * d * kRows);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t chunk = unit % call.chunks, item = unit / call.chunks / call.heads;
    const int64_t head = unit / call.chunks % call.heads;
    const uint8_t* valid = call.valid + (item * call.chunks + chunk) * call.size;
    Vec<double> most{};
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = block * kRows, count = call.size - first < kRows ? call.size - first : kRows;
      for (int64_t r = 0; r < kRows; ++r) {
        const bool counts = r < count && valid[first + r];
        const T* key = call.k.at(item, head, chunk * call.size + first + (counts ? r : 0));
        for (int64_t k = 0; k < d; ++k) columns[k * kRows + r] = counts ? double(key[k]) : 0.0;
      }
      double* out = turned + block * d * kRows;
      for (int64_t c = 0; c < d; c += kDeep) {
        const int64_t some = d - c < kDeep ? d - c : kDeep;
        for (int64_t i = 0; i < some; ++i) rows[i] = call.factor + (unit * d + c + i) * d + c;
        dots<double>(rows, some, d - c, columns + c * kRows, out + c * kRows);
      }
      for (int64_t i = 0; i < d * kRows; i += lanes<double>) {
        const Vec<double> entry = load<double>(out + i);
        most = larger<double>(most, entry < 0.0 ? -entry : entry);
      }
    }
    const double found = largest<double>(most), factor = double(call.limit) / (found == 0.0 ? 1.0 : found);
    float* out = call.out + unit * call.size * d;
    for (int64_t i = 0; i < call.size; ++i)
      for (int64_t k = 0; k < d; ++k)
        out[i * d + k] = float(__builtin_rint(turned[(i / kRows * d + k) * kRows + i % kRows] * factor));
  }
}
