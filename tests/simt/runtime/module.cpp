// The Python module: the kernels as pyckpt._C.cuda has them, and `simt`, which controls the emulator.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "runtime.h"

namespace py = pybind11;

namespace pyckpt {
void bind_cuda(py::module_& m);
}

namespace simt {
namespace {

void set_order_by_name(const std::string& name, unsigned seed) {
  const Order order = name == "forward"   ? Order::forward
                      : name == "reverse" ? Order::reverse
                      : name == "random"  ? Order::random
                                          : throw std::invalid_argument("order: forward, reverse or random, not " + name);
  set_order(order, seed);
}

py::dict take_statistics() {
  py::dict result;
  result["switches"] = statistics.switches;
  result["collectives"] = statistics.collectives;
  result["barriers"] = statistics.barriers;
  result["accesses"] = statistics.accesses;
  statistics = {};
  return result;
}

}  // namespace
}  // namespace simt

PYBIND11_MODULE(SIMT_MODULE, m) {
  using namespace simt;
  py::register_local_exception<Fault>(m, "Fault", PyExc_RuntimeError);
  pyckpt::bind_cuda(m);
  py::module_ control = m.def_submodule("simt");
  control.attr("checks") = bool(SIMT_CHECK);
  control.def("order", &set_order_by_name, py::arg("order"), py::arg("seed") = 0,
              "Order of blocks, warps and lanes of the launches that follow.");
  control.def("allow", &shadow::allow, py::arg("address"), py::arg("bytes"), py::arg("name"), py::arg("writable"),
              py::arg("initialised"), "Memory that kernels may use.");
  control.def("forget", &shadow::forget, "Takes back what was allowed.");
  control.def("leave_out", &leave_out, py::arg("file"), py::arg("line"),
              "The barrier or cp_async_wait on that line does nothing from now on; line 0: all work.");
  control.def("passed", &take_passed, "Files and lines of the barriers and waits passed since the last call.");
  control.def("statistics", &take_statistics, "Work since the last call.");
}
