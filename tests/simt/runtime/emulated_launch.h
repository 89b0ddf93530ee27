// Launches and shared memory, included by simt.h after its types.
#pragma once

namespace simt {

constexpr size_t kRedZone = 64;

struct Call {
  void (*run)(void*);  // calls the kernel with the parameters at `parameters`
  void* parameters;
  size_t bytes;
  const void* kernel;
};
// Runs a grid to its end, on this thread. Throws std::runtime_error where CUDA refuses the launch, and Fault with every report of
// the run.
void run(const Call& call, dim3 grid, dim3 block, size_t shared_bytes, Stream stream);

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class... P, class... A>
void launch(void (*kernel)(P...), Grid grid, dim3 block, size_t shared_bytes, Stream stream, A&&... arguments) {
  if (grid.empty()) return;
  struct Parameters {
    void (*kernel)(P...);
    std::tuple<P...> values;
  } parameters{kernel, std::tuple<P...>(static_cast<P>(arguments)...)};
  const auto apply = [](void* p) { std::apply(static_cast<Parameters*>(p)->kernel, static_cast<Parameters*>(p)->values); };
  run({apply, &parameters, sizeof parameters, reinterpret_cast<const void*>(kernel)}, grid.blocks, block, shared_bytes, stream);
}

// The arrays lie apart, with red zones between, and never where the launch's bytes do not reach.
void* take_shared(unsigned index, size_t bytes, Site site);
class SharedMemory {
 public:
  template <class T>
  T* take(size_t count, SIMT_SITE) {
    return static_cast<T*>(take_shared(taken_++, shared_size<T>(count), site));
  }

 private:
  unsigned taken_ = 0;
};
#define SIMT_DYNAMIC_SHARED(name) ::simt::SharedMemory name

// A static array is thread-local: the module's symbol table then tells where the arrays are. One launch runs on one thread.
template <class T>
struct Guarded {
  alignas(16) T array;
  unsigned char red_zone[kRedZone];
};
#define SIMT_SHARED(type, name, extents)                              \
  using name##_simt_array = type extents;                             \
  static thread_local ::simt::Guarded<name##_simt_array> name##_simt; \
  auto& name = name##_simt.array

}  // namespace simt
