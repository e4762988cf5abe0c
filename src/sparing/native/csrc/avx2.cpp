#include "kernels.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define SPARING_ISA avx2
#define SPARING_NAME "avx2"
#define SPARING_BYTES 32
#define SPARING_REGISTERS 16
#include "all.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif

const sparing::Kernels* sparing::avx2_kernels() { return &avx2::table; }
#else
const sparing::Kernels* sparing::avx2_kernels() { return nullptr; }
#endif
