// The eager path: from a torch call to its submitted program in one function.
//
// A `CallCache` stands before the Python path, which traces what is new and tells it what it made.
// The key of a call is a list of words: the function, the settings of torch, and for each leaf
// what the program depends on; specs are interned, so a tensor is one word. What this file does
// not know (a plain torch tensor, an unusual container, an active mode) it leaves to Python.

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/python_variable.h>

#include <typeinfo>
#include <unordered_map>

#include "bindings.h"

namespace dtorch {

namespace {

PyTypeObject* tensor_type = nullptr;  // dtorch.Tensor
PyObject* missed = nullptr;           // what a cache returns for a call that it does not know

// -- the tensor that holds no data -------------------------------------------------------------

// What torch sees of a distributed tensor, and what dtorch keeps with it.
struct Wrapper final : c10::TensorImpl {
  Wrapper(c10::Storage storage, c10::DispatchKeySet keys, caffe2::TypeMeta type)
      : TensorImpl(std::move(storage), keys, type) {
    set_python_dispatch(true);
  }
  ~Wrapper() override { drop(); }
  void release_resources() override {
    drop();
    TensorImpl::release_resources();
  }
  void drop() {
    shards.reset();
    if ((!spec && !reduced && !aliases) || !Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    Py_CLEAR(spec);
    Py_CLEAR(reduced);
    Py_CLEAR(aliases);
  }
  PyObject* spec = nullptr;
  const PyObject* mesh = nullptr;  // kept by the spec
  PyObject* reduced = nullptr;  // the same value with its partial sums reduced, once it is known
  PyObject* aliases = nullptr;  // the tensors that share its storage in PyTorch's sense
  ShardsPtr shards;
};

// What a wrapper is made from; read from a Python `Spec` once.
struct Form {
  PyObject* spec;  // borrowed: the spec owns its form
  const PyObject* mesh;
  std::vector<int64_t> sizes, strides;
  caffe2::TypeMeta type;
  c10::Device device;
  c10::DispatchKeySet keys;
  size_t num_bytes;
  bool conj, neg;
};

Form* new_form(const py::handle& spec) {
  auto dtype = py::cast<at::ScalarType>(spec.attr("dtype"));
  py::object mesh = spec.attr("mesh");
  auto device = py::cast<at::Device>(mesh.attr("torch_device")());
  auto form = new Form{spec.ptr(),
                       mesh.ptr(),
                       py::cast<std::vector<int64_t>>(py::tuple(spec.attr("shape"))),
                       py::cast<std::vector<int64_t>>(spec.attr("stride")),
                       c10::scalarTypeToTypeMeta(dtype),
                       device,
                       c10::DispatchKeySet(c10::computeDispatchKey(dtype, c10::nullopt, device)),
                       0,
                       py::cast<bool>(spec.attr("conj")),
                       py::cast<bool>(spec.attr("neg"))};
  form->num_bytes = at::detail::computeStorageNbytes(form->sizes, form->strides,
                                                     c10::elementSize(dtype));
  return form;
}

const Form& form_of(const py::handle& spec) {
  static PyObject* name = PyUnicode_InternFromString("_form");
  PyObject* known = PyObject_GetAttr(spec.ptr(), name);
  if (!known) {
    PyErr_Clear();
    known = py::capsule(new_form(spec), [](void* form) { delete (Form*)form; }).release().ptr();
    if (PyObject_SetAttr(spec.ptr(), name, known) < 0) throw py::error_already_set();
  }
  Py_DECREF(known);  // the spec keeps it
  return *(Form*)PyCapsule_GetPointer(known, nullptr);
}

py::object wrap(const Form& form, ShardsPtr shards, PyTypeObject* type, int64_t offset = 0) {
  size_t num_bytes = form.num_bytes + size_t(offset) * form.type.itemsize();
  c10::Storage storage(c10::Storage::use_byte_size_t(), num_bytes,
                       at::DataPtr(nullptr, form.device), c10::GetAllocator(c10::kMeta), true);
  auto made = c10::make_intrusive<Wrapper>(std::move(storage), form.keys, form.type);
  made->set_sizes_and_strides(form.sizes, form.strides, offset);
  made->spec = form.spec;
  made->mesh = form.mesh;
  Py_INCREF(form.spec);
  made->shards = std::move(shards);
  at::Tensor tensor(std::move(made));
  if (form.conj) tensor._set_conj(true);
  if (form.neg) tensor._set_neg(true);
  PyObject* wrapped = THPVariable_Wrap(tensor, type);
  if (!wrapped) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(wrapped);
}

Wrapper* wrapper_of(PyObject* object) {
  c10::TensorImpl* impl = THPVariable_Unpack(object).unsafeGetTensorImpl();
  return typeid(*impl) == typeid(Wrapper) ? static_cast<Wrapper*>(impl) : nullptr;
}

// What a program reads of a tensor: a partial one is reduced once that is known.
PyObject* spec_of(Wrapper* tensor) {
  return tensor->reduced ? wrapper_of(tensor->reduced)->spec : tensor->spec;
}

Wrapper& checked_wrapper(PyObject* object) {
  Wrapper* found = wrapper_of(object);
  if (!found) {
    PyErr_SetString(PyExc_AttributeError, "this tensor was not made by dtorch");
    throw py::error_already_set();
  }
  return *found;
}

// -- keys ------------------------------------------------------------------------------------

enum Tag : uint64_t {
  kTensor = 1, kFloat, kDynamicInt, kInt, kComplex, kBool, kNone, kEllipsis, kString, kSize, kSlice,
  kTuple, kList, kDict, kObject, kDevice, kDtype,
};
uint64_t tagged(Tag tag, uint64_t size) { return tag | size << 8; }

using Words = std::vector<uint64_t>;

thread_local int num_bypasses = 0;  // contexts of this thread in which nothing remembered runs

// The key of a call in the making, with its leaves in the order in which they are met.
class Encoder {
 public:
  Words words;
  std::vector<PyObject*> leaves;  // borrowed
  std::vector<int> numbers;       // of the leaves in the Python path's order, where it is asked for
  bool differentiable = false;    // whether autograd has to record the call
  bool one_mesh = true;           // whether all tensors are on the same

