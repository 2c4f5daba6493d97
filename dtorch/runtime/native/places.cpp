#include "places.h"

#include <map>

#include "shards.h"

namespace dtorch {

Place& Place::of(c10::Device device) {
  static auto& places = *new std::map<std::pair<c10::DeviceType, int>, Place*>();
  static auto& mutex = *new std::mutex();
  std::lock_guard<std::mutex> lock(mutex);
  Place*& found = places[{device.type(), device.index()}];
  if (!found) found = new Place(device);
  return *found;
}

FailurePtr Place::failure() const {
  if (!has_failed()) return nullptr;
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

void Place::fail(FailurePtr failure) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (failure_) return;
  failure_ = std::move(failure);
  has_failed_.store(true, std::memory_order_release);
}

void Place::fail_with_current_error() {
  auto failure = std::make_shared<Failure>();
  failure->error = std::current_exception();
  failure->where = device.str();
  fail(std::move(failure));
}

void Place::clear() {
  FailurePtr failure;
  std::vector<at::Tensor> kept;  // both are freed after the lock
  std::lock_guard<std::mutex> lock(mutex_);
  failure.swap(failure_);
  kept.swap(kept_);
  num_cleared_++;
  has_failed_.store(false, std::memory_order_release);
}

FailurePtr Place::untrusted(const std::string& device_name) const {
  FailurePtr first = failure();
  if (!first) return nullptr;
  auto made = std::make_shared<Failure>();
  made->first = std::move(first);
  made->where = device_name;
  return made;
}

void Place::keep(at::Tensor tensor) {
  if (!tensor.defined()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  kept_.push_back(std::move(tensor));
}

}  // namespace dtorch
