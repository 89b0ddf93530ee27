// The pybind11 module pyckpt._C: the CPU launchers of the best instruction set, and what was built.
#include "bindings.h"

#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(PYCKPT_X86)
#include <cpuid.h>
#endif

#include "cpu/kernels.h"
#if defined(PYCKPT_CUDA)
#include "cuda/bindings.h"
#endif

namespace py = pybind11;
using namespace pyckpt;

extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((weak));

namespace {

struct Build {
  const char* name;
  const Kernels* kernels;
  bool (*runs_here)();
};

#if defined(PYCKPT_X86)
// The levels feature by feature: GCC 11 and Clang 14 do not know them, nor some of the features, by name.
bool has_v2() { return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt"); }

bool has_v3() {
  unsigned a, b, c, d, basic = 0, extended = 0;
  if (__get_cpuid(1, &a, &b, &c, &d)) basic = c;
  if (__get_cpuid(0x80000001, &a, &b, &c, &d)) extended = c;
  return has_v2() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && (basic & bit_F16C) && (basic & bit_MOVBE) && (extended & bit_LZCNT);
}
#endif

#if defined(PYCKPT_X86_V4)
bool has_v4() {
  return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// Best first.
const Build builds[] = {
#if defined(PYCKPT_X86_V4)
    {"x86-64-v4", &v4::kernels, has_v4},
#endif
#if defined(PYCKPT_X86)
    {"x86-64-v3", &v3::kernels, has_v3},
    {"x86-64-v2", &v2::kernels, has_v2},
#else
    {"baseline", &base::kernels, [] { return true; }},
#endif
};
const Build* active = nullptr;

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Build& build : builds)
    if (build.runs_here()) names.push_back(build.name);
  return names;
}

void use_isa(const std::string& name) {
  for (const Build& build : builds)
    if (name == build.name && build.runs_here()) {
      active = &build;
      return;
    }
  throw std::invalid_argument("instruction set '" + name + "' was not built or does not run on this processor");
}

struct Cpu {
  using Where = int;  // threads