  // Returns false where the call has to take the Python path.
  bool begin(PyObject* token, bool ints_are_dynamic) {
    words.clear();
    leaves.clear();
    numbers.clear();
    differentiable = false;
    one_mesh = true;
    mesh_ = nullptr;
    ints_are_dynamic_ = ints_are_dynamic;
    if (num_bypasses || at::impl::torch_function_mode_enabled()) return false;
    if (c10::impl::TorchDispatchModeTLS::any_modes_set()) return false;
    if (at::autocast::is_autocast_enabled(at::kCPU) || at::autocast::is_autocast_enabled(at::kCUDA))
      return false;
    auto& context = at::globalContext();
    auto tls = c10::impl::tls_local_dispatch_key_set();
    grad_ = c10::GradMode::is_enabled();
    uint64_t bits = 0;
    for (bool bit : {grad_, c10::InferenceMode::is_enabled(), context.deterministicAlgorithms(),
                     context.deterministicAlgorithmsWarnOnly(), context.userEnabledFlashSDP(),
                     context.userEnabledMemEfficientSDP(), context.userEnabledMathSDP(),
                     context.userEnabledCuDNNSDP()}) {
      bits = bits << 1 | uint64_t(bit);
    }
    for (auto backend : context.sDPPriorityOrder()) bits = bits << 4 | uint64_t(backend) + 1;
    bits = bits << 8 | uint64_t(c10::get_default_dtype_as_scalartype());
    words.insert(words.end(), {reinterpret_cast<uint64_t>(token), tls.included_.raw_repr(),
                               tls.excluded_.raw_repr(), bits});
    return true;
  }

  bool items(Tag tag, PyObject* const* objects, size_t count, PyObject* numbered) {
    words.push_back(tagged(tag, count));
    for (size_t i = 0; i < count; i++) {
      PyObject* number = !numbered              ? nullptr
                         : PyTuple_Check(numbered) ? PyTuple_GET_ITEM(numbered, i)
                                                   : PyList_GET_ITEM(numbered, i);
      if (!add(objects[i], number)) return false;
    }
    return true;
  }

  bool dict(PyObject* object, PyObject* numbered) {
    words.push_back(tagged(kDict, object ? PyDict_GET_SIZE(object) : 0));
    PyObject *key, *value;
    for (Py_ssize_t place = 0; object && PyDict_Next(object, &place, &key, &value);) {
      if (!PyUnicode_CheckExact(key) || !string(key)) return false;
      if (!add(value, numbered ? PyDict_GetItem(numbered, key) : nullptr)) return false;
    }
    return true;
  }

  bool named(PyObject* names, PyObject* const* values) {
    Py_ssize_t count = names ? PyTuple_GET_SIZE(names) : 0;
    words.push_back(tagged(kDict, count));
    for (Py_ssize_t i = 0; i < count; i++) {
      if (!string(PyTuple_GET_ITEM(names, i)) || !add(values[i], nullptr)) return false;
    }
    return true;
  }

  // Appends the values of leaves that a trace has read.
  void values(const std::vector<int>& which) {
    for (int i : which) {
      PyObject* leaf = leaves[i];
      double number = PyFloat_Check(leaf) ? PyFloat_AS_DOUBLE(leaf) : 0;
      int64_t bits = PyFloat_Check(leaf) ? 0 : PyLong_AsLongLong(leaf);
      if (PyFloat_Check(leaf)) std::memcpy(&bits, &number, sizeof bits);
      words.push_back(uint64_t(bits));
    }
  }

