// Plain headers come before the switch to the instruction set: what they define is shared by all of them.
#include "common/philox.h"
#include "kernels.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define SPARING_FOR_AVX2
#include "all.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif

const sparing::Kernels* sparing::avx2_kernels() { return &avx2::table; }
#else
const sparing::Kernels* sparing::avx2_kernels() { return nullptr; }
#endif
