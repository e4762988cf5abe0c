// What the kernels of every instruction set look like from outside. Plain data only: this header is compiled for the
// plainest instruction set and for the widest.
#pragma once

#include "attend_call.h"
#include "features_call.h"
#include "inverse_call.h"
#include "lsh_call.h"
#include "multipole_call.h"
#include "projection_call.h"
#include "segments_call.h"
#include "signs_call.h"
#include "top_keys_call.h"
#include "window_call.h"
#include "yoso_call.h"

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

  template <class T>
  const KernelsOf<T>& of() const {
    if constexpr (sizeof(T) == 4)
      return f32;
    else
      return f64;
  }
};

// Each only to be called where the machine has the instructions; null where it was not compiled in.
const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

// The kernels in use.
const Kernels& kernels();

}  // namespace sparing
