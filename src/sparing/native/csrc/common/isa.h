// The instruction set that kernels are compiled for. Each is compiled once, in a namespace of its own: avx2.cpp and
// avx512.cpp define SPARING_FOR_AVX2 or SPARING_FOR_AVX512 and switch the compiler to it; portable.cpp, and an editor
// that opens a header alone, define neither.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(SPARING_FOR_AVX512)
#define SPARING_ISA avx512
#define SPARING_NAME "avx512"
#define SPARING_BYTES 64  // size of a vector
#define SPARING_REGISTERS 32
#elif defined(SPARING_FOR_AVX2)
#define SPARING_ISA avx2
#define SPARING_NAME "avx2"
#define SPARING_BYTES 32
#define SPARING_REGISTERS 16
#else
#define SPARING_ISA portable
#define SPARING_NAME "portable"
#define SPARING_BYTES 16
#define SPARING_REGISTERS 16
#endif

// The intrinsics that work on vectors of this size, if there are any.
#if defined(__x86_64__) && SPARING_BYTES == 64 && !defined(SPARING_EMULATE_AVX512)
#define SPARING_AVX512 1
#elif defined(__x86_64__) && SPARING_BYTES == 32
#define SPARING_AVX2 1
#elif defined(__x86_64__) && SPARING_BYTES == 16
#define SPARING_SSE2 1
#endif

#define SPARING_INLINE inline __attribute__((always_inline))
