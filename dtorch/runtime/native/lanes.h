// The lanes of a worker on a device that runs behind the host: see `streams.py`.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>
#include <string>
#include <vector>

#include "places.h"

namespace dtorch {

// A point of a stream.
class Event {
 public:
  explicit Event(Place& p) : place(p) {}
  virtual ~Event() = default;

  Place& place;

  // An error of the driver marks the place, and is not raised.
  bool is_over() const;  // whether it is reached, or never will be
  void finish() const;   // waits on the host until it is over

  // What has become of values there: a failure if the place has failed before this point, or none.
  FailurePtr lost() const;

  // Has the calling thread's current stream wait, and keeps what it reads from then on. For a
  // tensor on the host, which an accelerator still fills, the thread itself waits.
  virtual void order_caller(const at::Tensor& read) const = 0;
  virtual c10::Stream stream() const = 0;  // that it is a point of

 protected:
  virtual bool done() const = 0;
  virtual void synchronize() const = 0;
};
using EventPtr = std::shared_ptr<const Event>;

struct Lanes {
  virtual ~Lanes() = default;
  virtual void enter(int lane) = 0;  // the thread launches there from now on
  virtual EventPtr record(int lane) = 0;
  virtual void wait(int lane, const EventPtr& event) = 0;
  virtual void keep(int lane, const at::Tensor& tensor) = 0;
  // What the thread does until `pop` has a name, for tools that watch the process.
  virtual void push(const std::string& name) = 0;
  virtual void pop() = 0;
};

// The lanes of a worker, made when they are first used; recorded ones while `trace_lanes` is on.
// Their errors mark the place. Once it is marked, nothing is launched there, and no event given.
std::unique_ptr<Lanes> new_lanes(const std::string& worker, Place& place);

// An event for what the calling thread has launched on the device of a tensor; none on the CPU.
EventPtr event_of_caller(const at::Tensor& tensor);

// An event for what it has launched on some accelerators of a kind; none for none. For recorded
// lanes, whose places are on the CPU, one for when the host has what comes from there.
EventPtr event_of_caller(const std::vector<c10::Device>& devices);

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
// For tests: recorded lanes and events of one place on the CPU, or of none, give errors.
void break_lanes(int index);
// For tests: what comes to the host from recorded lanes is not there yet.
void hold_arrivals(bool hold);

}  // namespace dtorch
