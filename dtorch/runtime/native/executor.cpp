#include "executor.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <ATen/ScalarOps.h>
#include <c10/core/InferenceMode.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <thread>
#include <unordered_map>

#include "lent.h"

namespace dtorch {

std::atomic<bool> is_recording{false};

int64_t now() {
  auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

namespace {

// What one worker has recorded. It appends, and a client takes, under the lock.
struct Recorded {
  std::mutex mutex;
  std::vector<Span> spans;
};

thread_local bool this_is_a_worker = false;
std::vector<void (*)(int)> thread_setters;
std::atomic<bool> stopping{false};
FailurePtr stopped_failure;
Launcher launcher = nullptr;

// -- one run of a program on one device ------------------------------------------------------

// The slots and failures of a run; a worker keeps one and uses it again.
struct Frame {
  Call* call;
  const Program* program;
  int device;
  std::vector<c10::IValue> slots;
  std::vector<FailurePtr> failures;  // empty until something has failed
  std::vector<LoanPtr> loans;        // the memory of the caller that this run reads
  torch::jit::Stack stack;
  at::Generator generator;
  Place* place = nullptr;          // of a device with lanes
  FailurePtr lost;                 // what all results are, where the driver had failed before
  std::unique_ptr<Lanes> lanes;    // made when the device is first known to have some
  std::vector<EventPtr> events;    // of the slots, on a device with lanes
  std::vector<std::pair<int, EventPtr>> arriving;  // slots on the host that accelerators fill
  std::string worker;
  Recorded* recorded;

  Frame(std::string w, Recorded* r) : worker(std::move(w)), recorded(r) {}

  // Notes what began at a time of `now` and ends here.
  void note(const Instruction& instruction, Span::Phase phase, int64_t since) {
    int64_t until = now();
    std::lock_guard<std::mutex> lock(recorded->mutex);
    if (!is_recording) return;
    int index = int(&instruction - program->instructions.data());
    recorded->spans.push_back(
        {call->program, call->site, call->number, index, phase, since, until});
  }

  void begin(Call* c, int position) {
    call = c;
    program = c->program.get();
    device = position;
    slots.clear();
    slots.resize(program->num_slots);
    failures.clear();
    loans.clear();
    events.clear();
    arriving.clear();
    place = program->places.empty() ? nullptr : program->places[device];
    lost = untrusted();
    if (!place) return;
    if (!lanes) lanes = new_lanes(worker, *place);
    events.resize(program->num_slots);
  }

  void end() {
    if (place && place->has_failed()) {
      for (c10::IValue& value : slots) keep(value);
    }
    slots.clear();
    failures.clear();
    loans.clear();
    events.clear();
    arriving.clear();
    lost.reset();
  }

  bool has_lanes() const { return place != nullptr; }

  // What becomes of all that others may see, if the driver has failed.
  FailurePtr untrusted() const { return place ? place->untrusted(worker) : nullptr; }

  void keep(const c10::IValue& value) const {
    bool is_last = value.isTensor() && value.toTensor().use_count() == 1;
    if (is_last) place->keep(value.toTensor());
  }

  EventPtr event(int slot) const {
    if (has_lanes()) return events[slot];
    for (const auto& [arrives, event] : arriving) {
      if (arrives == slot) return event;
    }
    return nullptr;
  }

  // Waits on the host for what accelerators write to slots.
  void arrive(const std::vector<int>& reads) {
    for (size_t i = 0; i < arriving.size();) {
      auto [slot, event] = arriving[i];
      if (std::find(reads.begin(), reads.end(), slot) == reads.end()) {
        i++;
        continue;
      }
      event->finish();
      if (FailurePtr failed = event->lost()) store(slot, {at::Tensor(), failed});
      arriving.erase(arriving.begin() + i);
    }
  }

  // Has the lane of an instruction wait for what it reads, and launches there from now on.
  void enter(const Launch& launch) {
    for (int slot : launch.waits) {
      lanes->wait(launch.lane, events[slot]);
    }
    for (int slot : launch.keeps) {
      if (slots[slot].isTensor()) lanes->keep(launch.lane, slots[slot].toTensor());
    }
    lanes->enter(launch.lane);
  }

  void leave(const Launch& launch) {
    if (launch.marks.empty()) return;
    if (EventPtr event = lanes->record(launch.lane)) {
      for (int slot : launch.marks) events[slot] = event;
    }
  }

  void store(int slot, Part part) {
    if (part.event && has_lanes()) {
      events[slot] = std::move(part.event);
    } else if (part.event) {
      arriving.emplace_back(slot, std::move(part.event));
    }
    if (part.loan) loans.push_back(std::move(part.loan));
    if (part.failure) {
      failures.resize(program->num_slots);
      failures[slot] = std::move(part.failure);
    } else {
      slots[slot] = std::move(part.tensor);
    }
  }

  Part part(int slot) const {
    if (!failures.empty() && failures[slot]) return {at::Tensor(), failures[slot]};
    at::Tensor tensor = slots[slot].isNone() ? at::Tensor() : slots[slot].toTensor();
    return {std::move(tensor), nullptr, nullptr, event(slot)};
  }

  // What others may see of a part: the driver must not have failed, and the caller not have
  // written to what this run has read; what is in the caller's memory stays on loan.
  Part settled(Part part) const {
    if (FailurePtr failed = part.failure ? nullptr : untrusted()) return {at::Tensor(), failed};
    for (const LoanPtr& loan : loans) {
      if (part.failure) break;
      if (loan->is_broken()) return {at::Tensor(), loan->broken};
      if (part.tensor.defined() && part.tensor.has_storage() &&
          part.tensor.is_alias_of(loan->owner)) {
        part.loan = loan;
      }
    }
    return part;
  }

  // Notes which memory of graphs more than one input is in: none may be written to.
  void note_shared_loans() const {
    for (size_t i = 1; i < loans.size(); i++) {
      if (!loans[i]->by_graph) continue;
      auto same = [&](const LoanPtr& other) { return other->owner.is_same(loans[i]->owner); };
      if (std::any_of(loans.begin(), loans.begin() + i, same)) note_shared(loans[i]->owner);
    }
  }

  // After a graph has run: what it gave is lent anew, and what it was given is gone.
  void renew_loans(const std::vector<int>& results) {
    auto is_gone = [](const LoanPtr& loan) { return loan->by_graph && loan->is_broken(); };
    loans.erase(std::remove_if(loans.begin(), loans.end(), is_gone), loans.end());
    for (int slot : results) {
      if (slot < 0 || !slots[slot].isTensor()) continue;
      if (LoanPtr loan = loan_of(slots[slot].toTensor())) loans.push_back(std::move(loan));
    }
  }

  FailurePtr failed(const std::vector<int>& reads) const {
    if (lost || failures.empty()) return lost;
    for (int slot : reads) {
      if (failures[slot]) return failures[slot];
    }
    return nullptr;
  }

  void free(const std::vector<int>& unused) {
    for (int slot : unused) {
      if (C10_UNLIKELY(place && place->has_failed())) keep(slots[slot]);
      slots[slot] = c10::IValue();
      if (!failures.empty()) failures[slot].reset();
    }
  }

  // In a handler: the failure of an instruction, which has taken parts from peers. Marks the
  // accelerator that it failed on, if that was its driver's error: see `blame` in faults.py.
  FailurePtr failure(const Instruction& instruction, const std::vector<Part>& taken = {}) const {
    auto found = std::make_shared<Failure>();
    found->error = std::current_exception();
    found->program = call->program;
    found->origin = instruction.origin;
    found->device = device;
    found->site = call->site;
    std::vector<Place*> asked;
    if (place) asked.push_back(place);
    for (const Part& part : taken) {
      if (part.event) asked.push_back(&part.event->place);
    }
    auto guilty = std::remove_if(asked.begin(), asked.end(), [](Place* p) { return p->answers(); });
    for (auto it = asked.begin(); it != guilty; ++it) (*it)->fail(found);
    if (guilty == asked.begin() && place && is_of_driver(found->error)) place->fail(found);
    return found;
  }
};

// What a worker does while this lives: a span where a timeline is recorded, and on a device with
// lanes a range of the same name.
class Slice {
 public:
  Slice(Frame& frame, const Instruction& instruction, Span::Phase phase)
      : frame_(frame), instruction_(instruction), phase_(phase), since_(clock_if_recording()) {
    if (C10_UNLIKELY(since_) && frame_.has_lanes()) frame_.lanes->push(instruction_.names[phase_]);
  }
  ~Slice() {
    if (C10_LIKELY(!since_)) return;
    if (frame_.has_lanes()) frame_.lanes->pop();
    frame_.note(instruction_, phase_, since_);
  }
  Slice(const Slice&) = delete;
  Slice& operator=(const Slice&) = delete;

 private:
  Frame& frame_;
  const Instruction& instruction_;
  Span::Phase phase_;
  int64_t since_;
};

c10::IValue scalar_as(const c10::IValue& scalar, c10::TypeKind wanted) {
  if (wanted == c10::TypeKind::FloatType && scalar.isInt()) return double(scalar.toInt());
  if (wanted != c10::TypeKind::TensorType) return scalar;
  // A number where an operation takes a tensor does not decide the result's dtype.
  at::Tensor tensor = c10::scalar_to_tensor(scalar.toScalar());
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

c10::IValue value_of(const Argument& argument, Frame& frame, int place) {
  switch (argument.kind) {
    case Argument::kConstant:
      return argument.value;
    case Argument::kSlot: {
      const c10::IValue& value = frame.slots[argument.index];
      return value.isTensor() && !value.toTensor().defined() ? c10::IValue() : value;
    }
    case Argument::kScalar:
      return scalar_as(frame.call->scalars[argument.index], argument.type->kind());
    case Argument::kPerDevice:
      return value_of(argument.items[place], frame, place);
    case Argument::kList: {
      c10::impl::GenericList list(argument.type);
      list.reserve(argument.items.size());
      for (const Argument& item : argument.items) list.push_back(value_of(item, frame, place));
      return list;
    }
    case Argument::kGenerator:
      return frame.generator;
  }
  return {};
}

void take_results(Frame& frame, const Instruction& instruction) {
  size_t next = 0;
  auto take = [&](c10::IValue value) {
    int slot = instruction.outputs.at(next++);
    if (slot >= 0) frame.slots[slot] = std::move(value);
  };
  for (c10::IValue& value : frame.stack) {
    if (value.isList()) {
      for (const c10::IValue& item : value.toListRef()) take(item);
    } else {
      take(std::move(value));
    }
  }
}

// An operand that nobody else has and that the result of an elementwise operation fits into: the
// fresh tensor that the kernel would make has its shape, dtype and strides.
at::Tensor overwritten(const Frame& frame, const Instruction& instruction) {
  // A stream may still read memory that nobody on the host has any more.
  if (!instruction.into || frame.has_lanes()) return {};
  for (const Argument& argument : instruction.args) {
    bool runs = argument.kind == Argument::kScalar;
    const c10::IValue& value = runs ? frame.call->scalars[argument.index] : argument.value;
    bool is_complex = value.isComplexDouble() || (value.isTensor() && value.toTensor().is_complex());
    if (is_complex || argument.kind == Argument::kPerDevice) return {};
  }
  auto fits = [&](const at::Tensor& to) {
    for (int slot : instruction.reads) {
      const c10::IValue& value = frame.slots[slot];
      if (!value.isTensor()) return false;
      const at::Tensor& other = value.toTensor();
      if (other.scalar_type() != to.scalar_type() || other.is_conj() || other.is_neg()) return false;
      bool same = other.sizes() == to.sizes();
      if (same ? other.strides() != to.strides() : !at::is_expandable_to(other.sizes(), to.sizes())) {
        return false;
      }
    }
    return true;
  };
  for (int slot : instruction.overwritable) {
    const c10::IValue& value = frame.slots[slot];
    if (!value.isTensor()) continue;
    const at::Tensor& tensor = value.toTensor();
    bool alone = tensor.use_count() == 1 && tensor.has_storage() && tensor.storage().use_count() == 1;
    if (alone && tensor.is_floating_point() && tensor.is_non_overlapping_and_dense() &&
        tensor.dim() > 0 && fits(tensor)) {
      std::atomic_thread_fence(std::memory_order_acquire);  // those who had it have read it
      return tensor;
    }
  }
  return {};
}

// The worker's own generator, whose state each random operation sets.
at::Generator new_generator(const Frame& frame) {
  if (!frame.has_lanes()) return at::make_generator<at::CPUGeneratorImpl>();
  return at::globalContext().defaultGenerator(frame.place->device).clone();
}

void run_operation(Frame& frame, const Instruction& instruction, int place) {
  Slice running(frame, instruction, Span::kRun);
  if (C10_UNLIKELY(!frame.arriving.empty())) frame.arrive(instruction.reads);
  FailurePtr failed = frame.failed(instruction.reads);
  if (!failed) {
    try {
      frame.stack.clear();
      if (instruction.state_before >= 0) {
        if (!frame.generator.defined()) frame.generator = new_generator(frame);
        frame.generator.set_state(frame.slots[instruction.state_before].toTensor().cpu().clone());
      }
      at::Tensor into = overwritten(frame, instruction);
      for (const Argument& argument : instruction.args) {
        frame.stack.push_back(value_of(argument, frame, place));
      }
      if (into.defined()) {
        frame.stack.push_back(std::move(into));
        instruction.into->callBoxed(frame.stack);
      } else {
        instruction.op->callBoxed(frame.stack);
      }
      take_results(frame, instruction);
      if (C10_UNLIKELY(instruction.is_graph)) frame.renew_loans(instruction.outputs);
      if (instruction.state_after >= 0) {
        frame.slots[instruction.state_after] = frame.generator.get_state();
      }
    } catch (...) {
      failed = frame.failure(instruction);
    }
    frame.stack.clear();
  }
  if (failed) {
    for (int slot : instruction.outputs) {
      if (slot >= 0) frame.store(slot, {at::Tensor(), failed});
    }
    if (instruction.state_after >= 0) frame.store(instruction.state_after, {at::Tensor(), failed});
  }
}

// -- steps of a redistribution -----------------------------------------------------------------

at::Tensor cut(at::Tensor part, const std::vector<Cut>& cuts) {
  for (const Cut& c : cuts) part = part.narrow(c.dim, c.start, c.length);
  return part;
}

at::Tensor average(const std::vector<at::Tensor>& parts) {
  at::ScalarType type = parts[0].scalar_type();
  bool whole = c10::isIntegralType(type, /*includeBool=*/true);
  auto wide = whole ? at::kLong : c10::promoteTypes(type, at::kFloat);
  at::Tensor total = parts[0].to(wide, /*non_blocking=*/false, /*copy=*/true);
  for (size_t i = 1; i < parts.size(); i++) total.add_(parts[i]);
  int64_t count = int64_t(parts.size());
  return (whole ? at::floor_divide(total, count) : total.div(count)).to(type);
}

// In the order of the group, on every device alike, into a new tensor.
at::Tensor reduce(const std::vector<at::Tensor>& parts, const std::string& op) {
  if (parts.size() == 1) return parts[0].clone();
  if (op == "avg") return average(parts);
  if (op == "sum") {
    at::Tensor total = at::add(parts[0], parts[1]);
    for (size_t i = 2; i < parts.size(); i++) total.add_(parts[i]);
    return total;
  }
  at::Tensor result = parts[0];
  for (size_t i = 1; i < parts.size(); i++) {
    result = op == "max" ? at::maximum(result, parts[i]) : at::minimum(result, parts[i]);
  }
  return result;
}

// What adds nothing to a sum: negative zeros, where there are any.
at::Tensor nothing(const std::vector<int64_t>& shape, const at::TensorOptions& options) {
  auto type = c10::typeMetaToScalarType(options.dtype());
  at::Scalar zero = c10::isFloatingType(type)    ? at::Scalar(-0.0)
                    : c10::isComplexType(type) ? at::Scalar(c10::complex<double>(-0.0, -0.0))
                                                 : at::Scalar(0);
  return at::full(shape, zero, options);
}

// A part on a device; onto the host in pinned memory, which the part's own device fills later. The
// allocator of pinned memory gives it to nobody else before that.
at::Tensor brought(const at::Tensor& part, at::Device device) {
  if (!device.is_cpu() || part.is_cpu()) return part.to(device);
  at::Tensor staged = at::empty_like(part, part.options().device(device).pinned_memory(true));
  bool alike = part.strides() == staged.strides();
  return staged.copy_(alike ? part : part.clone(), /*non_blocking=*/true);
}

// What comes from an accelerator to the host arrives once the streams of this thread are done.
at::Tensor join(const Round& round, const Meeting& meeting, const std::vector<Part>& parts) {
  at::Device device = meeting.options.device();
  bool at_once = round.join == Join::kConcatenate || round.join == Join::kReduce;
  std::vector<at::Tensor> taken;
  for (size_t i = 0; i < round.pieces.size(); i++) {
    at::Tensor piece = cut(parts[i].tensor, round.pieces[i].cuts);
    taken.push_back(at_once ? piece.to(device) : piece);
  }
  switch (round.join) {
    case Join::kSame:
      return brought(taken[0], device);
    case Join::kCopy: {
      at::Tensor moved = brought(taken[0], device);
      return moved.is_same(taken[0]) ? moved.clone() : moved;
    }
    case Join::kConcatenate:
      return at::cat(taken, round.dim);
    case Join::kReduce:
      return reduce(taken, round.op);
    case Join::kPlace:
    case Join::kTogether:  // is not joined by one device
      break;
  }
  auto is_elsewhere = [](const at::Tensor& part) { return !part.is_cpu(); };
  bool arrives = meeting.options.device().is_cpu() &&
                 std::any_of(taken.begin(), taken.end(), is_elsewhere);
  at::TensorOptions options = arrives ? meeting.options.pinned_memory(true) : meeting.options;
  at::Tensor result = round.fill ? at::full(round.shape, *round.fill, options)
                                 : nothing(round.shape, options);
  for (size_t i = 0; i < taken.size(); i++) {
    at::Tensor target = cut(result, round.pieces[i].place);
    // Into other memory torch copies by way of a buffer that is not pinned.
    target.copy_(taken[i], /*non_blocking=*/arrives && target.is_contiguous());
  }
  return result;
}

constexpr int kCompute = 0, kCommunication = 1;  // as `Lane` in streams.py

Shards& arrive(Exchange& exchange, int size) {
  Shards* found = exchange.shards.load(std::memory_order_acquire);
  if (!found) {
    auto made = std::make_unique<Shards>(size);
    if (exchange.shards.compare_exchange_strong(found, made.get())) found = made.release();
  }
  return *found;
}

void leave(Exchange& exchange, const Meeting& meeting) {
  if (exchange.left.fetch_add(1, std::memory_order_acq_rel) + 1 == meeting.visitors) {
    delete exchange.shards.exchange(nullptr);
  }
}

// Waits for parts of an exchange; whether they came before the workers were stopped.
bool await(Shards& shown, const std::vector<int>& indices) {
  while (!shown.wait(indices, 0.2)) {
    if (stopping) return false;
  }
  return true;
}

// Begins a step: shows a part to the group, for its first round.
void run_show(Frame& frame, const Instruction& instruction) {
  const Meeting& meeting = instruction.meetings[frame.device];
  if (meeting.member < 0) return;
  Slice showing(frame, instruction, Span::kShow);
  Part part;
  try {
    part = frame.part(instruction.reads[0]);
    if (part.tensor.defined()) part.tensor = part.tensor.resolve_conj().resolve_neg();
    if (loan_of(part.tensor)) {  // a peer may be late, and the graph ahead of it
      part.tensor = part.tensor.clone();
      if (frame.has_lanes()) part.event = frame.lanes->record(kCompute);
    }
  } catch (...) {
    part = {at::Tensor(), frame.failure(instruction)};
  }
  Exchange& exchange = frame.call->exchanges[meeting.exchange];
  arrive(exchange, meeting.size).set(meeting.member, frame.settled(std::move(part)));
  if (meeting.rounds.empty()) leave(exchange, meeting);
}

// What has become of parts that peers have shown, if the driver of one has failed since, or none.
FailurePtr lost_of(const std::vector<Part>& taken) {
  for (const Part& part : taken) {
    if (FailurePtr lost = part.event ? part.event->lost() : nullptr) return lost;
  }
  return nullptr;
}

// An event for when the host has what accelerators copy to it; none where none does.
EventPtr arrival(const std::vector<Part>& taken) {
  std::vector<c10::Device> places;
  for (const Part& part : taken) {
    if (!part.event) continue;
    c10::Device device = part.event->place.device;
    bool has_arrived = part.tensor.is_cpu() && !device.is_cpu();  // the host has waited for it
    bool is_new = std::find(places.begin(), places.end(), device) == places.end();
    if (!has_arrived && is_new) places.push_back(device);
  }
  return event_of_caller(places);
}

// Has the lane of communication wait for what peers have shown, and keep their memory. A device
// without lanes reads it by streams of its own thread.
void order_after(Lanes* lanes, const std::vector<Part>& taken) {
  std::vector<const Event*> waited;
  for (const Part& part : taken) {
    if (!part.event || !part.tensor.defined()) continue;
    if (!lanes) {
      visit(part.tensor.device());
      part.event->order_caller(part.tensor);
      continue;
    }
    if (std::find(waited.begin(), waited.end(), part.event.get()) == waited.end()) {
      lanes->wait(kCommunication, part.event);
      waited.push_back(part.event.get());
    }
    lanes->keep(kCommunication, part.tensor);
  }
}

// Waits for what a round takes from the group.
std::vector<Part> meet(Frame& frame, const Instruction& instruction, int number, const Part& part) {
  const Meeting& meeting = instruction.meetings[frame.device];
  const auto& members = meeting.rounds[number].members;
  if (meeting.visitors == 0) return std::vector<Part>(members.size(), part);
  Slice waiting(frame, instruction, Span::kWait);
  Exchange& exchange = frame.call->exchanges[meeting.exchange + number];
  Shards& shown = arrive(exchange, meeting.size);
  if (number > 0) {
    Part next = part;
    if (frame.has_lanes() && !next.failure) next.event = frame.lanes->record(kCommunication);
    shown.set(meeting.member, frame.settled(std::move(next)));
  }
  if (!await(shown, members)) return {Part{at::Tensor(), stopped_failure}};
  std::vector<Part> taken;
  for (int member : members) taken.push_back(shown.get(member));
  leave(exchange, meeting);
  return taken;
}

// What a device makes of the pieces that it takes in a round.
Part take(Frame& frame, const Instruction& instruction, int number, const Part& part) {
  const Meeting& meeting = instruction.meetings[frame.device];
  std::vector<Part> taken = meet(frame, instruction, number, part);
  Part made;
  for (const Part& p : taken) {
    if (p.failure && !made.failure) made.failure = p.failure;
    if (p.loan) frame.loans.push_back(p.loan);
  }
  if (!made.failure) made.failure = frame.lost ? frame.lost : lost_of(taken);
  if (made.failure) return made;
  Slice taking(frame, instruction, Span::kTake);
  try {
    order_after(frame.has_lanes() ? frame.lanes.get() : nullptr, taken);
    made.failure = lost_of(taken);
    if (!made.failure) made.tensor = join(meeting.rounds[number], meeting, taken);
    if (!made.failure && !frame.has_lanes()) made.event = arrival(taken);
  } catch (...) {
    made = {at::Tensor(), frame.failure(instruction, taken)};
  }
  return frame.settled(std::move(made));
}

constexpr const char* kAllGather = "all_gather";
constexpr const char* kReduceScatter = "reduce_scatter";

// Launches a collective once all members have shown what they give: first that of each, then what
// each receives, with a point of its lane. Returns what is wrong.
FailurePtr launch(const Round& round, Shards& shown, int size) {
  std::vector<int> given(2 * size);
  std::iota(given.begin(), given.end(), 0);
  if (!await(shown, given)) return stopped_failure;
  std::vector<at::Tensor> inputs, outputs;
  std::vector<std::optional<c10::Stream>> streams;
  for (int member = 0; member < size; member++) {
    Part input = shown.get(member), output = shown.get(size + member);
    if (input.failure) return input.failure;
    inputs.push_back(input.tensor);
    outputs.push_back(output.tensor);
    streams.push_back(output.event ? std::optional(output.event->stream()) : std::nullopt);
  }
  launcher(round, inputs, outputs, streams);
  return nullptr;
}

// Shows what a device gives to a collective and where it receives; then waits until the first
// member has launched it for all. Returns what is wrong, and what is received.
Part launched(Frame& frame, const Instruction& instruction, int number, Part part, Shards& shown) {
  const Meeting& meeting = instruction.meetings[frame.device];
  const Round& round = meeting.rounds[number];
  Slice waiting(frame, instruction, Span::kWait);
  int size = meeting.size, outcome = 2 * size;
  Part filled, end;
  if (!part.failure) {
    try {
      if (round.kind == kReduceScatter) {
        int64_t length = part.tensor.size(round.dim) / size;
        part.tensor = part.tensor.unflatten(round.dim, {size, length}).movedim(round.dim, 0);
      }
      filled.tensor = at::empty(round.shape, meeting.options);
      part.tensor = part.tensor.contiguous();
      if (frame.has_lanes()) filled.event = frame.lanes->record(kCommunication);
    } catch (...) {
      part.failure = frame.failure(instruction);
    }
  }
  at::Tensor received = filled.tensor;
  part.event = nullptr;
  shown.set(meeting.member, frame.settled(std::move(part)));
  shown.set(size + meeting.member, std::move(filled));
  if (meeting.member == 0) {
    try {
      end.failure = launch(round, shown, size);
    } catch (...) {
      end.failure = frame.failure(instruction);
    }
    shown.set(outcome, std::move(end));
  }
  if (!await(shown, {outcome})) return {at::Tensor(), stopped_failure};
  return {received, shown.get(outcome).failure};
}

// What a device makes of a collective that the first member launches for all: see steps.py, also
// for who owns what meanwhile.
Part receive(Frame& frame, const Instruction& instruction, int number, Part part) {
  const Meeting& meeting = instruction.meetings[frame.device];
  const Round& round = meeting.rounds[number];
  Exchange& exchange = frame.call->exchanges[meeting.exchange + number];
  Shards& shown = arrive(exchange, 2 * meeting.size + 1);
  Part made = launched(frame, instruction, number, std::move(part), shown);
  if (!shown.ready(size_t(2 * meeting.size))) return made;  // the workers are stopped
  Slice taking(frame, instruction, Span::kTake);
  if (!made.failure) {
    for (int member = 0; member < meeting.size; member++) {
      LoanPtr loan = shown.get(member).loan;
      if (loan) frame.loans.push_back(std::move(loan));
    }
    try {
      if (round.kind == kAllGather) {
        made.tensor = made.tensor.movedim(0, round.dim).flatten(round.dim, round.dim + 1);
      }
    } catch (...) {
      made.failure = frame.failure(instruction);
    }
  }
  leave(exchange, meeting);
  return frame.settled(std::move(made));
}

void run_step(Frame& frame, const Instruction& instruction) {
  const Meeting& meeting = instruction.meetings[frame.device];
  if (meeting.rounds.empty()) return;
  Part part;
  if (meeting.visitors == 0) {
    if (C10_UNLIKELY(!frame.arriving.empty())) frame.arrive(instruction.reads);
    part = frame.part(instruction.reads[0]);
    part.event = nullptr;  // the plan has the lane wait for it
    if (frame.lost) part.failure = frame.lost;
  }
  for (size_t number = 0; number < meeting.rounds.size(); number++) {
    bool together = meeting.rounds[number].join == Join::kTogether;
    part = together ? receive(frame, instruction, int(number), std::move(part))
                    : take(frame, instruction, int(number), part);
  }
  if (frame.has_lanes()) part.event = nullptr;  // it is recorded when the instruction ends
  frame.store(instruction.outputs[0], std::move(part));
}

void run(Call& call, int device, Frame& frame) {
  frame.begin(&call, device);
  const Program& program = *call.program;
  for (size_t i = 0; i < program.inputs.size(); i++) {
    const Port& port = program.inputs[i];
    if (port.places[device] >= 0) {
      frame.store(port.slot, call.inputs[i]->get(port.places[device]));
    }
  }
  frame.note_shared_loans();
  // From here on the slots alone keep the inputs, so that they are freed at their last use.
  if (call.loaded.fetch_add(1, std::memory_order_acq_rel) + 1 == int(program.devices.size())) {
    call.inputs.clear();
  }
  for (const Instruction& instruction : program.instructions) {
    const Launch* launch = frame.has_lanes() ? &instruction.launches[device] : nullptr;
    if (instruction.op) {
      int place = instruction.places[device];
      if (place < 0) continue;
      if (launch) frame.enter(*launch);
      run_operation(frame, instruction, place);
    } else {
      if (!instruction.meetings[device].takes_part) continue;
      if (launch) frame.enter(*launch);
      if (instruction.shows) {
        run_show(frame, instruction);
      } else {
        run_step(frame, instruction);
      }
    }
    if (launch) frame.leave(*launch);
    frame.free(instruction.frees);
  }
  for (size_t i = 0; i < program.outputs.size(); i++) {
    const Port& port = program.outputs[i];
    if (port.places[device] < 0) continue;
    call.outputs[i]->set(port.places[device], frame.settled(frame.part(port.slot)));
  }
  frame.end();
}

// Sets the output of a mark in the queue, which is done when all is that was launched before it.
void reach(Call& mark, int position, Frame& frame) {
  Part part;
  if (frame.lanes) {
    frame.lanes->wait(kCommunication, frame.lanes->record(kCompute));
    part.event = frame.lanes->record(kCommunication);
  }
  mark.outputs[0]->set(position, std::move(part));
}

void abandon(Call& call, int device) {
  for (size_t i = 0; i < call.program->outputs.size(); i++) {
    int place = call.program->outputs[i].places[device];
    if (place >= 0) call.outputs[i]->set(place, {at::Tensor(), stopped_failure});
  }
}

}  // namespace

Exchange::~Exchange() { delete shards.load(); }

// -- workers -------------------------------------------------------------------------------

class Worker {
 public:
  explicit Worker(const std::string& device) : thread_([this, device] { work(device); }) {}

  // Queues a call, in which this worker's device has a place. Returns whether it has to be woken.
  bool push(CallPtr call, int position) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back({std::move(call), position});
    length_.store(queue_.size(), std::memory_order_release);
    return sleeping_;
  }

  // Wakes the worker if it sleeps, which then wakes `others`; returns whether it did sleep.
  bool wake(std::vector<Worker*> others) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!sleeping_) return false;
      sleeping_ = false;
      to_wake_ = std::move(others);
    }
    woken_.notify_one();
    return true;
  }

  void end() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
      sleeping_ = false;
    }
    woken_.notify_one();
    thread_.join();
  }

  std::vector<Span> take_spans() {
    std::vector<Span> taken;
    std::lock_guard<std::mutex> lock(recorded_.mutex);
    taken.swap(recorded_.spans);
    return taken;
  }

 private:
  struct Item {
    CallPtr call;
    int position;
  };

  void work(const std::string& device);
  bool next(std::vector<Item>& batch);
  void set_num_threads(int count);

  Recorded recorded_;
  std::mutex mutex_;
  std::condition_variable woken_;
  std::vector<Item> queue_;
  std::atomic<size_t> length_{0};
  std::vector<Worker*> to_wake_;
  bool sleeping_ = false, ended_ = false;
  int num_threads_ = 0;
  std::thread thread_;
};

