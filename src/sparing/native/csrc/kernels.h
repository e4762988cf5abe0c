// Tables of function pointers through which the ops call the kernels. Plain data only: this header is compiled for
// every instruction set.
#pragma once

#include "attend/call.h"
#include "features/call.h"
#include "key_clusters/call.h"
#include "linformer/call.h"
#include "lsh/call.h"
#include "monte_carlo/call.h"
#include "multipole/call.h"
#include "nystrom/call.h"
#include "segments/call.h"
#include "skip/call.h"
#include "top_keys/call.h"
#include "window/call.h"
#include "yoso/call.h"

namespace sparing {

template <class T>
struct KernelsOf {
  AttendKernels<T> attend;
  FeatureKernels<T> features;
  InverseKernels<T> inverse;
  KeyClustersKernels<T> key_clusters;
  LshKernels<T> lsh;
  MetricKernels<T> metric;
  PoleKernels<T> poles;
  ProjectionKernels<T> projection;
  ReceivedKernels<T> received;
  SegmentKernels<T> segments;
  SignKernels<T> signs;
  SkipKernels<T> skip;
  TopKeysKernels<T> top_keys;
  WindowKernels<T> window;
  YosoKernels<T> yoso;
};

// Kernels that take entries of E as they are stored, also of 16 bits.
template <class E>
struct KernelsOfStored {
  MultipoleKernels<E> multipole;
  SkipStepKernels<E> skip_step;
  WindowStepKernels<E> window_step;
};

struct Kernels {
  const char* name;
  KMeansKernels kmeans;
  KernelsOf<float> f32;
  KernelsOf<double> f64;
  KernelsOfStored<float> stored_f32;
  KernelsOfStored<double> stored_f64;
  KernelsOfStored<BFloat16> stored_bf16;
  KernelsOfStored<Float16> stored_f16;
  bool vnni = false;  // kernels may use AVX-512 VNNI

  template <class T>
  const KernelsOf<T>& of() const {
    if constexpr (sizeof(T) == 4)
      return f32;
    else
      return f64;
  }

  template <class E>
  const KernelsOfStored<E>& stored() const {
    if constexpr (__is_same(E, BFloat16))
      return stored_bf16;
    else if constexpr (__is_same(E, Float16))
      return stored_f16;
    else if constexpr (sizeof(E) == 4)
      return stored_f32;
    else
      return stored_f64;
  }
};

// Each returns null if its instruction set was not compiled. The kernels may be called only on a machine that has it.
const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

// The kernels in use.
const Kernels& kernels();

}  // namespace sparing