 private:
  bool add(PyObject* object, PyObject* number) {
    PyTypeObject* type = Py_TYPE(object);
    if (type == tensor_type) return tensor(object, number);
    if (type == &PyTuple_Type) {
      return items(kTuple, &PyTuple_GET_ITEM(object, 0), PyTuple_GET_SIZE(object), number);
    }
    if (type == &PyList_Type) {
      return items(kList, ((PyListObject*)object)->ob_item, PyList_GET_SIZE(object), number);
    }
    if (type == &PyDict_Type) return dict(object, number);
    if (object == Py_None) return words.push_back(kNone), true;
    if (type == &PySlice_Type) {
      auto* slice = (PySliceObject*)object;
      auto* numbers = (PySliceObject*)number;
      words.push_back(kSlice);
      return add(slice->start, number ? numbers->start : nullptr) &&
             add(slice->stop, number ? numbers->stop : nullptr) &&
             add(slice->step, number ? numbers->step : nullptr);
    }
    return leaf(object, number) && value(object, type);
  }

  bool leaf(PyObject* object, PyObject* number) {
    leaves.push_back(object);
    if (number) numbers.push_back(int(PyLong_AsLong(number)));
    return true;
  }

  bool tensor(PyObject* object, PyObject* number) {
    Wrapper* found = wrapper_of(object);
    if (!found) return false;
    differentiable |= grad_ && found->requires_grad();
    one_mesh &= !mesh_ || found->mesh == mesh_;
    mesh_ = found->mesh;
    words.push_back(kTensor);
    words.push_back(reinterpret_cast<uint64_t>(spec_of(found)));
    return leaf(object, number);
  }

  bool value(PyObject* object, PyTypeObject* type) {
    if (type == &PyFloat_Type) return words.push_back(kFloat), true;
    if (type == &PyLong_Type) {
      int overflow = 0;
      int64_t number = PyLong_AsLongLongAndOverflow(object, &overflow);
      words.push_back(ints_are_dynamic_ ? kDynamicInt : kInt);
      if (!ints_are_dynamic_) words.push_back(uint64_t(number));
      return !overflow;
    }
    if (type == &PyBool_Type) return words.push_back(tagged(kBool, object == Py_True)), true;
    if (type == &PyUnicode_Type) return string(object);
    if (object == Py_Ellipsis) return words.push_back(kEllipsis), true;
    if (type == &THPSizeType) {
      words.push_back(tagged(kSize, PyTuple_GET_SIZE(object)));
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); i++) {
        PyObject* size = PyTuple_GET_ITEM(object, i);
        if (!PyLong_CheckExact(size)) return false;
        words.push_back(uint64_t(PyLong_AsLongLong(size)));
      }
      return true;
    }
    if (type == &THPDeviceType) {
      auto& device = ((THPDevice*)object)->device;
      words.push_back(tagged(kDevice, uint64_t(device.type()) << 16 | uint16_t(device.index())));
      return true;
    }
    bool lives_for_ever = type == &THPDtypeType || type == &THPLayoutType ||
                          type == &THPMemoryFormatType;
    words.push_back(kObject);
    words.push_back(reinterpret_cast<uint64_t>(object));
    return lives_for_ever;
  }

  bool string(PyObject* object) {
    Py_ssize_t size;
    const char* text = PyUnicode_AsUTF8AndSize(object, &size);
    if (!text) return PyErr_Clear(), false;
    words.push_back(tagged(kString, size));
    size_t first = words.size();
    words.resize(first + (size + 7) / 8);
    std::memcpy(words.data() + first, text, size);
    return true;
  }

  bool ints_are_dynamic_ = false, grad_ = false;
  const PyObject* mesh_ = nullptr;
};

uint64_t hash_of(const Words& words) {
  uint64_t hash = words.size();
  for (uint64_t word : words) {
    hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  }
  return hash;
}

// -- what is remembered of a call --------------------------------------------------------------

struct Entry {
  Words key;
  std::vector<int> read;    // leaves whose values belong to the key; such an entry has no program
  std::vector<int> order;   // for each leaf of the Python path, its place among the leaves here
  py::object kept;          // what the key names by address
  py::object slow;          // runs the call on the leaves in Python, where C++ cannot
  bool is_autograds = false;  // autograd has to see it, as where it makes a view
  ProgramPtr program;       // none where C++ never can
  std::vector<int> inputs;  // places of leaves; ~i is the i-th captured tensor
  std::vector<py::object> captures;
  std::vector<int> scalars;  // places of leaves
  std::vector<const Form*> forms;  // of the outputs, kept by their specs in `captures`
  std::vector<std::pair<bool, int>> results;  // an output, or (false) a leaf
  std::vector<std::pair<int, int>> reduced;   // an output that is a partial leaf, reduced
  int written = -1, written_leaf = -1;        // the output that is the new value of a leaf
  bool counts_writes = false;                 // whether that is a new version of the leaf
  std::vector<std::tuple<int, int, py::object>> links;  // a result that is a view of a leaf
  py::object link, refresh;                       // what makes it so; what reads it again
  py::object unflatten;      // none where the result is one leaf
};

class CallCache {
 public:
  CallCache(bool ints_are_dynamic, bool below_autograd, size_t capacity)
      : ints_are_dynamic_(ints_are_dynamic), below_(below_autograd), capacity_(capacity) {}

