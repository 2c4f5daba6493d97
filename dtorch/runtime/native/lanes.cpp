#include "lanes.h"

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/profiler/stubs/base.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <unordered_set>

#include "lent.h"

namespace dtorch {

namespace {

using c10::impl::VirtualGuardImpl;

void keep_on(const VirtualGuardImpl& impl, const at::Tensor& tensor, const c10::Stream& stream) {
  if (tensor.defined() && tensor.has_storage() && tensor.device().type() == stream.device_type()) {
    impl.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
    note_user(tensor, stream);
  }
}

struct StreamEvent final : Event {
  mutable c10::Event event;
  c10::Stream recorded;

  StreamEvent(Place& place, const c10::Stream& stream)
      : Event(place), event(stream.device_type()), recorded(stream) {
    event.record(stream);
  }
  c10::Stream stream() const override { return recorded; }
  bool done() const override { return event.query(); }
  void synchronize() const override { event.synchronize(); }
  void order_caller(const at::Tensor& read) const override {
    if (read.is_cpu()) return finish();
    VirtualGuardImpl impl(event.device_type());
    c10::Stream current = impl.getStream(read.device());
    event.block(current);
    keep_on(impl, read, current);
  }
};

struct StreamLanes final : Lanes {
  Place& place;
  VirtualGuardImpl impl;
  std::vector<c10::Stream> streams;

  explicit StreamLanes(Place& p) : place(p), impl(p.device.type()) {
    // A thread that is left to the first device makes a context there too.
    impl.setDevice(place.device);
    for (int lane = 0; lane < 2; lane++) streams.push_back(impl.getNewStream(place.device));
  }
  void enter(int lane) override {
    impl.setDevice(place.device);
    impl.exchangeStream(streams[lane]);
  }
  EventPtr record(int lane) override {
    return std::make_shared<StreamEvent>(place, streams[lane]);
  }
  // So do the worker's copies from a peer, where the event is of one.
  void wait(int lane, const EventPtr& event) override {
    const auto& awaited = static_cast<const StreamEvent&>(*event);
    awaited.event.block(streams[lane]);
    c10::Device peer = awaited.recorded.device();
    if (peer == place.device) return;
    visit(peer);
    awaited.event.block(impl.getStream(peer));
  }
  void keep(int lane, const at::Tensor& tensor) override {
    keep_on(impl, tensor, streams[lane]);
  }
  // NVTX, through the table that libtorch has in every build, and libtorch_cuda fills.
  void push(const std::string& name) override {
    if (place.device.is_cuda()) torch::profiler::impl::cudaStubs()->rangePush(name.c_str());
  }
  void pop() override {
    if (place.device.is_cuda()) torch::profiler::impl::cudaStubs()->rangePop();
  }
};

std::atomic<bool> is_tracing{false};
std::atomic<int> broken{-1};
std::atomic<bool> arrivals_are_held{false};
std::mutex trace_mutex;
std::vector<std::string> trace;

void write_down(std::string line) {
  std::lock_guard<std::mutex> lock(trace_mutex);
  trace.push_back(std::move(line));
}

bool is_broken(c10::Device device) {
  return device.is_cpu() && device.has_index() && device.index() == broken;
}

void check(c10::Device device) {
  if (is_broken(device)) {
    throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 700, "a lane that is broken");
  }
}

struct TracedEvent final : Event {
  std::string name;
  bool arrives;  // of what the host is to have

  TracedEvent(Place& p, std::string n, bool a = false)
      : Event(p), name(std::move(n)), arrives(a) {}
  bool done() const override {
    check(place.device);
    return !(arrives && arrivals_are_held);
  }
  void synchronize() const override {
    while (!done()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  void order_caller(const at::Tensor&) const override {
    if (arrives) finish();
    else check(place.device);
  }
  c10::Stream stream() const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::kCPU, 0));
  }
};

struct TracedLanes final : Lanes {
  Place& place;
  std::string worker;
  int count = 0;

  TracedLanes(Place& p, std::string w) : place(p), worker(std::move(w)) {}
  void write(const std::string& what) {
    check(place.device);
    write_down(worker + " " + what);
  }
  void enter(int lane) override { write("enter " + std::to_string(lane)); }
  EventPtr record(int lane) override {
    std::string name = worker + "/" + std::to_string(lane) + "/" + std::to_string(count++);
    write("record " + name);
    return std::make_shared<TracedEvent>(place, name);
  }
  void wait(int lane, const EventPtr& event) override {
    const auto& name = static_cast<const TracedEvent&>(*event).name;
    write("wait " + std::to_string(lane) + " for " + name);
  }
  void keep(int lane, const at::Tensor&) override { write("keep " + std::to_string(lane)); }
  void push(const std::string& name) override { write("push " + name); }
  void pop() override { write("pop"); }
};

