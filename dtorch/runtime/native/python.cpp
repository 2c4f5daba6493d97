// The Python module: shards, programs from their plain data, submission.

#include "bindings.h"

#include <ATen/core/function_schema.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <deque>
#include <unordered_map>

#include "lent.h"

namespace dtorch {

namespace {

// Python objects that the module is given; they live as long as the process.
struct Given {
  PyObject *ref, *scalar_ref, *per_device;  // classes of the arguments of a local program
  PyObject *failure, *borrowed;             // classes of parts
  PyObject *describe, *driver_failure, *untrusted_failure, *is_of_driver;
  PyObject *is_library, *written_to, *start_waker, *dispatched, *launch;
};
Given given;

void drop(PyObject* object) {
  if (!object || !Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  Py_DECREF(object);
}

// Leaves what Python code raised where it is, for another thread that reads it too.
py::object exception_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const python_error& raised) {
    PyObject *type = raised.type, *value = raised.value, *traceback = raised.traceback;
    Py_XINCREF(type);
    Py_XINCREF(value);
    Py_XINCREF(traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback) PyException_SetTraceback(value, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return py::reinterpret_steal<py::object>(value);
  } catch (const py::error_already_set& raised) {
    return raised.value();
  } catch (...) {
  }
  auto raise = [&]() -> PyObject* {
    HANDLE_TH_ERRORS
    std::rethrow_exception(error);
    END_HANDLE_TH_ERRORS
  };
  raise();
  py::error_already_set raised;
  return raised.value();
}

FailurePtr from_python(py::object failure) {
  auto found = std::make_shared<Failure>();
  found->python = failure.release().ptr();
  return found;
}

Part part_of(const py::handle& value) {
  if (Py_TYPE(value.ptr()) == (PyTypeObject*)given.failure) {
    return {at::Tensor(), from_python(py::reinterpret_borrow<py::object>(value))};
  }
  return {value.is_none() ? at::Tensor() : py::cast<at::Tensor>(value), nullptr};
}

py::object describe_site(const Site& site) {
  if (!site.code) return py::none();
  int line = PyCode_Addr2Line((PyCodeObject*)site.code, site.offset);
  return py::make_tuple(py::handle(site.code), line);
}

ShardsPtr shards_of(const py::sequence& parts) {
  auto shards = c10::make_intrusive<Shards>(parts.size());
  for (size_t i = 0; i < parts.size(); i++) {
    py::object part = parts[i];
    if (Py_TYPE(part.ptr()) == (PyTypeObject*)given.borrowed) {
      static FailurePtr broken = from_python(py::reinterpret_borrow<py::object>(given.written_to)());
      auto owner = py::cast<at::Tensor>(part.attr("owner"));
      auto version = py::cast<int64_t>(part.attr("version"));
      auto loan = std::make_shared<Loan>(Loan{owner, version, broken});
      auto tensor = py::cast<at::Tensor>(part.attr("part"));
      shards->set(i, {tensor, nullptr, loan, event_of_caller(tensor)});
    } else {
      Part made = part_of(part);
      made.event = event_of_caller(made.tensor);
      shards->set(i, std::move(made));
    }
  }
  return shards;
}

// -- waiting -------------------------------------------------------------------------------

// What `when_ready` was given and is to be called, in order.
struct Completions {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<PyObject*> queue;  // owned references

  void push(PyObject* callback) {
    std::lock_guard<std::mutex> lock(mutex);
    queue.push_back(callback);
    changed.notify_one();
  }
  PyObject* pop() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return !queue.empty(); });
    PyObject* first = queue.front();
    queue.pop_front();
    return first;
  }
};
Completions* completions = new Completions();

py::cpp_function when_ready(ShardsPtr shards, const py::handle& indices, const py::object& wake) {
  py::reinterpret_borrow<py::object>(given.start_waker)();
  PyObject* callback = wake.inc_ref().ptr();
  auto token = shards->when_ready(to_indices(indices), [=] { completions->push(callback); });
  return py::cpp_function([=]() mutable {
    if (shards->forget(token)) Py_DECREF(callback);
  });
}

