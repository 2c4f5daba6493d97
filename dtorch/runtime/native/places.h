// Accelerators, and whether their driver has failed: see `faults.py`.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace dtorch {

struct Failure;
using FailurePtr = std::shared_ptr<const Failure>;

// One accelerator, which all virtual devices on it share. It is never destroyed.
class Place {
 public:
  static Place& of(c10::Device device);

  const c10::Device device;

  bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }
  FailurePtr failure() const;       // the first, or none
  void fail(FailurePtr failure);    // marks it, unless it is marked already
  void fail_with_current_error();   // in a handler
  void clear();
  int num_cleared() const { return num_cleared_.load(std::memory_order_acquire); }

  // What all results of a device there are, if it is marked, or none.
  FailurePtr untrusted(const std::string& device_name) const;

  // Whether the driver takes and answers a request without an error.
  bool answers() const;

  // Keeps memory of a marked place until the mark is cleared: where another stream has used it,
  // torch asks the driver when it is freed, and an error then ends the process.
  void keep(at::Tensor tensor);

 private:
  explicit Place(c10::Device d) : device(d) {}

  std::atomic<bool> has_failed_{false};
  std::atomic<int> num_cleared_{0};
  mutable std::mutex mutex_;
  FailurePtr failure_;
  std::vector<at::Tensor> kept_;
};

// Whether an exception is an error of an accelerator's driver.
bool is_of_driver(const std::exception_ptr& error);

}  // namespace dtorch
