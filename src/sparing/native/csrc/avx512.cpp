// Plain headers come before the switch to the instruction set: what they define is shared by all of them.
#include "common/philox.h"
#include "kernels.h"

#if defined(__x86_64__)
#if defined(SPARING_EMULATE_AVX512)  // vectors of 64 bytes on a machine without AVX-512, for tests
#pragma GCC target("avx2,fma")
#elif defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#endif
#define SPARING_FOR_AVX512
#include "all.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif

const sparing::Kernels* sparing::avx512_kernels() { return &avx512::table; }
#else
const sparing::Kernels* sparing::avx512_kernels() { return nullptr; }
#endif