bool wait(Shards& shards, const py::handle& indices, const py::object& timeout) {
  std::vector<int> wanted = to_indices(indices);
  if (shards.ready(wanted)) return true;
  double left = timeout.is_none() ? INFINITY : std::max(0.0, py::cast<double>(timeout));
  while (true) {  // in pieces, so that Ctrl-C is noticed
    double piece = std::min(left, 0.1);
    {
      py::gil_scoped_release release;
      if (shards.wait(wanted, piece)) return true;
    }
    left -= piece;
    if (left <= 0) return false;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

// A part that is ready, for what the calling thread launches from now on.
Part received(const Shards& shards, size_t index) {
  Part part = shards.get(index);
  if (part.event && part.tensor.defined()) {
    FailurePtr lost = part.event->lost();
    if (!lost) {
      py::gil_scoped_release release;
      try {
        part.event->order_caller(part.tensor);
      } catch (...) {
        part.event->place.fail_with_current_error();
      }
      lost = part.event->lost();
    }
    if (lost) return {at::Tensor(), lost};
  }
  if (part.loan && part.loan->by_graph && part.tensor.defined()) {
    part.tensor = part.tensor.clone();  // launched while the graph had not written to it
    if (part.loan->is_broken()) return {at::Tensor(), part.loan->broken};
  }
  return part;
}

// Whether the streams that compute parts, which are ready, are done with them.
bool is_done(const Shards& shards, const py::handle& indices) {
  for (int i : to_indices(indices)) {
    Part part = shards.get(i);
    if (part.event && !part.event->is_over()) return false;
  }
  return true;
}

void finish(const Shards& shards, const py::handle& indices) {
  std::vector<int> wanted = to_indices(indices);
  py::gil_scoped_release release;
  for (int i : wanted) {
    Part part = shards.get(i);
    if (part.event) part.event->finish();
  }
}

// A copy for the caller, or a failure; waits for the part.
py::object copy_part(Shards& shards, int index) {
  if (!shards.ready(index)) wait(shards, py::make_tuple(index), py::none());
  Part part = received(shards, index);
  if (part.tensor.defined()) {
    py::gil_scoped_release release;
    c10::InferenceMode outside(false);
    bool before = use_host_cache(true);
    part.tensor = part.tensor.clone();
    use_host_cache(before);
  }
  return to_python(part);
}

// -- programs from their plain data --------------------------------------------------------

using Made = std::shared_ptr<Program>;

std::vector<int> ints(const py::handle& sequence) {
  return py::cast<std::vector<int>>(py::reinterpret_borrow<py::object>(sequence));
}

bool is_special(const py::handle& value) {
  PyObject* type = (PyObject*)Py_TYPE(value.ptr());
  if (type == given.ref || type == given.scalar_ref || type == given.per_device) return true;
  if (!PyTuple_CheckExact(value.ptr()) && !PyList_CheckExact(value.ptr())) return false;
  for (const auto& item : py::reinterpret_borrow<py::sequence>(value)) {
    if (is_special(item)) return true;
  }
  return false;
}

c10::TypePtr element_of(c10::TypePtr type) {
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  if (auto list = type->cast<c10::ListType>()) return list->getElementType();
  return type;
}

// Lists of symbolic integers are lists of integers here.
c10::TypePtr plain_type(const c10::TypePtr& type) {
  return type->kind() == c10::TypeKind::SymIntType ? c10::IntType::get() : type;
}

Argument to_argument(const py::handle& value, const c10::TypePtr& type, c10::optional<int> count) {
  Argument made;
  PyObject* kind = (PyObject*)Py_TYPE(value.ptr());
  if (kind == given.ref) {
    made.kind = Argument::kSlot;
    made.index = py::cast<int>(value.attr("id"));
  } else if (kind == given.scalar_ref) {
    made.kind = Argument::kScalar;
    made.index = py::cast<int>(value.attr("number"));
    auto optional = type->cast<c10::OptionalType>();
    made.type = optional ? optional->getElementType() : type;
  } else if (kind == given.per_device) {
    made.kind = Argument::kPerDevice;
    for (const auto& item : py::reinterpret_borrow<py::tuple>(value)) {
      made.items.push_back(to_argument(item, type, count));
    }
  } else if (is_special(value)) {
    made.kind = Argument::kList;
    made.type = plain_type(element_of(type));
    for (const auto& item : py::reinterpret_borrow<py::sequence>(value)) {
      made.items.push_back(to_argument(item, element_of(type), c10::nullopt));
    }
  } else {
    made.value = torch::jit::toIValue(value, type, count);
  }
  return made;
}

void add_operation(Program& program, const std::string& name, const std::string& overload,
                   const py::tuple& args, const py::dict& kwargs, const py::handle& places,
                   const py::handle& reads, const py::handle& outputs, const py::handle& frees,
                   std::pair<int, int> draws, int origin, const std::string& into,
                   const py::handle& overwritable) {
  Instruction made;
  if (!into.empty()) {
    made.into = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), into.c_str());
  }
  made.overwritable = ints(overwritable);
  made.op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  const auto& wanted = made.op->schema().arguments();
  torch::jit::ToIValueAllowNumbersAsTensors numbers_too(true);
  for (size_t i = 0; i < wanted.size(); i++) {
    const c10::Argument& argument = wanted[i];
    auto convert = [&](const py::handle& value) {
      return to_argument(value, argument.real_type(), argument.N());
    };
    py::str key(argument.name());
    Argument filled;
    if (i < args.size()) {
      filled = convert(args[i]);
    } else if (kwargs.contains(key)) {
      filled = convert(kwargs[key]);
    } else if (draws.first >= 0 && argument.name() == "generator") {
      filled.kind = Argument::kGenerator;
    } else if (argument.default_value()) {
      filled.value = *argument.default_value();
    }
    made.args.push_back(std::move(filled));
  }
  made.places = ints(places);
  made.reads = ints(reads);
  made.outputs = ints(outputs);
  made.frees = ints(frees);
  made.state_before = draws.first;
  made.state_after = draws.second;
  made.origin = origin;
  made.is_graph = name == "dtorch::run_graph";
  program.instructions.push_back(std::move(made));
}