  template <class... A>
  static void activation_forward(A... arguments) {
    active->kernels->activation_forward(arguments...);
  }
  template <class... A>
  static void activation_backward(A... arguments) {
    active->kernels->activation_backward(arguments...);
  }
  template <class... A>
  static void dropout(A... arguments) {
    active->kernels->dropout(arguments...);
  }
  template <class... A>
  static void norm_forward(const A&... arguments) {
    active->kernels->norm_forward(arguments...);
  }
  template <class... A>
  static void norm_backward(const A&... arguments) {
    active->kernels->norm_backward(arguments...);
  }
  template <class... A>
  static void softmax_forward(const A&... arguments) {
    active->kernels->softmax_forward(arguments...);
  }
  template <class... A>
  static void softmax_backward(const A&... arguments) {
    active->kernels->softmax_backward(arguments...);
  }
};

// The CUDA kernels that were built: None if there are none, and the reason in "no_cuda".
void describe_cuda(py::dict& info) {
#if defined(PYCKPT_CUDA)
  const auto split = [](const std::string& list) {
    return list.empty() ? py::list() : py::list(py::str(list).attr("split")(","));
  };
  py::dict cuda;
  cuda["compiler"] = PYCKPT_CUDA;
  cuda["archs"] = split(PYCKPT_CUDA_SASS);
  cuda["ptx"] = split(PYCKPT_CUDA_PTX);
  info["cuda"] = cuda;
  info["no_cuda"] = "";
#else
  info["cuda"] = py::none();
  info["no_cuda"] = PYCKPT_NO_CUDA;
#endif
}

// geometry: heads, rows, columns, first head, row and key, heads per batch entry, queries, keys, low, high, ALiBi's origin, the
// mask's four strides, those of its gradient, the slopes' two. addresses: of mask, its gradient, slopes and seed. numbers: scale,
// softcap, dropout_p.
AttentionBlock attention_block(int dtype, int mask_dtype, int mask_kind, const std::array<int64_t, 22>& geometry,
                               const std::array<Address, 4>& addresses, const std::array<double, 3>& numbers) {
  const auto& g = geometry;
  return {dtype,
          mask_dtype,
          g[0],
          g[1],
          g[2],
          g[3],
          g[4],
          g[5],
          g[6],
          g[7],
          g[8],
          g[9],
          g[10],
          numbers[0],
          numbers[1],
          mask_kind,
          pointer(addresses[0]),
          g.data() + 12,
          pointer(addresses[1]),
          g.data() + 16,
          pointer(addresses[2]),
          g.data() + 20,
          g[11],
          numbers[2],
          pointer<int64_t>(addresses[3])};
}

void attention_forward(int dtype, int mask_dtype, int mask_kind, const std::array<int64_t, 22>& geometry,
                       const std::array<Address, 4>& addresses, const std::array<double, 3>& numbers, Address scores,
                       Address logsumexp, int threads) {
  active->kernels->attention_forward(attention_block(dtype, mask_dtype, mask_kind, geometry, addresses, numbers), pointer(scores),
                                     pointer(logsumexp), threads);
}

void attention_backward(int dtype, int mask_dtype, int mask_kind, const std::array<int64_t, 22>& geometry,
                        const std::array<Address, 4>& addresses, const std::array<double, 3>& numbers, Address scores,
                        Address gradients, int threads) {
  active->kernels->attention_backward(attention_block(dtype, mask_dtype, mask_kind, geometry, addresses, numbers),
                                      pointer(scores), pointer(gradients), threads);
}

// body() once on each of `threads` threads of torch's OpenMP pool, whose own parallel regions inside are serial; the first error
// is raised when all have ended. Without an OpenMP runtime, once on the calling thread.
void in_parallel(const py::function& body, int threads) {
  if (!GOMP_parallel || threads < 2) {
    body();
    return;
  }
  struct Region {
    const py::function& body;
    std::exception_ptr error;
    static void run(void* data) {
      Region& region = *static_cast<Region*>(data);
      const py::gil_scoped_acquire gil;
      try {
        region.body();
      } catch (...) {
        if (!region.error) region.error = std::current_exception();
      }
    }
  } region{body, nullptr};
  {
    const py::gil_scoped_release release;
    GOMP_parallel(&Region::run, &region, unsigned(threads), 0);
  }
  if (region.error) std::rethrow_exception(region.error);
}

py::dict build_info() {
  py::dict info;
  info["version"] = PYCKPT_VERSION;
  info["compiler"] = PYCKPT_COMPILER;
  info["pybind11"] = std::to_string(PYBIND11_VERSION_MAJOR) + "." + std::to_string(PYBIND11_VERSION_MINOR);
  std::vector<std::string> names;
  for (const Build& build : builds) names.push_back(build.name);
  info["isas"] = names;
  describe_cuda(info);
  info["openmp"] = GOMP_parallel != nullptr;
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Native kernels of pyckpt. Private: use pyckpt.functional and pyckpt.nn.";
  const auto isas = supported_isas();
  if (isas.empty()) throw std::runtime_error("pyckpt's kernels need at least an x86-64-v2 processor");
  use_isa(isas.front());
  m.def("build_info", &build_info);
  m.def("supported_isas", &supported_isas);
  m.def("use_isa", &use_isa);
  m.def("isa", [] { return active->name; });
  Bindings<Cpu>::define(m);
#if defined(PYCKPT_CUDA)
  py::module_ cuda = m.def_submodule("cuda", "The same on tensors of a GPU; (device's index, stream) is the last argument.");
  bind_cuda(cuda);
#endif
  using Release = py::call_guard<py::gil_scoped_release>;
  m.def("attention_forward", &attention_forward, Release());
  m.def("attention_backward", &attention_backward, Release());
  m.def("in_parallel", &in_parallel);
}