// Wakes workers that sleep. The caller wakes a few, each of which wakes some of the others.
static void wake_all(std::vector<Worker*> asleep) {
  while (!asleep.empty()) {
    Worker* first = asleep.back();
    asleep.pop_back();
    size_t half = asleep.size() > 1 ? asleep.size() / 2 : 0;
    std::vector<Worker*> others(asleep.end() - half, asleep.end());
    if (first->wake(others)) asleep.resize(asleep.size() - half);
  }
}

bool Worker::next(std::vector<Item>& batch) {
  spin([&] { return length_.load(std::memory_order_acquire) > 0; });
  std::unique_lock<std::mutex> lock(mutex_);
  while (queue_.empty() && !ended_) {
    sleeping_ = true;
    woken_.wait(lock, [&] { return !sleeping_; });
    if (!to_wake_.empty()) {
      std::vector<Worker*> others = std::move(to_wake_);
      to_wake_.clear();
      lock.unlock();
      wake_all(std::move(others));
      lock.lock();
    }
  }
  batch.swap(queue_);
  length_.store(0, std::memory_order_release);
  return !batch.empty();
}

void Worker::work(const std::string& device) {
  this_is_a_worker = true;
  pthread_setname_np(pthread_self(), ("dtorch-" + device).substr(0, 15).c_str());
  use_host_cache(true);
  c10::InferenceMode inference(true);
  Frame frame(device, &recorded_);
  std::vector<Item> batch;
  while (next(batch)) {
    for (Item& item : batch) {
      if (!item.call->program) {
        reach(*item.call, item.position, frame);
      } else if (stopping) {
        abandon(*item.call, item.position);
      } else {
        set_num_threads(item.call->num_threads);
        run(*item.call, item.position, frame);
      }
      item.call.reset();
    }
    batch.clear();
  }
}