std::vector<Cut> cuts_of(const py::handle& cuts) {
  std::vector<Cut> made;
  for (const auto& cut : py::reinterpret_borrow<py::tuple>(cuts)) {
    auto [dim, start, length] = py::cast<std::tuple<int64_t, int64_t, int64_t>>(cut);
    made.push_back({dim, start, length});
  }
  return made;
}

Round round_of(const py::handle& round) {
  Round made;
  for (const auto& piece : py::tuple(round.attr("pieces"))) {
    made.members.push_back(py::cast<int>(piece.attr("member")));
    made.pieces.push_back(
        {made.members.back(), cuts_of(piece.attr("cuts")), cuts_of(piece.attr("place"))});
  }
  made.join = Join(py::cast<int>(round.attr("join").attr("value")));
  made.dim = py::cast<int64_t>(round.attr("dim"));
  made.op = py::cast<std::string>(round.attr("op"));
  made.shape = py::cast<std::vector<int64_t>>(round.attr("shape"));
  made.fill = py::cast<std::optional<double>>(round.attr("fill"));
  if (!round.attr("kind").is_none()) {
    made.kind = py::cast<std::string>(round.attr("kind").attr("value"));
  }
  return made;
}

// `meetings`: for each device of the program, (exchange of the first round, `Meeting`) or None.
void add_step(Program& program, bool shows, int input, int output, const py::handle& frees,
              const py::list& meetings, int origin) {
  Instruction made;
  made.shows = shows;
  made.reads = {input};
  made.outputs = {output};
  made.frees = ints(frees);
  made.origin = origin;
  for (const auto& entry : meetings) {
    Meeting meeting;
    if (!entry.is_none()) {
      auto pair = py::reinterpret_borrow<py::tuple>(entry);
      py::object plan = pair[1];
      meeting.takes_part = true;
      meeting.exchange = py::cast<int>(pair[0]);
      meeting.size = int(py::len(plan.attr("group")));
      meeting.visitors = int(py::len(plan.attr("visitors")));
      meeting.member = plan.attr("member").is_none() ? -1 : py::cast<int>(plan.attr("member"));
      for (const auto& round : py::tuple(plan.attr("rounds"))) {
        meeting.rounds.push_back(round_of(round));
      }
      meeting.options = at::TensorOptions()
                            .dtype(py::cast<at::ScalarType>(plan.attr("dtype")))
                            .device(py::cast<at::Device>(plan.attr("device")));
      int last = meeting.exchange + int(meeting.rounds.size()) + 1;
      program.num_exchanges = std::max(program.num_exchanges, last);
    }
    made.meetings.push_back(std::move(meeting));
  }
  program.instructions.push_back(std::move(made));
}

