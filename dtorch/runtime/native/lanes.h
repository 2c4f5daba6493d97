// The lanes of a worker on a device that runs behind the host: see `streams.py`.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>
#include <string>
#include <vector>

namespace dtorch {

// A point of a stream.
struct Event {
  virtual ~Event() = default;
  virtual bool done() const = 0;
  virtual void synchronize() const = 0;  // waits on the host
  // Has the calling thread's current stream wait, and keeps what it reads from then on.
  virtual void order_caller(const at::Tensor& read) const = 0;
  virtual c10::Stream stream() const = 0;  // that it is a point of
};
using EventPtr = std::shared_ptr<const Event>;

struct Lanes {
  virtual ~Lanes() = default;
  virtual void enter(int lane) = 0;  // the thread launches there from now on
  virtual EventPtr record(int lane) = 0;
  virtual void wait(int lane, const Event& event) = 0;
  virtual void keep(int lane, const at::Tensor& tensor) = 0;
  // What the thread does until `pop` has a name, for tools that watch the process.
  virtual void push(const std::string& name) = 0;
  virtual void pop() = 0;
};

// The lanes of a worker; recorded ones while `trace_lanes` is on.
std::unique_ptr<Lanes> new_lanes(const std::string& worker, c10::Device device);

// An event for what the calling thread has launched on the device of a tensor; none on the CPU.
EventPtr event_of_caller(const at::Tensor& tensor);

// Waits on the host for what the calling thread has launched on a device.
void synchronize_caller(c10::Device device);

// Gives this thread, a worker's, a stream of its own on the device of a peer, from which it copies:
// see `visit` in streams.py.
void visit(c10::Device device);

// How one instruction uses the lanes: see `Launch` in streams.py.
struct Launch {
  int lane = -1;  // -1 where the device takes no part
  std::vector<int> waits, keeps, marks;
};

// For tests: lanes made from now on write down what is done with them, or no longer.
void trace_lanes(bool trace);
std::vector<std::string> take_lane_trace();

}  // namespace dtorch
