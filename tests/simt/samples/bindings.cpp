#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "samples.h"

namespace py = pybind11;

namespace {
template <class T = float>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}
}  // namespace

namespace pyckpt {

void bind_cuda(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  m.def(
      "layer_norm",
      [](uintptr_t x, uintptr_t y, int64_t rows, int64_t columns, float eps, int threads) {
        samples::layer_norm(pointer(x), pointer(y), rows, columns, eps, threads);
      },
      Release());
  m.def(
      "column_sums",
      [](uintptr_t x, uintptr_t sums, int64_t rows, int64_t columns) {
        samples::column_sums(pointer(x), pointer(sums), rows, columns);
      },
      Release());
  m.def(
      "matmul",
      [](bool bf16, uintptr_t a, uintptr_t b, uintptr_t c, int64_t rows, int64_t columns, int64_t inner) {
        samples::matmul(bf16, pointer<void>(a), pointer<void>(b), pointer(c), rows, columns, inner);
      },
      Release());
  m.def(
      "run",
      [](const std::string& name, bool bug, uintptr_t x, uintptr_t y, int64_t n) {
        samples::run(name.c_str(), bug, pointer(x), pointer(y), n);
      },
      Release());
  m.def("refused", [](const std::string& how) { samples::refused(how.c_str()); });
  std::vector<std::string> names;
  for (auto name = samples::names(); *name; ++name) names.emplace_back(*name);
  m.attr("names") = names;
}

}  // namespace pyckpt