// `launches`: for each instruction, (lane, waits, keeps, marks) or None, on one device.
void add_launches(Program& program, int position, at::Device place, const py::list& launches) {
  program.places.resize(program.devices.size());
  program.places[position] = &Place::of(place);
  for (size_t i = 0; i < program.instructions.size(); i++) {
    auto& made = program.instructions[i].launches;
    made.resize(program.devices.size());
    if (launches[i].is_none()) continue;
    auto [lane, waits, keeps, marks] =
        py::cast<std::tuple<int, std::vector<int>, std::vector<int>, std::vector<int>>>(
            py::object(launches[i]));
    made[position] = {lane, waits, keeps, marks};
  }
}

// For each instruction the names of its spans, by phase.
void add_names(Program& program, const std::vector<std::vector<std::string>>& names) {
  for (size_t i = 0; i < program.instructions.size(); i++) program.instructions[i].names = names[i];
}

Made new_program(const py::object& local, const std::vector<std::string>& devices, int num_slots,
                 const py::list& inputs, const py::list& outputs) {
  auto ports = [](const py::list& values) {
    std::vector<Port> made;
    for (const auto& value : values) {
      auto [slot, size, places] =
          py::cast<std::tuple<int, int, std::vector<int>>>(py::reinterpret_borrow<py::object>(value));
      made.push_back({slot, size, places});
    }
    return made;
  };
  auto program = std::make_shared<Program>();
  program->devices = devices;
  program->num_slots = num_slots;
  program->inputs = ports(inputs);
  program->outputs = ports(outputs);
  program->local = py::object(local).release().ptr();
  return program;
}

std::vector<ShardsPtr> submit_program(const Made& program, const py::sequence& inputs,
                                      const py::sequence& scalars) {
  if (on_worker()) throw std::runtime_error("a worker cannot submit");
  int64_t since = clock_if_recording();
  CallPtr call = new_call(program);
  for (const auto& input : inputs) call->inputs.push_back(py::cast<ShardsPtr>(input));
  for (const auto& scalar : scalars) call->scalars.push_back(to_scalar(scalar.ptr()));
  call->site = user_site();
  std::vector<ShardsPtr> outputs(call->outputs.begin(), call->outputs.end());
  submit(call);
  dispatched(since, Dispatched::kProgram, call.get());
  return outputs;
}

py::list spans() {
  py::list made;
  for (const auto& [device, found] : take_spans()) {
    for (const Span& span : found) {
      made.append(py::make_tuple(device, py::handle(span.program->local), span.call,
                                 describe_site(span.site), span.instruction, int(span.phase),
                                 span.begin, span.end));
    }
  }
  return made;
}

