// Chooses the kernels: those of the widest instruction set that this machine has, unless another is set.
#include <atomic>
#include <cstring>

#include "kernels.h"

namespace sparing {
namespace {

bool has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");  // also checks operating system support
#else
  return false;
#endif
}

bool has_avx512() {
#if defined(SPARING_EMULATE_AVX512)
  return has_avx2();
#elif defined(__x86_64__)
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

bool has_vnni() {
#if defined(__x86_64__)
  return has_avx512() && __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

const Kernels* with_vnni(bool vnni, const char* name) {
  Kernels* made = new Kernels(*avx512_kernels());  // for the life of the program
  made->name = name, made->vnni = vnni;
  return made;
}

const Kernels* find(const char* name) {
  // Machines without VNNI have nothing but the plain kind. Others may ask for it, to test it.
  static const Kernels* const vnni = has_vnni() ? with_vnni(true, "avx512") : nullptr;
  static const Kernels* const no_vnni = has_vnni() ? with_vnni(false, "avx512_without_vnni") : nullptr;
  const Kernels* found[] = {vnni, has_avx512() && !vnni ? avx512_kernels() : nullptr,
                            has_avx2() ? avx2_kernels() : nullptr, portable_kernels(), no_vnni};
  for (const Kernels* one : found)
    if (one && (!name || !std::strcmp(one->name, name))) return one;
  return nullptr;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels& kernels() {
  const Kernels* now = chosen.load(std::memory_order_acquire);
  if (!now) chosen.store(now = find(nullptr), std::memory_order_release);
  return *now;
}

}  // namespace sparing

// Called from Python through ctypes. Returns the version of sparing that this library was built for; its ops follow the
// schemas of that version.
extern "C" __attribute__((visibility("default"))) const char* sparing_version() { return SPARING_VERSION; }

// Get and set the instruction set in use; setting one that the machine lacks returns 0.
extern "C" __attribute__((visibility("default"))) const char* sparing_isa() { return sparing::kernels().name; }

extern "C" __attribute__((visibility("default"))) int sparing_use_isa(const char* name) {
  const sparing::Kernels* found = sparing::find(name);
  if (found) sparing::chosen.store(found, std::memory_order_release);
  return found != nullptr;
}
