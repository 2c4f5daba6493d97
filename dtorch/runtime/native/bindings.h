// What the Python side of the native part shares: handing over parts and failures.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "executor.h"

namespace dtorch {

namespace py = pybind11;

py::object to_python(const Part& part);
std::vector<int> to_indices(const py::handle& sequence);
// A run-time scalar: a Python float, int or bool.
c10::IValue to_scalar(PyObject* value);
// The user's line that is running: the innermost frame outside of the libraries.
Site user_site();
// Tells the timeline that is recorded what the client has done since a time of
// `clock_if_recording`, if that is not 0: a call that it submitted, or none that it knows itself;
// where it is one of the user's, whether it is eager.
enum class Dispatched { kProgram, kEager, kJit };
void dispatched(int64_t since, Dispatched kind, const Call* call);
void bind_eager(py::module_& module);
void bind_compiled(py::module_& module);

}  // namespace dtorch