// Takes the interpreter lock of a worker that waits for nobody.
void launch_in_python(const Round& round, const std::vector<at::Tensor>& inputs,
                      const std::vector<at::Tensor>& outputs,
                      const std::vector<std::optional<c10::Stream>>& streams) {
  py::gil_scoped_acquire gil;
  py::reinterpret_borrow<py::object>(given.launch)(round.kind, round.op, inputs, outputs, streams);
}

void give(const py::dict& names) {
  auto take = [&](const char* name) { return py::object(names[name]).release().ptr(); };
  given = {take("Ref"),          take("ScalarRef"),      take("PerDevice"),
           take("Failure"),      take("Borrowed"),       take("describe"),
           take("driver_failure"), take("untrusted_failure"), take("is_of_driver"),
           take("is_library"),   take("written_to"),     take("start_waker"),
           take("dispatched"),   take("launch")};
  set_launcher(&launch_in_python);
}

}  // namespace

Failure::~Failure() { drop(python); }
Program::~Program() { drop(local); }

static py::object described(const Failure& failure) {
  auto function = [](PyObject* given) { return py::reinterpret_borrow<py::object>(given); };
  if (failure.first) {
    py::object first = to_python({at::Tensor(), failure.first});
    return function(given.untrusted_failure)(failure.where, first);
  }
  py::object error = exception_of(failure.error);
  if (!failure.program) return function(given.driver_failure)(failure.where, error);
  return function(given.describe)(py::handle(failure.program->local), failure.origin,
                                  failure.program->devices[failure.device],
                                  describe_site(failure.site), error);
}

py::object to_python(const Part& part) {
  if (!part.failure) return py::cast(part.tensor);
  const Failure& failure = *part.failure;
  if (!failure.python) failure.python = described(failure).release().ptr();
  return py::reinterpret_borrow<py::object>(failure.python);
}

bool is_of_driver(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::AcceleratorError&) {
  } catch (const python_error&) {
  } catch (const py::error_already_set&) {
  } catch (...) {
    return false;  // without the interpreter lock
  }
  py::gil_scoped_acquire gil;
  py::object known = py::reinterpret_borrow<py::object>(given.is_of_driver);
  return py::cast<bool>(known(exception_of(error)));
}

static py::object failure_of(at::Device place) {
  FailurePtr failure = Place::of(place).failure();
  return failure ? to_python({at::Tensor(), failure}) : py::none();
}

void dispatched(int64_t since, Dispatched kind, const Call* call) {
  if (C10_LIKELY(!since)) return;
  py::object local = py::none(), site = py::none();
  if (call) {
    local = py::reinterpret_borrow<py::object>(call->program->local);
    site = describe_site(call->site);
  }
  py::reinterpret_borrow<py::object>(given.dispatched)(int(kind), since, now(),
                                                       call ? call->number : 0, local, site);
}

std::vector<int> to_indices(const py::handle& sequence) {
  std::vector<int> made;
  for (const auto& item : py::reinterpret_borrow<py::sequence>(sequence)) {
    made.push_back(py::cast<int>(item));
  }
  return made;
}

c10::IValue to_scalar(PyObject* value) {
  if (PyFloat_Check(value)) return PyFloat_AS_DOUBLE(value);
  if (PyBool_Check(value)) return value == Py_True;
  if (PyComplex_Check(value)) {
    Py_complex c = PyComplex_AsCComplex(value);
    return c10::complex<double>(c.real, c.imag);
  }
  int overflow = 0;
  int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
  if (overflow > 0) {  // torch takes what 64 bits without a sign hold
    uint64_t large = PyLong_AsUnsignedLongLong(value);
    if (PyErr_Occurred()) throw py::error_already_set();
    return c10::IValue(at::Scalar(large));
  }
  if (overflow < 0) PyLong_AsLongLong(value);
  if (PyErr_Occurred()) throw py::error_already_set();
  return number;
}

