#include "all.h"

const sparing::Kernels* sparing::portable_kernels() { return &portable::table; }