// Of this thread alone: torch's own call would also change what other threads start with.
void Worker::set_num_threads(int count) {
  if (count == num_threads_) return;
  at::get_num_threads();  // makes ATen initialise this thread first
  for (auto setter : thread_setters) setter(count);
  num_threads_ = count;
}

namespace {

struct Pool {
  std::unordered_map<std::string, std::unique_ptr<Worker>> workers;
  unsigned number = 1;

  Worker* worker(const std::string& device) {
    auto& found = workers[device];
    if (!found) {
      found = std::make_unique<Worker>(device);
    }
    return found.get();
  }
};
// Never destroyed: the workers of a process that exits are ended by `stop`. Python submits and
// forks with the interpreter lock held, so no fork finds the lock of submission taken.
Pool* pool = new Pool();
std::mutex* submission = new std::mutex();

}  // namespace

CallPtr new_call(ProgramPtr program) {
  auto call = c10::make_intrusive<Call>();
  int count = std::max<int>(1, int(program->devices.size()));
  call->num_threads = std::max(1, at::get_num_threads() / count);
  for (const Port& port : program->outputs) {
    call->outputs.push_back(c10::make_intrusive<Shards>(port.mesh_size));
  }
  if (program->num_exchanges > 0) {
    call->exchanges = std::make_unique<Exchange[]>(program->num_exchanges);
  }
  call->program = std::move(program);
  return call;
}

