// Conversion of tensors to what kernels take. Every size is checked before a pointer is used.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <optional>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "common/half.h"
#include "common/tokens.h"

namespace sparing {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class T>
constexpr ScalarType type_of();
template <>
constexpr ScalarType type_of<float>() {
  return ScalarType::Float;
}
template <>
constexpr ScalarType type_of<double>() {
  return ScalarType::Double;
}
template <>
constexpr ScalarType type_of<int64_t>() {
  return ScalarType::Long;
}
template <>
constexpr ScalarType type_of<int32_t>() {
  return ScalarType::Int;
}
template <>
constexpr ScalarType type_of<bool>() {
  return ScalarType::Bool;
}
template <>
constexpr ScalarType type_of<uint8_t>() {
  return ScalarType::Byte;
}
template <>
constexpr ScalarType type_of<BFloat16>() {
  return ScalarType::BFloat16;
}
template <>
constexpr ScalarType type_of<Float16>() {
  return ScalarType::Half;
}

inline void check_sizes(const char* name, const Tensor& tensor, std::initializer_list<int64_t> sizes) {
  bool fits = tensor.dim() == int64_t(sizes.size());
  int64_t axis = 0;
  for (int64_t size : sizes) fits = fits && tensor.size(axis++) == size;
  STD_TORCH_CHECK(fits, name, " does not have the sizes that the other arguments imply");
}

// Checks a tensor [items, heads, tokens, width], in which the entries of a token must be contiguous. It may have 16
// bits if T is float.
template <class T>
StoredTokens<T> stored(const char* name, const Tensor& tensor, int64_t items, int64_t heads, int64_t count,
                       int64_t width) {
  const ScalarType type = tensor.scalar_type();
  Storage storage = Storage::as_is;
  if (sizeof(T) == 4 && type == ScalarType::BFloat16) storage = Storage::bfloat16;
  if (sizeof(T) == 4 && type == ScalarType::Half) storage = Storage::float16;
  STD_TORCH_CHECK(tensor.is_cpu(), name, " must be on the CPU");
  STD_TORCH_CHECK(storage != Storage::as_is || type == type_of<T>(), name,
                  " has another dtype than the first argument");
  check_sizes(name, tensor, {items, heads, count, width});
  STD_TORCH_CHECK(width <= 1 || tensor.stride(3) == 1, name, " must have contiguous entries in the last axis");
  return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2), storage};
}

// Refuses 16 bits, for kernels that read tokens as they are stored, such as those of gradients.
template <class T>
void check_wide(const char* name, const StoredTokens<T>& x) {
  STD_TORCH_CHECK(x.storage == Storage::as_is, name, " must be float32 or float64");
}

// Checks such a tensor of type T.
template <class T>
Tokens<const T> tokens(const char* name, const Tensor& tensor, int64_t items, int64_t heads, int64_t count,
                       int64_t width) {
  STD_TORCH_CHECK(tensor.scalar_type() == type_of<T>(), name, " has another dtype than the first argument");
  const StoredTokens<T> found = stored<T>(name, tensor, items, heads, count, width);
  return {static_cast<const T*>(found.data), found.item_step, found.head_step, found.token_step};
}

// Checks that a tensor is contiguous and has these sizes, and returns its data.
template <class T>
const T* packed(const char* name, const Tensor& tensor, std::initializer_list<int64_t> sizes) {
  STD_TORCH_CHECK(tensor.is_cpu(), name, " must be on the CPU");
  STD_TORCH_CHECK(tensor.scalar_type() == type_of<T>(), name, " has the wrong dtype");
  check_sizes(name, tensor, sizes);
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
  return static_cast<const T*>(tensor.const_data_ptr());
}

inline const uint8_t* mask(const char* name, const std::optional<Tensor>& tensor, int64_t items, int64_t count) {
  static_assert(sizeof(bool) == 1);
  return tensor ? reinterpret_cast<const uint8_t*>(packed<bool>(name, *tensor, {items, count})) : nullptr;
}

// Allocates a tensor on the CPU without the dispatcher, in which a decoding step would spend a tenth of its time.
inline Tensor fresh(std::initializer_list<int64_t> sizes, ScalarType type) {
  int64_t strides[8];  // ops have at most 5 axes
  STD_TORCH_CHECK(sizes.size() <= 8, "a tensor may have at most 8 axes");
  int64_t entries = 1;
  for (size_t axis = sizes.size(); axis-- > 0;)
    strides[axis] = entries, entries *= std::max<int64_t>(sizes.begin()[axis], 1);
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      int64_t(sizes.size()), sizes.begin(), strides,
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)), aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

// Working memory of one thread, aligned to cache lines.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : memory_(allocate(static_cast<size_t>(bytes)), std::free) {}
  explicit operator bool() const { return memory_ != nullptr; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(memory_.get());
  }

 private:
  // Large pages: random access to many megabytes otherwise spends its time in page tables.
  static char* allocate(size_t bytes) {
    constexpr size_t kPage = size_t(2) << 20;
    const size_t unit = bytes >= 4 * kPage ? kPage : 64, size = (bytes + 64 + unit - 1) / unit * unit;
    char* memory = static_cast<char*>(std::aligned_alloc(unit, size));
#if defined(__linux__)
    if (memory && unit == kPage) madvise(memory, size, MADV_HUGEPAGE);  // only a hint: its failure can be ignored
#endif
    return memory;
  }

  std::unique_ptr<char, void (*)(void*)> memory_;
};

// Calls work(begin, end, scratch) for all tasks, in parallel, with scratch memory for each thread. What a task computes
// must not depend on which thread runs it or which tasks that thread ran before.
template <class T, class Work>
void in_parallel(int64_t tasks, int64_t grain, int64_t scratch, const Work& work) {
  std::atomic<bool> starved{false};
  torch::stable::parallel_for(0, tasks, grain, [&](int64_t begin, int64_t end) {
    const Scratch memory(scratch * int64_t(sizeof(T)));
    if (memory)
      work(begin, end, memory.as<T>());
    else
      starved = true;
  });
  STD_TORCH_CHECK(!starved, "there is not enough memory for ", scratch * int64_t(sizeof(T)), " bytes per thread");
}

// Calls fn.template operator()<T>() with the floating-point type of a tensor.
template <class Fn>
auto with_type(const char* name, const Tensor& tensor, const Fn& fn) {
  if (tensor.scalar_type() == ScalarType::Double) return fn.template operator()<double>();
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Float, name, " must be float32 or float64");
  return fn.template operator()<float>();
}

// Calls fn.template operator()<E>() with the type that the entries of a tensor are stored in.
template <class Fn>
auto with_stored_type(const char* name, const Tensor& tensor, const Fn& fn) {
  switch (tensor.scalar_type()) {
    case ScalarType::Double: return fn.template operator()<double>();
    case ScalarType::BFloat16: return fn.template operator()<BFloat16>();
    case ScalarType::Half: return fn.template operator()<Float16>();
    default:
      STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Float, name,
                      " must be float64, float32, bfloat16 or float16");
      return fn.template operator()<float>();
  }
}

// Calls fn.template operator()<T>() with the type that a tensor is computed in: float for 16 bits.
template <class Fn>
auto with_wide_type(const char* name, const Tensor& tensor, const Fn& fn) {
  const ScalarType type = tensor.scalar_type();
  if (type == ScalarType::Double) return fn.template operator()<double>();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half, name,
                  " must be float64, float32, bfloat16 or float16");
  return fn.template operator()<float>();
}

}  // namespace sparing