  // Each returns the result of a call that is known, and no object for one that is not; then
  // `differentiable` says whether only autograd is in the way, and no stages to be brought together.
  py::object call(PyObject* token, PyObject* const* args, size_t count, PyObject* kwargs,
                  bool& differentiable) {
    int64_t since = clock_if_recording();
    Encoder& key = encoder();
    bool fits = key.begin(token, ints_are_dynamic_) && key.items(kTuple, args, count, nullptr) &&
                key.dict(kwargs, nullptr);
    bool records = fits && is_differentiable(key);
    differentiable = records && key.one_mesh;
    return fits && !records ? run(key, since, differentiable) : py::object();
  }
  py::object call_method(PyObject* token, PyObject* const* args, size_t count, PyObject* names,
                         bool& differentiable) {
    int64_t since = clock_if_recording();
    Encoder& key = encoder();
    bool fits = key.begin(token, ints_are_dynamic_) && key.items(kTuple, args, count, nullptr) &&
                key.named(names, args + count);
    bool records = fits && is_differentiable(key);
    differentiable = records && key.one_mesh;
    return fits && !records ? run(key, since, differentiable) : py::object();
  }

  // Whether a call can be remembered and is not.
  bool wants(const py::object& token, const py::tuple& args, const py::object& kwargs) {
    Encoder& key = encoder();
    return encode(key, token, args, kwargs, py::none(), py::none()) && !find(key);
  }

  // Remembers a call. `numbered` is (args, kwargs) with the number of each leaf in its place.
  void remember(const py::object& token, const py::tuple& args, const py::object& kwargs,
                const py::tuple& numbered, const py::dict& made) {
    Encoder key;
    if (!encode(key, token, args, kwargs, numbered[0], numbered[1])) return;
    if (entries_.size() >= capacity_) forget();
    std::vector<int> place(key.numbers.size());
    for (size_t i = 0; i < key.numbers.size(); i++) place.at(key.numbers[i]) = int(i);
    // Another thread may have reduced or changed a tensor since it was traced.
    for (const auto& traced : py::list(made["traced"])) {
      auto pair = py::reinterpret_borrow<py::tuple>(traced);
      PyObject* leaf = key.leaves.at(place.at(py::cast<int>(pair[0])));
      if (spec_of(wrapper_of(leaf)) != pair[1].ptr()) return;
    }
    py::list kept;
    kept.append(token);
    for (PyObject* leaf : key.leaves) {
      if (Py_TYPE(leaf) == tensor_type) {
        kept.append(py::handle(spec_of(wrapper_of(leaf))));
      }
    }
    std::vector<int> read;
    for (int number : py::cast<std::vector<int>>(made["read"])) read.push_back(place.at(number));
    if (!read.empty()) {
      if (auto first = entry_at(key.words)) {
        first->read = read;  // a later trace may read more
      } else {
        Entry made_first;
        made_first.key = key.words;
        made_first.read = read;
        made_first.kept = kept;
        insert(std::move(made_first));
      }
      key.values(read);
    }
    Entry entry = entry_of(made, place);
    entry.key = key.words;
    entry.kept = kept;
    insert(std::move(entry));
  }

  void clear() {
    forget();
    hits = 0;
  }

  size_t hits = 0;

 private:
  static Encoder& encoder() {
    thread_local Encoder made;
    return made;
  }

  bool encode(Encoder& key, const py::object& token, const py::tuple& args,
              const py::object& kwargs, const py::object& args_numbers,
              const py::object& kwargs_numbers) {
    auto or_null = [](const py::object& o) { return o.is_none() ? nullptr : o.ptr(); };
    return key.begin(token.ptr(), ints_are_dynamic_) &&
           key.items(kTuple, &PyTuple_GET_ITEM(args.ptr(), 0), args.size(), or_null(args_numbers)) &&
           key.dict(or_null(kwargs), or_null(kwargs_numbers)) && !is_differentiable(key);
  }