class GuardedLanes final : public Lanes {
 public:
  GuardedLanes(Place& place, std::string worker) : place_(place), worker_(std::move(worker)) {}

  void enter(int lane) override {
    attempt(place_, [&](Lanes& lanes) { lanes.enter(lane); });
  }
  EventPtr record(int lane) override {
    EventPtr event;
    attempt(place_, [&](Lanes& lanes) { event = lanes.record(lane); });
    return event;
  }
  void wait(int lane, const EventPtr& event) override {
    if (event) attempt(event->place, [&](Lanes& lanes) { lanes.wait(lane, event); });
  }
  void keep(int lane, const at::Tensor& tensor) override {
    attempt(place_, [&](Lanes& lanes) { lanes.keep(lane, tensor); });
  }
  void push(const std::string& name) override {
    attempt(place_, [&](Lanes& lanes) { lanes.push(name); });
  }
  void pop() override {
    attempt(place_, [](Lanes& lanes) { lanes.pop(); });
  }

 private:
  // Does something with the lanes; an error marks their place, or the other one.
  template <class Do>
  void attempt(Place& other, const Do& what) {
    if (place_.has_failed()) return;
    try {
      if (!lanes_ || number_ != place_.num_cleared()) {
        number_ = place_.num_cleared();
        if (is_tracing) lanes_ = std::make_unique<TracedLanes>(place_, worker_);
        else lanes_ = std::make_unique<StreamLanes>(place_);
      }
      what(*lanes_);
    } catch (...) {
      (place_.answers() ? other : place_).fail_with_current_error();
    }
  }

  Place& place_;
  std::string worker_;
  std::unique_ptr<Lanes> lanes_;
  int number_ = -1;  // of the marks that had been cleared when they were made
};

}  // namespace

bool Place::answers() const {
  if (device.is_cpu()) return !dtorch::is_broken(device);
  try {
    VirtualGuardImpl impl(device.type());
    c10::Event event(device.type());
    event.record(impl.getStream(device));
    event.query();
    return true;
  } catch (...) {
    return false;
  }
}

bool Event::is_over() const {
  try {
    return done();
  } catch (...) {
    place.fail_with_current_error();
    return true;
  }
}

void Event::finish() const {
  try {
    synchronize();
  } catch (...) {
    place.fail_with_current_error();
  }
}

FailurePtr Event::lost() const {
  FailurePtr lost = place.untrusted(place.device.str());
  if (!lost) return nullptr;
  try {
    return done() ? nullptr : lost;
  } catch (...) {  // that of the mark, or one that follows from it
    return lost;
  }
}

std::unique_ptr<Lanes> new_lanes(const std::string& worker, Place& place) {
  return std::make_unique<GuardedLanes>(place, worker);
}

EventPtr event_of_caller(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu() || tensor.is_meta()) return nullptr;
  return event_of_caller(std::vector<c10::Device>{tensor.device()});
}

EventPtr event_of_caller(const std::vector<c10::Device>& devices) {
  if (devices.empty()) return nullptr;
  if (devices[0].is_cpu()) {
    return std::make_shared<TracedEvent>(Place::of(devices[0]), "arrival", /*arrives=*/true);
  }
  VirtualGuardImpl impl(devices[0].type());
  c10::Stream last = impl.getStream(devices[0]);
  for (size_t i = 1; i < devices.size(); i++) {
    c10::Event event(last.device_type());
    event.record(impl.getStream(devices[i]));
    event.block(last);
  }
  return std::make_shared<StreamEvent>(Place::of(last.device()), last);
}

void visit(c10::Device device) {
  thread_local std::unordered_set<c10::Device> visited;
  if (device.is_cpu() || !visited.insert(device).second) return;
  VirtualGuardImpl impl(device.type());
  impl.exchangeStream(impl.getNewStream(device));
}

void trace_lanes(bool on) { is_tracing = on; }
void break_lanes(int index) { broken = index; }
void hold_arrivals(bool hold) { arrivals_are_held = hold; }

std::vector<std::string> take_lane_trace() {
  std::vector<std::string> taken;
  std::lock_guard<std::mutex> lock(trace_mutex);
  taken.swap(trace);
  return taken;
}

}  // namespace dtorch
