// The kernels of yoso.
#pragma once

#include "common/isa.h"
#include "yoso/call.h"
#include "yoso/hash.h"
#include "yoso/pairs.h"
#include "yoso/tables.h"
#include "yoso/unit_rows.h"

namespace sparing::SPARING_ISA {

template <class T>
constexpr YosoKernels<T> yoso_kernels() {
  return {
      .unit_rows = unit_rows<T>,
      .find_along = find_along<T>,
      .hash_scratch = yoso::hash_scratch<T>,
      .hash_tasks = yoso::hash_tasks<T>,
      .hash_codes = yoso::hash_codes<T>,
      .table_scratch = yoso::table_scratch<T>,
      .table_tasks = yoso::table_tasks<T>,
      .table_sums = yoso::table_sums<T>,
      .pair_scratch = yoso::pair_scratch<T>,
      .pair_sums = yoso::pair_sums<T>,
  };
}

}  // namespace sparing::SPARING_ISA