  bool is_differentiable(const Encoder& key) const { return key.differentiable && !below_; }

  Entry entry_of(const py::dict& made, const std::vector<int>& place) {
    Entry entry;
    entry.order = place;
    entry.slow = made["slow"];
    entry.is_autograds = py::cast<bool>(made["is_autograds"]);
    if (made["program"].is_none()) return entry;
    entry.program = py::cast<std::shared_ptr<Program>>(made["program"]);
    for (const auto& source : py::list(made["inputs"])) {
      if (py::isinstance<py::int_>(source)) {
        entry.inputs.push_back(place.at(py::cast<int>(source)));
      } else {
        entry.inputs.push_back(~int(entry.captures.size()));
        entry.captures.push_back(py::reinterpret_borrow<py::object>(source));
      }
    }
    for (int leaf : py::cast<std::vector<int>>(made["scalars"])) {
      entry.scalars.push_back(place.at(leaf));
    }
    for (const auto& spec : py::list(made["specs"])) {
      entry.forms.push_back(&form_of(spec));
      spec.inc_ref();
      entry.captures.push_back(py::reinterpret_steal<py::object>(spec));
    }
    for (const auto& result : py::list(made["results"])) {
      auto [is_output, number] = py::cast<std::pair<bool, int>>(result);
      entry.results.push_back({is_output, is_output ? number : place.at(number)});
    }
    for (const auto& pair : py::list(made["reduced"])) {
      auto [output, leaf] = py::cast<std::pair<int, int>>(pair);
      entry.reduced.push_back({output, place.at(leaf)});
    }
    if (!made["written"].is_none()) {
      auto [output, leaf] = py::cast<std::pair<int, int>>(made["written"]);
      entry.written = output;
      entry.written_leaf = place.at(leaf);
      entry.counts_writes = !below_;
    }
    for (const auto& link : py::list(made["links"])) {
      auto [result, leaf, path] = py::cast<std::tuple<int, int, py::object>>(link);
      entry.links.push_back({result, place.at(leaf), path});
    }
    entry.link = made["link"];
    entry.refresh = made["refresh"];
    entry.unflatten = made["unflatten"];
    return entry;
  }

  void insert(Entry entry) {
    uint64_t hash = hash_of(entry.key);
    entries_.emplace(hash, std::make_shared<Entry>(std::move(entry)));
  }

  std::shared_ptr<Entry> entry_at(const Words& words) const {
    auto [begin, end] = entries_.equal_range(hash_of(words));
    for (auto it = begin; it != end; ++it) {
      if (it->second->key == words) return it->second;
    }
    return nullptr;
  }

  // The entry of a call; to its key are added the values of the leaves that it reads.
  std::shared_ptr<Entry> find(Encoder& key) {
    for (bool first : {true, false}) {
      std::shared_ptr<Entry> found = entry_at(key.words);
      if (!found || found->read.empty() || !first) return found;
      key.values(found->read);
    }
    return nullptr;
  }

