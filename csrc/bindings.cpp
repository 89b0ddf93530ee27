// The pybind11 module pyckpt._C: one thin function per launcher, and what was built. Pointers arrive as integers
// (Tensor.data_ptr()); shapes, dtypes and devices have been checked by the caller (pyckpt/ops/_native.py).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

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

namespace py = pybind11;
using namespace pyckpt;

extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((weak));

namespace {

using Address = std::uintptr_t;
using Integers = std::vector<int64_t>;

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

bool has_v4() {
  return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// Best first.
const Build builds[] = {
#if defined(PYCKPT_X86)
    {"x86-64-v4", &v4::kernels, has_v4},
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

template <class T = void>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

// `view` is empty for operands that are dense in one common order, else sizes followed by each operand's strides.
StridedView strided(const Integers& view, size_t operands) {
  const int64_t dims = int64_t(view.size() / (operands + 1));
  return {dims, view.data(), view.data() + dims};
}

void activation_forward(int op, int dtype, Address x, Address y, int64_t n, const Integers& view, int threads) {
  const StridedView s = strided(view, 2);
  active->kernels->activation_forward(op, dtype, pointer(x), pointer(y), n, view.empty() ? nullptr : &s, threads);
}

void activation_backward(int op, int dtype, Address grad, Address x, Address dx, int64_t n, const Integers& view, int threads) {
  const StridedView s = strided(view, 3);
  active->kernels->activation_backward(op, dtype, pointer(grad), pointer(x), pointer(dx), n, view.empty() ? nullptr : &s,
                                       threads);
}

void dropout(int dtype, Address x, Address y, int64_t n, const Integers& view, double p, Address seed, int threads) {
  const StridedView s = strided(view, 2);
  active->kernels->dropout(dtype, pointer(x), pointer(y), n, view.empty() ? nullptr : &s, p, pointer<int64_t>(seed), threads);
}

using View = std::array<int64_t, 3>;  // inner, outer stride, inner stride

void norm_forward(int kind, int dtype, int parameter_dtype, int64_t rows, int64_t columns, double eps, Address x, View x_view,
                  Address weight, Address bias, Address y, Address statistics, bool recompute, int threads) {
  const NormArguments arguments{kind, dtype,      parameter_dtype, rows,          columns,
                                eps,  pointer(x), pointer(weight), pointer(bias), {x_view[0], x_view[1], x_view[2]}};
  active->kernels->norm_forward(arguments, pointer(y), pointer(statistics), recompute, threads);
}

void norm_backward(int kind, int dtype, int parameter_dtype, int64_t rows, int64_t columns, double eps, Address x, View x_view,
                   Address weight, Address grad, View grad_view, Address statistics, Address dx, Address dweight, Address dbias,
                   int64_t blocks, int threads) {
  const NormArguments arguments{kind, dtype,      parameter_dtype, rows,    columns,
                                eps,  pointer(x), pointer(weight), nullptr, {x_view[0], x_view[1], x_view[2]}};
  constexpr std::align_val_t kCacheLine{64};
  const auto release = [](double* sums) { ::operator delete[](sums, kCacheLine); };
  std::unique_ptr<double[], decltype(release)> partial(nullptr, release);
  if (dweight || dbias) partial.reset(new (kCacheLine) double[size_t(blocks * 2 * columns)]);
  const NormGradients gradients{pointer(grad),
                                pointer(statistics),
                                {grad_view[0], grad_view[1], grad_view[2]},
                                pointer(dx),
                                pointer(dweight),
                                pointer(dbias),
                                partial.get(),
                                blocks};
  active->kernels->norm_backward(arguments, gradients, threads);
}

// rows: for each leading dimension its size, then x's strides, then the mask's, then grad's (as far as given).
SoftmaxArguments softmax_arguments(int dtype, Address x, const Integers& rows, int64_t dims, int64_t columns, double scale,
                                   int mask_kind, Address mask, int64_t mask_step, int64_t causal_offset, bool causal,
                                   double dropout_p, Address seed) {
  const int64_t* sizes = rows.data();
  return {dtype,
          pointer(x),
          sizes + dims,
          dims,
          sizes,
          columns,
          scale,
          {mask_kind, pointer(mask), sizes + 2 * dims, mask_step},
          causal ? causal_offset : kNotCausal,
          dropout_p,
          pointer<int64_t>(seed)};
}

void softmax_forward(int dtype, Address x, const Integers& rows, int64_t dims, int64_t columns, double scale, int mask_kind,
                     Address mask, int64_t mask_step, int64_t causal_offset, bool causal, double dropout_p, Address seed,
                     Address y, Address statistics, bool recompute, int threads) {
  active->kernels->softmax_forward(
      softmax_arguments(dtype, x, rows, dims, columns, scale, mask_kind, mask, mask_step, causal_offset, causal, dropout_p, seed),
      pointer(y), pointer(statistics), recompute, threads);
}

void softmax_backward(int dtype, Address x, const Integers& rows, int64_t dims, int64_t columns, double scale, int mask_kind,
                      Address mask, int64_t mask_step, int64_t causal_offset, bool causal, double dropout_p, Address seed,
                      Address grad, Address y, Address statistics, Address dx, double grad_scale, bool masked, int threads) {
  const SoftmaxGradients gradients{
      pointer(grad), rows.data() + 3 * dims, pointer(y), pointer(statistics), pointer(dx), grad_scale, masked};
  active->kernels->softmax_backward(
      softmax_arguments(dtype, x, rows, dims, columns, scale, mask_kind, mask, mask_step, causal_offset, causal, dropout_p, seed),
      gradients, threads);
}

// geometry: heads, rows, columns, first head, row and key, heads per batch entry, queries, keys, low, high, ALiBi's origin, the
// mask's four strides, the slopes' two. addresses: of mask, slopes and seed. numbers: scale, softcap, dropout_p.
AttentionBlock attention_block(int dtype, int mask_dtype, int mask_kind, const std::array<int64_t, 18>& geometry,
                               const std::array<Address, 3>& addresses, const std::array<double, 3>& numbers) {
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
          g[11],
          numbers[2],
          pointer<int64_t>(addresses[2])};
}

void attention_forward(int dtype, int mask_dtype, int mask_kind, const std::array<int64_t, 18>& geometry,
                       const std::array<Address, 3>& addresses, const std::array<double, 3>& numbers, Address scores,
                       Address logsumexp, int threads) {
  active->kernels->attention_forward(attention_block(dtype, mask_dtype, mask_kind, geometry, addresses, numbers), pointer(scores),
                                     pointer(logsumexp), threads);
}

void attention_backward(int dtype, int mask_dtype, int mask_kind, const std::array<int64_t, 18>& geometry,
                        const std::array<Address, 3>& addresses, const std::array<double, 3>& numbers, Address scores,
                        Address gradients, Address dbias, int threads) {
  active->kernels->attention_backward(attention_block(dtype, mask_dtype, mask_kind, geometry, addresses, numbers),
                                      pointer(scores), pointer(gradients), pointer(dbias), threads);
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
  info["cuda"] = py::none();
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
  using Release = py::call_guard<py::gil_scoped_release>;
  m.def("activation_forward", &activation_forward, Release());
  m.def("activation_backward", &activation_backward, Release());
  m.def("dropout", &dropout, Release());
  m.def("norm_forward", &norm_forward, Release());
  m.def("norm_backward", &norm_backward, Release());
  m.def("softmax_forward", &softmax_forward, Release());
  m.def("softmax_backward", &softmax_backward, Release());
  m.def("attention_forward", &attention_forward, Release());
  m.def("attention_backward", &attention_backward, Release());
  m.def("in_parallel", &in_parallel);
}
