// What the compiler calls in a checking build. The kernels are compiled with -fsanitize=thread and parts of
// -fsanitize=undefined, but the sanitizers' libraries are not linked: these functions take their places, so nothing has to be
// loaded before Python. The kernels' memcpy, memmove and memset are renamed to those here.
#include "runtime.h"

#if SIMT_CHECK

using simt::Access;
using simt::report;
using simt::touch;
using simt::where;

#define PC __builtin_return_address(0)

extern "C" {

#define ACCESSES(bytes)                                                             \
  void __tsan_read##bytes(void* p) { touch(p, bytes, Access::read, PC); }           \
  void __tsan_write##bytes(void* p) { touch(p, bytes, Access::write, PC); }         \
  void __tsan_unaligned_read##bytes(void* p) { touch(p, bytes, Access::read, PC); } \
  void __tsan_unaligned_write##bytes(void* p) { touch(p, bytes, Access::write, PC); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* p, size_t n) { touch(p, n, Access::read, PC); }
void __tsan_write_range(void* p, size_t n) { touch(p, n, Access::write, PC); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}

void* simt_memcpy(void* to, const void* from, size_t n) {
  if (n) touch(from, n, Access::read, PC), touch(to, n, Access::write, PC);
  return std::memcpy(to, from, n);
}
void* simt_memmove(void* to, const void* from, size_t n) {
  if (n) touch(from, n, Access::read, PC), touch(to, n, Access::write, PC);
  return std::memmove(to, from, n);
}
void* simt_memset(void* to, int value, size_t n) {
  if (n) touch(to, n, Access::write, PC);
  return std::memset(to, value, n);
}

// The undefined-behaviour checks' data, as far as it is used: each begins with the place.
struct Place {
  const char* file;
  uint32_t line, column;
};
struct TypeMismatch {
  Place place;
  void* type;
  unsigned char log_alignment, kind;
};
void __ubsan_handle_type_mismatch_v1(TypeMismatch* data, uintptr_t address) {
  report("[misaligned] %s: address 0x%zx is not aligned to %u bytes at %s:%u", where().c_str(), size_t(address),
         1u << data->log_alignment, data->place.file, data->place.line);
}
void __ubsan_handle_out_of_bounds(Place* place, uintptr_t index) {
  report("[out of bounds] %s: index %zd of an array at %s:%u", where().c_str(), ptrdiff_t(index), place->file, place->line);
}
#define OVERFLOW(name, what)                                                                                                   \
  void __ubsan_handle_##name(Place* place, uintptr_t a, uintptr_t b) {                                                         \
    report("[overflow] %s: %zd " what " %zd at %s:%u", where().c_str(), ptrdiff_t(a), ptrdiff_t(b), place->file, place->line); \
  }
OVERFLOW(add_overflow, "+")
OVERFLOW(sub_overflow, "-")
OVERFLOW(mul_overflow, "*")
OVERFLOW(divrem_overflow, "/")
OVERFLOW(shift_out_of_bounds, "shifted by")
void __ubsan_handle_negate_overflow(Place* place, uintptr_t a) {
  report("[overflow] %s: -(%zd) at %s:%u", where().c_str(), ptrdiff_t(a), place->file, place->line);
}

}  // extern "C"

#endif