  py::object run(Encoder& key, int64_t since, bool& differentiable) {
    if (on_worker()) return py::object();
    std::shared_ptr<Entry> entry = find(key);  // kept, should the call clear the cache
    if (!entry) return py::object();
    hits++;
    if (entry->is_autograds) return differentiable = true, py::object();
    Wrapper* target = entry->written < 0 ? nullptr : wrapper_of(key.leaves[entry->written_leaf]);
    Site site;
    if (target) {  // found first, which may run Python: from reading to writing, no other thread may
      std::vector<PyObject*> met = key.leaves;
      auto before = specs_read(*entry, met);
      site = user_site();
      key.leaves = std::move(met);
      // Another thread has reduced or changed a tensor since the key was made of it.
      if (specs_read(*entry, key.leaves) != before) return py::object();
    }
    // A write that others may see, or into another layout, is Python's.
    bool is_simple = entry->program && (!target || (!target->aliases && !target->is_inference() &&
                                                    target->spec == entry->forms[entry->written]->spec));
    if (!is_simple) {
      std::vector<PyObject*> met = key.leaves;  // a new list may collect, which uses the encoder
      py::list leaves(entry->order.size());
      for (size_t i = 0; i < entry->order.size(); i++) {
        leaves[i] = py::handle(met[entry->order[i]]);
      }
      py::object result = entry->slow(leaves);
      dispatched(since, kind(), nullptr);
      return result;
    }
    CallPtr call = new_call(entry->program);
    for (int input : entry->inputs) {
      Wrapper* found = wrapper_of(input < 0 ? entry->captures[~input].ptr() : key.leaves[input]);
      if (input >= 0 && found->reduced) found = wrapper_of(found->reduced);
      call->inputs.push_back(found->shards);
    }
    for (int scalar : entry->scalars) call->scalars.push_back(to_scalar(key.leaves[scalar]));
    c10::SmallVector<py::object, 2> results;
    for (auto [is_output, number] : entry->results) {
      if (!is_output) results.push_back(py::reinterpret_borrow<py::object>(key.leaves[number]));
    }
    c10::SmallVector<std::tuple<int, py::object, ShardsPtr>, 1> partial;
    for (auto [output, leaf] : entry->reduced) {
      partial.emplace_back(output, py::reinterpret_borrow<py::object>(key.leaves[leaf]),
                           wrapper_of(key.leaves[leaf])->shards);
    }
    c10::SmallVector<std::pair<py::object, ShardsPtr>, 1> linked;
    for (const auto& [result, leaf, path] : entry->links) {
      linked.emplace_back(py::reinterpret_borrow<py::object>(key.leaves[leaf]),
                          wrapper_of(key.leaves[leaf])->shards);
    }
    // From here on Python may run other code (a collection), which uses the encoder too, and other
    // threads, which must see no value whose program is not yet queued: theirs would come before it.
    py::object written, reduced_before;
    if (target) written = py::reinterpret_borrow<py::object>(key.leaves[entry->written_leaf]);
    call->site = target ? site : user_site();
    submit(call);
    if (target) {
      target->shards = call->outputs[entry->written];
      reduced_before = py::reinterpret_steal<py::object>(std::exchange(target->reduced, nullptr));
      if (entry->counts_writes) target->bump_version();
    }
    size_t next = 0;
    for (auto [is_output, number] : entry->results) {
      if (is_output) {
        py::object made = wrap(*entry->forms[number], call->outputs[number], tensor_type);
        results.insert(results.begin() + next, std::move(made));
      }
      next++;
    }
    for (auto& [output, leaf, read] : partial) {
      if (wrapper_of(leaf.ptr()) == target) continue;  // what it was before the write
      py::object complete = wrap(*entry->forms[output], call->outputs[output], tensor_type);
      // Unless another thread has written to it meanwhile.
      if (wrapper_of(leaf.ptr())->shards == read) leaf.attr("_reduced") = complete;
    }
    for (size_t i = 0; i < linked.size(); i++) {
      const auto& [result, leaf, path] = entry->links[i];
      const auto& [base, seen] = linked[i];
      entry->link(base, results[result], path);
      // From now on no write to the base is done here; one that came before, the view has missed.
      Wrapper* now = wrapper_of(base.ptr());
      if (now != target && now->shards != seen) entry->refresh(results[result]);
    }
    py::object result;
    if (entry->unflatten.is_none()) {
      result = results[0];
    } else {
      py::list listed(results.size());
      for (size_t i = 0; i < results.size(); i++) listed[i] = std::move(results[i]);
      result = entry->unflatten(listed);
    }
    dispatched(since, kind(), call.get());
    return result;
  }

  // The specs of the leaves that a program takes, as it reads them.
  static std::vector<PyObject*> specs_read(const Entry& entry, const std::vector<PyObject*>& leaves) {
    std::vector<PyObject*> found;
    for (int input : entry.inputs) {
      if (input >= 0) found.push_back(spec_of(wrapper_of(leaves[input])));
    }
    return found;
  }

  Dispatched kind() const { return ints_are_dynamic_ ? Dispatched::kEager : Dispatched::kJit; }

  // What an entry keeps may run Python code as it goes, which comes back here.
  void forget() {
    decltype(entries_) gone;
    gone.swap(entries_);
  }

