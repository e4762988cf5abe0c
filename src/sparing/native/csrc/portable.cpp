#include "kernels.h"

#define SPARING_ISA portable
#define SPARING_NAME "portable"
#define SPARING_BYTES 16
#define SPARING_REGISTERS 16
#include "all.h"

const sparing::Kernels* sparing::portable_kernels() { return &portable::table; }
