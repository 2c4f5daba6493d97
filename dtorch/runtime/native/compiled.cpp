// Compiled stretches of programs: the operation dtorch::run_compiled, see stretches.py.
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>
#include <torch/library.h>

#include <deque>

#include "bindings.h"

namespace dtorch {

namespace {

// What compiled code takes a tensor to be, without looking.
struct Layout {
  std::vector<int64_t> shape, stride;
  at::ScalarType dtype;
  bool fresh, overlaps;

  explicit Layout(const py::handle& layout)
      : shape(py::cast<std::vector<int64_t>>(layout.attr("shape"))),
        stride(py::cast<std::vector<int64_t>>(layout.attr("stride"))),
        dtype(py::cast<at::ScalarType>(layout.attr("dtype"))),
        fresh(py::cast<bool>(layout.attr("is_fresh"))),
        overlaps(py::cast<bool>(layout.attr("overlaps"))) {}

  // Returns the tensor, or a copy with these strides.
  at::Tensor of(const at::Tensor& tensor) const {
    TORCH_CHECK(tensor.scalar_type() == dtype && tensor.sizes() == shape, "compiled code for ",
                dtype, " ", at::IntArrayRef(shape), " met ", tensor.scalar_type(), " ",
                tensor.sizes(), ".\n  Fix: report it, and use jit without compile=True.");
    if ((tensor.strides() == stride && !tensor.is_neg()) || overlaps) return tensor;
    return at::empty_strided(shape, stride, tensor.options()).copy_(tensor);
  }
};

struct Compiled {
  torch::inductor::AOTIModelContainerRunnerCpu runner;
  std::vector<Layout> inputs, outputs;

  Compiled(const std::string& library, size_t num_models, std::vector<Layout> wanted,
           std::vector<Layout> promised)
      : runner(library, num_models), inputs(std::move(wanted)), outputs(std::move(promised)) {}
};

// Never destroyed, as the workers; an address in a deque stays.
std::deque<Compiled>* all = new std::deque<Compiled>();
std::mutex* adding = new std::mutex();

Compiled& compiled(int64_t number) {
  std::lock_guard<std::mutex> lock(*adding);
  return all->at(number);
}

std::vector<Layout> layouts(const py::sequence& sequence) {
  std::vector<Layout> made;
  for (const auto& item : sequence) made.emplace_back(item);
  return made;
}

int64_t add_compiled(const std::string& library, size_t num_models, const py::sequence& inputs,
                     const py::sequence& outputs) {
  std::vector<Layout> wanted = layouts(inputs), promised = layouts(outputs);
  std::lock_guard<std::mutex> lock(*adding);
  all->emplace_back(library, num_models, std::move(wanted), std::move(promised));
  return int64_t(all->size()) - 1;
}

std::vector<at::Tensor> run_compiled(int64_t number, at::TensorList inputs,
                                     at::ArrayRef<double> scalars) {
  Compiled& code = compiled(number);
  std::vector<at::Tensor> given;
  given.reserve(inputs.size() + scalars.size());
  for (size_t i = 0; i < inputs.size(); i++) given.push_back(code.inputs[i].of(inputs[i]));
  for (double s : scalars) given.push_back(at::scalar_tensor(s, at::kDouble));
  std::vector<at::Tensor> results = code.runner.run(given);
  for (size_t i = 0; i < results.size(); i++) {
    at::Tensor& result = results[i];
    const Layout& layout = code.outputs[i];
    auto shares = [&](const at::Tensor& t) { return t.is_alias_of(result); };
    bool of_input = std::any_of(given.begin(), given.end(), shares);
    // What generated code keeps, its next call on this thread writes to.
    bool kept = result.use_count() > 1 || result.storage().use_count() > 1;
    if (of_input ? layout.fresh : kept) result = result.clone();
    result = layout.of(result);
  }
  return results;
}

TORCH_LIBRARY_IMPL(dtorch, CompositeImplicitAutograd, m) {
  m.impl("run_compiled", run_compiled);
}

}  // namespace

void bind_compiled(py::module_& module) { module.def("add_compiled", add_compiled); }

}  // namespace dtorch