  bool ints_are_dynamic_, below_;
  size_t capacity_;
  std::unordered_multimap<uint64_t, std::shared_ptr<Entry>> entries_;
};

// -- where torch comes in ------------------------------------------------------------------------

// Runs C++ that may raise a Python error, or one of C++.
template <class Body>
PyObject* guarded(const Body& body) {
  HANDLE_TH_ERRORS
  return body();
  END_HANDLE_TH_ERRORS
}

// The two entry points of a tensor class: each is a cache, and a Python function for the rest.
struct Entrance {
  CallCache* cache = nullptr;
  PyObject* slow = nullptr;
};
Entrance functions, operations;

PyObject* substitutes = nullptr;  // a dict: what autograd records in place of a function
PyObject* only_python = nullptr;  // a set of functions that Python treats specially

// While it lives, torch functions on our tensors go straight to autograd and the operations below.
// Autograd then writes through a view by its operations: a wrapper has no strided memory.
struct WithoutTorchFunction {
  bool replays = c10::AutogradState::get_tls_state().get_view_replay_enabled();
  WithoutTorchFunction() {
    c10::AutogradState::get_tls_state().set_view_replay_enabled(true);
    at::impl::PythonTorchFunctionTLS::set_disabled_state(
        at::impl::TorchFunctionDisabledState::SUBCLASSES_DISABLED);
  }
  ~WithoutTorchFunction() {
    c10::AutogradState::get_tls_state().set_view_replay_enabled(replays);
    at::impl::PythonTorchFunctionTLS::set_disabled_state(
        at::impl::TorchFunctionDisabledState::ENABLED);
  }
};

// (func, types, args, kwargs), as torch calls ``__torch_function__`` and ``__torch_dispatch__``.
PyObject* enter(const Entrance& entrance, PyObject* const* given, Py_ssize_t count,
                PyObject* names) {
  return guarded([&]() -> PyObject* {
    PyObject* taken[] = {nullptr, nullptr, nullptr, nullptr};
    static const char* const parameters[] = {"func", "types", "args", "kwargs"};
    Py_ssize_t num_names = names ? PyTuple_GET_SIZE(names) : 0;
    for (Py_ssize_t i = 0; i < count + num_names; i++) {
      Py_ssize_t at = i;
      if (i >= count) {
        const char* name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(names, i - count));
        for (at = 0; at < 4 && strcmp(parameters[at], name) != 0;) at++;
      }
      TORCH_CHECK_TYPE(at < 4 && !taken[at], "expected (func, types, args=(), kwargs=None)");
      taken[at] = given[i];
    }
    TORCH_CHECK_TYPE(taken[0], "expected (func, types, args=(), kwargs=None)");
    PyObject* kwargs = taken[3] && taken[3] != Py_None ? taken[3] : nullptr;
    TORCH_CHECK_TYPE(!kwargs || PyDict_Check(kwargs), "kwargs must be a dict");
    py::tuple args(taken[2] ? py::reinterpret_borrow<py::object>(taken[2]) : py::tuple());
    bool differentiable = false;
    py::object result = entrance.cache->call(taken[0], &PyTuple_GET_ITEM(args.ptr(), 0),
                                             PyTuple_GET_SIZE(args.ptr()), kwargs, differentiable);
    if (result) return result.release().ptr();
    if (differentiable && PySet_Contains(only_python, taken[0]) == 0) {
      PyObject* substitute = PyDict_GetItem(substitutes, taken[0]);
      WithoutTorchFunction guard;
      return PyObject_Call(substitute ? substitute : taken[0], args.ptr(), kwargs);
    }
    py::object named = kwargs ? py::reinterpret_borrow<py::object>(kwargs) : py::dict();
    return PyObject_CallFunctionObjArgs(entrance.slow, taken[0], args.ptr(), named.ptr(), nullptr);
  });
}

PyObject* torch_function(PyObject*, PyObject* const* given, Py_ssize_t count, PyObject* names) {
  return enter(functions, given, count, names);
}

PyObject* torch_dispatch(PyObject*, PyObject* const* given, Py_ssize_t count, PyObject* names) {
  return enter(operations, given, count, names);
}

// A method of a tensor: the cache first, then torch's own method.
struct Method {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject *original, *func;
};

PyObject* call_method(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
  auto* method = (Method*)self;
  size_t count = PyVectorcall_NARGS(flags);
  bool differentiable = false;
  PyObject* result = guarded([&]() -> PyObject* {
    if (at::impl::PythonTorchFunctionTLS::get_disabled_state() !=
        at::impl::TorchFunctionDisabledState::ENABLED) {
      return py::reinterpret_borrow<py::object>(missed).release().ptr();
    }
    py::object found = functions.cache->call_method(method->func, args, count, names, differentiable);
    return (found ? found : py::reinterpret_borrow<py::object>(missed)).release().ptr();
  });
  if (result != missed) return result;
  Py_DECREF(result);
  if (differentiable && !PyDict_GetItem(substitutes, method->func)) {
    WithoutTorchFunction guard;
    return PyObject_Vectorcall(method->original, args, flags, names);
  }
  return PyObject_Vectorcall(method->original, args, flags, names);
}

PyObject* get_method(PyObject* self, PyObject* object, PyObject*) {
  if (object && object != Py_None) return PyMethod_New(self, object);
  Py_INCREF(self);
  return self;
}

PyObject* attribute_of_method(PyObject* self, PyObject* name) {
  PyObject* found = PyObject_GetAttr(((Method*)self)->original, name);
  if (found || !PyErr_ExceptionMatches(PyExc_AttributeError)) return found;
  PyErr_Clear();
  return PyObject_GenericGetAttr(self, name);
}

PyTypeObject method_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

py::object new_method(const py::object& original, const py::object& func) {
  auto* made = PyObject_New(Method, &method_type);
  made->call = call_method;
  made->original = py::object(original).release().ptr();
  made->func = py::object(func).release().ptr();
  return py::reinterpret_steal<py::object>((PyObject*)made);
}