Site user_site() {
  static auto& hidden = *new std::unordered_map<PyObject*, bool>();  // keeps the code objects
  Site site;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame) {
    PyObject* code = (PyObject*)PyFrame_GetCode(frame);
    auto found = hidden.find(code);
    if (found == hidden.end()) {
      bool library = PyObject_IsTrue(
          py::reinterpret_borrow<py::object>(given.is_library)(py::handle(code)).ptr());
      found = hidden.emplace(code, library).first;
      Py_INCREF(code);
    }
    if (!found->second) site = {code, PyFrame_GetLasti(frame)};
    Py_DECREF(code);
    PyFrameObject* back = site.code ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  return site;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<Shards, ShardsPtr>(module, "Shards", py::module_local())
      .def(py::init(&shards_of))
      .def_static("pending", [](size_t count) { return c10::make_intrusive<Shards>(count); })
      .def("__len__", &Shards::size)
      .def("get", [](Shards& s, size_t i) { return to_python(received(s, i)); })
      .def("is_done", &is_done)
      .def("finish", &finish)
      .def("is_ready", [](Shards& s, const py::handle& i) { return s.ready(to_indices(i)); })
      .def("set", [](Shards& s, size_t i, const py::handle& part) { s.set(i, part_of(part)); })
      .def("copy", &copy_part)
      .def("wait", &wait, py::arg("indices"), py::arg("timeout") = py::none())
      .def("when_ready", &when_ready);
  py::class_<Program, Made>(module, "Program", py::module_local())
      .def(py::init(&new_program))
      .def("add_operation", &add_operation)
      .def("add_step", &add_step)
      .def("add_launches", &add_launches)
      .def("add_names", &add_names);
  bind_eager(module);
  bind_compiled(module);
  module.def("give", &give);
  module.def("lend", [](const at::Tensor& owner, const py::object& gone) {
    lend(owner, from_python(gone));
  });
  module.def("withdraw", &withdraw);
  module.def("take_users", &take_users);
  module.def("is_shared", &is_shared);
  module.def("submit", &submit_program);
  module.def("mark", &mark);
  module.def("devices", &worker_devices);
  module.def("on_worker", &on_worker);
  module.def("stop", [](const py::object& stopped) {
    FailurePtr failure = from_python(stopped);
    py::gil_scoped_release release;
    stop(std::move(failure));
  });
  module.def("next_completion", [] {
    PyObject* callback;
    {
      py::gil_scoped_release release;
      callback = completions->pop();
    }
    return py::reinterpret_steal<py::object>(callback);
  });
  module.def("complete", [](const py::object& callback) {
    completions->push(py::object(callback).release().ptr());
  });
  module.def("set_thread_setters", [](const std::vector<uintptr_t>& addresses) {
    std::vector<void (*)(int)> setters;
    for (uintptr_t address : addresses) setters.push_back(reinterpret_cast<void (*)(int)>(address));
    set_thread_setters(std::move(setters));
  });
  module.def("now", &now);
  module.def("trace_lanes", &trace_lanes);
  module.def("take_lane_trace", &take_lane_trace);
  module.def("break_lanes", &break_lanes);
  module.def("hold_arrivals", &hold_arrivals);
  module.def("fault_of", &failure_of);
  module.def("mark_fault", [](at::Device place, const py::object& failure) {
    Place::of(place).fail(from_python(failure));
  });
  module.def("clear_fault", [](at::Device place) { Place::of(place).clear(); });
  module.def("set_recording", &set_recording);
  module.def("take_spans", &spans);
  module.def("install_host_cache", &install_host_cache);
  module.def("use_host_cache", &use_host_cache);
  module.def("empty_host_cache", &empty_host_cache);
  module.def("after_fork_in_child", [](const py::object& lost) {
    completions = new Completions();
    host_cache_after_fork();
    lent_after_fork();
    Shards::after_fork(from_python(lost));
    return after_fork_in_child();
  });
}

}  // namespace dtorch
