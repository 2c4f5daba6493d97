// The parts of one value, one for each device of its mesh, and those who wait for them.
//
// A worker sets a part once, with a tensor or a failure; from then on it never changes, so a
// reader that has seen `ready` needs no lock. The same class is what a group of devices show each
// other in a round of a collective.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "lanes.h"

typedef struct _object PyObject;

namespace dtorch {

struct Program;

// Where the user's line that made a call is: a code object, kept alive for ever, and an offset.
struct Site {
  PyObject* code = nullptr;
  int offset = -1;
};

// Why a value could not be computed. It becomes a Python `Failure` when it is first read there.
struct Failure {
  std::exception_ptr error;
  std::shared_ptr<const Program> program;  // none for an error outside of any instruction
  int origin = -1;
  int device = -1;
  Site site;
  FailurePtr first;   // of a device that is not trusted any more: why
  std::string where;  // such a device, or the place of an error outside of any instruction
  mutable PyObject* python = nullptr;  // guarded by the interpreter lock
  ~Failure();
};

// Memory of the caller, or of a graph: whose version is watched, and what a part is once that has
// changed.
struct Loan {
  at::Tensor owner;
  int64_t version;
  FailurePtr broken;
  bool by_graph = false;

  bool is_broken() const {
    return owner.unsafeGetTensorImpl()->version_counter().current_version() != version;
  }
};
using LoanPtr = std::shared_ptr<const Loan>;

// A tensor or a failure; the tensor may be in memory of the caller, and may still be computed on a
// stream, until an event.
struct Part {
  at::Tensor tensor;
  FailurePtr failure;
  LoanPtr loan;
  EventPtr event;
};

class Shards : public c10::intrusive_ptr_target {
 public:
  explicit Shards(size_t size);

  size_t size() const { return size_; }
  bool ready(size_t index) const;
  bool ready(const std::vector<int>& indices) const;

  // The part that is ready at a place.
  Part get(size_t index) const;

  // Stores a part and wakes those who wait for it; called once.
  void set(size_t index, Part part);

  // Calls `wake`, under a lock, once the parts are ready: now or from the thread that sets the
  // last. Returns a token for `forget`.
  using Wake = std::function<void()>;
  std::shared_ptr<void> when_ready(const std::vector<int>& indices, Wake wake);
  bool forget(const std::shared_ptr<void>& token);  // whether it had not been called

  // Spins for at most 50 us, then sleeps; false after `seconds` (forever if negative).
  bool wait(const std::vector<int>& indices, double seconds);

  // In a forked child, whose parent's workers set nothing here, what is pending has failed.
  static void after_fork(FailurePtr lost);

 private:
  struct Cell {
    std::atomic<bool> ready{false};
    at::Tensor tensor;
    FailurePtr failure;
    LoanPtr loan;
    EventPtr event;
    ~Cell();
  };
  struct Waiter {
    std::vector<int> missing;
    Wake wake;
  };
  Cell& cell(size_t i) { return i == 0 ? first_ : rest_[i - 1]; }
  const Cell& cell(size_t i) const { return i == 0 ? first_ : rest_[i - 1]; }
  bool lost() const;
  void publish(size_t index);

  size_t size_;
  unsigned generation_;
  std::atomic<bool> watched_{false};
  Cell first_;
  std::unique_ptr<Cell[]> rest_;
  std::vector<std::shared_ptr<Waiter>> waiters_;
};
using ShardsPtr = c10::intrusive_ptr<Shards>;

// Busy-waits until `done`, at most 50 us: first with pauses, then giving up the core each time.
template <class Done>
bool spin(const Done& done);

void relax(int turn);
bool spin_time_is_over(int turn, int64_t& deadline);

template <class Done>
bool spin(const Done& done) {
  int64_t deadline = 0;
  for (int turn = 0;; turn++) {
    if (done()) return true;
    if (spin_time_is_over(turn, deadline)) return false;
    relax(turn);
  }
}

}  // namespace dtorch