PyMethodDef entries[] = {
    {"torch_function", (PyCFunction)(void (*)(void))torch_function, METH_FASTCALL | METH_KEYWORDS,
     nullptr},
    {"torch_dispatch", (PyCFunction)(void (*)(void))torch_dispatch, METH_FASTCALL | METH_KEYWORDS,
     nullptr},
    {nullptr, nullptr, 0, nullptr},
};

// Attributes of a tensor class, kept in its `Wrapper`.
template <PyObject* Wrapper::*Field>
PyObject* get_object(PyObject* self, void*) {
  return guarded([&] {
    PyObject* found = checked_wrapper(self).*Field;
    return py::reinterpret_borrow<py::object>(found ? found : Py_None).release().ptr();
  });
}

template <PyObject* Wrapper::*Field>
int set_object(PyObject* self, PyObject* value, void*) {
  PyObject* done = guarded([&] {
    PyObject*& field = checked_wrapper(self).*Field;
    PyObject* before = field;
    field = !value || value == Py_None ? nullptr : py::reinterpret_borrow<py::object>(value).release().ptr();
    Py_XDECREF(before);
    return Py_None;
  });
  return done ? 0 : -1;
}

PyObject* get_shards(PyObject* self, void*) {
  return guarded([&] { return py::cast(checked_wrapper(self).shards).release().ptr(); });
}

int set_shards(PyObject* self, PyObject* value, void*) {
  PyObject* done = guarded([&] {
    checked_wrapper(self).shards = py::cast<ShardsPtr>(py::handle(value));
    return Py_None;
  });
  return done ? 0 : -1;
}

PyGetSetDef fields[] = {
    {"_spec", get_object<&Wrapper::spec>, set_object<&Wrapper::spec>, nullptr, nullptr},
    {"_reduced", get_object<&Wrapper::reduced>, set_object<&Wrapper::reduced>, nullptr, nullptr},
    {"_aliases", get_object<&Wrapper::aliases>, set_object<&Wrapper::aliases>, nullptr, nullptr},
    {"_shards", get_shards, set_shards, nullptr, nullptr},
};

// Makes the attributes of a tensor class C fields.
void install_fields(const py::object& type) {
  tensor_type = (PyTypeObject*)type.ptr();
  for (auto& field : fields) {
    type.attr(field.name) =
        py::reinterpret_steal<py::object>(PyDescr_NewGetSet(tensor_type, &field));
  }
}

}  // namespace

void bind_eager(py::module_& module) {
  method_type.tp_name = "dtorch_native.Method";
  method_type.tp_basicsize = sizeof(Method);
  method_type.tp_flags =
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR;
  method_type.tp_vectorcall_offset = offsetof(Method, call);
  method_type.tp_call = PyVectorcall_Call;
  method_type.tp_descr_get = get_method;
  method_type.tp_getattro = attribute_of_method;
  if (PyType_Ready(&method_type) < 0) throw py::error_already_set();
  PyModule_AddFunctions(module.ptr(), entries);
  missed = py::object(py::module_::import("builtins").attr("object")()).release().ptr();
  module.attr("MISSED") = py::handle(missed);

  py::class_<CallCache>(module, "CallCache", py::module_local())
      .def(py::init<bool, bool, size_t>())
      .def_readonly("hits", &CallCache::hits)
      .def("clear", &CallCache::clear)
      .def("wants", &CallCache::wants)
      .def("remember", &CallCache::remember)
      .def("call", [](CallCache& cache, const py::object& token, const py::tuple& args,
                      const py::dict& kwargs) {
        bool differentiable = false;
        py::object found = cache.call(token.ptr(), &PyTuple_GET_ITEM(args.ptr(), 0), args.size(),
                                      kwargs.ptr(), differentiable);
        return found ? found : py::reinterpret_borrow<py::object>(missed);
      });
  module.def("install_fields", &install_fields);
  module.def("install_entrances", [](py::object function_cache, py::object function,
                                     py::object operation_cache, py::object operation,
                                     py::dict in_place_of, py::set special) {
    substitutes = in_place_of.release().ptr();
    only_python = special.release().ptr();
    functions = {py::cast<CallCache*>(function_cache), function.release().ptr()};
    operations = {py::cast<CallCache*>(operation_cache), operation.release().ptr()};
    function_cache.release();
    operation_cache.release();
  });
  module.def("bypass_caches", [](int change) { num_bypasses += change; });
  module.def("method", &new_method);
  module.def("wrap", [](const py::object& spec, const py::object& shards, const py::object& type,
                        int64_t offset) {
    ShardsPtr held = shards.is_none() ? ShardsPtr() : py::cast<ShardsPtr>(shards);
    return wrap(form_of(spec), std::move(held), (PyTypeObject*)type.ptr(), offset);
  });
}

}  // namespace dtorch