void submit(const CallPtr& call) {
  static int64_t count = 0;
  std::vector<Worker*> asleep;
  const Program& program = *call->program;
  {
    std::lock_guard<std::mutex> lock(*submission);
    if (stopping) {
      for (size_t i = 0; i < program.devices.size(); i++) abandon(*call, int(i));
      return;
    }
    if (program.pool != pool->number) {
      program.workers.clear();
      for (const auto& device : program.devices) program.workers.push_back(pool->worker(device));
      program.pool = pool->number;
    }
    if (C10_UNLIKELY(is_recording.load(std::memory_order_relaxed))) call->number = ++count;
    int position = 0;
    for (Worker* worker : program.workers) {
      if (worker->push(call, position++)) asleep.push_back(worker);
    }
  }
  wake_all(std::move(asleep));
}

ShardsPtr mark(const std::vector<std::string>& devices) {
  auto call = c10::make_intrusive<Call>();
  std::vector<Worker*> chosen, asleep;
  std::lock_guard<std::mutex> lock(*submission);
  for (const auto& device : devices) chosen.push_back(pool->worker(device));
  call->outputs.push_back(c10::make_intrusive<Shards>(chosen.size()));
  int position = 0;
  for (Worker* worker : chosen) {
    if (worker->push(call, position++)) asleep.push_back(worker);
  }
  wake_all(std::move(asleep));
  return call->outputs[0];
}

