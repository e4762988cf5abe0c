// Tables of function pointers through which the ops call the kernels. Plain data only: this header is compiled for
// every instruction set.
#pragma once

#include "attend/call.h"
#include "features/call.h"
#include "linformer/call.h"
#include "lsh/call.h"
#include "monte_carlo/call.h"
#include "multipole/call.h"
#include "nystrom/call.h"
#include "segments/call.h"
#include "sketch/call.h"
#include "top_keys/call.h"
#include "window/call.h"
#include "yoso/call.h"

namespace sparing {

template <class T>
struct KernelsOf {
  AttendKernels<T> attend;
  FeatureKernels<T> features;
  InverseKernels<T> inverse;
  LshKernels<T> lsh;
  MetricKernels<T> metric;
  MultipoleKernels<T> multipole;
  PoleKernels<T> poles;
  ProjectionKernels<T> projection;
  ReceivedKernels<T> received;
  SegmentKernels<T> segments;
  SignKernels<T> signs;
  StepKernels<T> step;
  TopKeysKernels<T> top_keys;
  WindowKernels<T> window;
  YosoKernels<T> yoso;
};

struct Kernels {
  const char* name;
  KMeansKernels kmeans;
  KernelsOf<float> f32;
  KernelsOf<double> f64;
  SketchKernels<float> sketch_f32;
  SketchKernels<double> sketch_f64;
  SketchKernels<BFloat16> sketch_bf16;
  SketchKernels<Float16> sketch_f16;

  template <class T>
  const KernelsOf<T>& of() const {
    if constexpr (sizeof(T) == 4)
      return f32;
    else
      return f64;
  }

  template <class E>
  const SketchKernels<E>& sketch_of() const {
    if constexpr (__is_same(E, BFloat16))
      return sketch_bf16;
    else if constexpr (__is_same(E, Float16))
      return sketch_f16;
    else if constexpr (sizeof(E) == 4)
      return sketch_f32;
    else
      return sketch_f64;
  }
};

// Each returns null if its instruction set was not compiled. The kernels may be called only on a machine that has it.
const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

// The kernels in use.
const Kernels& kernels();

}  // namespace sparing
