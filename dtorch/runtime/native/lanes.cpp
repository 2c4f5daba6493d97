#include "lanes.h"

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/profiler/stubs/base.h>

#include <atomic>
#include <mutex>
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

struct StreamEvent : Event {
  mutable c10::Event event;
  c10::Stream recorded;

  explicit StreamEvent(const c10::Stream& stream) : event(stream.device_type()), recorded(stream) {
    event.record(stream);
  }
  c10::Stream stream() const override { return recorded; }
  bool done() const override { return event.query(); }
  void synchronize() const override { event.synchronize(); }
  void order_caller(const at::Tensor& read) const override {
    VirtualGuardImpl impl(event.device_type());
    c10::Stream current = impl.getStream(read.device());
    event.block(current);
    keep_on(impl, read, current);
  }
};

struct StreamLanes : Lanes {
  VirtualGuardImpl impl;
  c10::Device device;
  std::vector<c10::Stream> streams;

  explicit StreamLanes(c10::Device d) : impl(d.type()), device(d) {
    // A thread that is left to the first device makes a context there too.
    impl.setDevice(device);
    for (int lane = 0; lane < 2; lane++) streams.push_back(impl.getNewStream(device));
  }
  void enter(int lane) override {
    impl.setDevice(device);
    impl.exchangeStream(streams[lane]);
  }
  EventPtr record(int lane) override { return std::make_shared<StreamEvent>(streams[lane]); }
  // So do the worker's copies from a peer, where the event is of one.
  void wait(int lane, const Event& event) override {
    const auto& awaited = static_cast<const StreamEvent&>(event);
    awaited.event.block(streams[lane]);
    c10::Device peer = awaited.recorded.device();
    if (peer == device) return;
    visit(peer);
    awaited.event.block(impl.getStream(peer));
  }
  void keep(int lane, const at::Tensor& tensor) override {
    keep_on(impl, tensor, streams[lane]);
  }
  // NVTX, through the table that libtorch has in every build, and libtorch_cuda fills.
  void push(const std::string& name) override {
    if (device.is_cuda()) torch::profiler::impl::cudaStubs()->rangePush(name.c_str());
  }
  void pop() override {
    if (device.is_cuda()) torch::profiler::impl::cudaStubs()->rangePop();
  }
};

std::atomic<bool> is_tracing{false};
std::mutex trace_mutex;
std::vector<std::string> trace;

void write_down(std::string line) {
  std::lock_guard<std::mutex> lock(trace_mutex);
  trace.push_back(std::move(line));
}

struct TracedEvent : Event {
  std::string name;

  explicit TracedEvent(std::string n) : name(std::move(n)) {}
  bool done() const override { return true; }
  void synchronize() const override {}
  void order_caller(const at::Tensor&) const override {}
  c10::Stream stream() const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::kCPU, 0));
  }
};

struct TracedLanes : Lanes {
  std::string worker;
  int count = 0;

  explicit TracedLanes(std::string w) : worker(std::move(w)) {}
  void enter(int lane) override { write_down(worker + " enter " + std::to_string(lane)); }
  EventPtr record(int lane) override {
    std::string name = worker + "/" + std::to_string(lane) + "/" + std::to_string(count++);
    write_down(worker + " record " + name);
    return std::make_shared<TracedEvent>(name);
  }
  void wait(int lane, const Event& event) override {
    const auto& name = static_cast<const TracedEvent&>(event).name;
    write_down(worker + " wait " + std::to_string(lane) + " for " + name);
  }
  void keep(int lane, const at::Tensor&) override {
    write_down(worker + " keep " + std::to_string(lane));
  }
  void push(const std::string& name) override { write_down(worker + " push " + name); }
  void pop() override { write_down(worker + " pop"); }
};

}  // namespace

std::unique_ptr<Lanes> new_lanes(const std::string& worker, c10::Device device) {
  if (is_tracing) return std::make_unique<TracedLanes>(worker);
  return std::make_unique<StreamLanes>(device);
}

EventPtr event_of_caller(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu() || tensor.is_meta()) return nullptr;
  VirtualGuardImpl impl(tensor.device().type());
  return std::make_shared<StreamEvent>(impl.getStream(tensor.device()));
}

void synchronize_caller(c10::Device device) {
  VirtualGuardImpl impl(device.type());
  impl.synchronizeStream(impl.getStream(device));
}

void visit(c10::Device device) {
  thread_local std::unordered_set<c10::Device> visited;
  if (device.is_cpu() || !visited.insert(device).second) return;
  VirtualGuardImpl impl(device.type());
  impl.exchangeStream(impl.getNewStream(device));
}

void trace_lanes(bool on) { is_tracing = on; }

std::vector<std::string> take_lane_trace() {
  std::vector<std::string> taken;
  std::lock_guard<std::mutex> lock(trace_mutex);
  taken.swap(trace);
  return taken;
}

}  // namespace dtorch