std::vector<std::string> worker_devices() {
  std::lock_guard<std::mutex> lock(*submission);
  std::vector<std::string> found;
  for (auto& entry : pool->workers) found.push_back(entry.first);
  return found;
}

void stop(FailurePtr failure) {
  std::unordered_map<std::string, std::unique_ptr<Worker>> ending;
  {
    std::lock_guard<std::mutex> lock(*submission);
    if (!stopping) stopped_failure = std::move(failure);
    stopping = true;
    ending.swap(pool->workers);
    pool->number++;
  }
  for (auto& entry : ending) entry.second->end();
  // Another thread that has submitted may be about to wake them.
  for (auto& entry : ending) entry.second.release();
}

void set_recording(bool recording) { is_recording = recording; }

std::vector<std::pair<std::string, std::vector<Span>>> take_spans() {
  std::vector<std::pair<std::string, std::vector<Span>>> taken;
  std::lock_guard<std::mutex> lock(*submission);
  for (auto& entry : pool->workers) taken.emplace_back(entry.first, entry.second->take_spans());
  return taken;
}

bool on_worker() { return this_is_a_worker; }
void set_launcher(Launcher found) { launcher = found; }
void set_thread_setters(std::vector<void (*)(int)> setters) { thread_setters = std::move(setters); }

bool after_fork_in_child() {
  // The parent's workers do not exist here; their objects are left alone.
  bool used = !pool->workers.empty();
  unsigned number = pool->number + 1;
  is_recording = false;
  pool = new Pool();
  pool->number = number;
  submission = new std::mutex();
  return used;
}

}  // namespace dtorch
