// The native executor: programs as data, and the worker threads that run them.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

#include "shards.h"

namespace dtorch {

// An argument of an operation, as far as it is known before a call.
struct Argument {
  enum Kind { kConstant, kSlot, kScalar, kPerDevice, kList, kGenerator };
  Kind kind = kConstant;
  int index = -1;                // of the slot or the run-time scalar
  c10::IValue value;             // of a constant
  std::vector<Argument> items;   // of a list; for kPerDevice, one for each device of the mesh
  c10::TypePtr type;             // of the elements of a list; of a scalar
};

// A part of a tensor, as (dim, start, length) of each dim that is not whole.
struct Cut {
  int64_t dim, start, length;
};
struct Piece {
  int member;
  std::vector<Cut> cuts, place;
};
enum class Join { kSame, kCopy, kConcatenate, kReduce, kPlace, kTogether };
struct Round {
  std::vector<Piece> pieces;
  std::vector<int> members;  // of the pieces
  Join join;
  int64_t dim;
  std::string op;
  std::vector<int64_t> shape;
  std::optional<double> fill;
  std::string kind;  // of a collective that is launched together
};
// How one device takes part in a step: see `Meeting` in collectives.py.
struct Meeting {
  bool takes_part = false;
  int size = 0, visitors = 0, member = -1;
  int exchange = -1;  // the number of the first round's exchange
  std::vector<Round> rounds;
  at::TensorOptions options;
};

struct Instruction {
  c10::optional<c10::OperatorHandle> op;  // none for a step of a redistribution
  bool shows = false;                     // only begins the step: see `LocalShow` in lowering.py
  c10::optional<c10::OperatorHandle> into;  // the same operation, into a given tensor
  std::vector<int> overwritable;            // operands that are not read after it
  bool is_graph = false;                    // the operation is dtorch::run_graph
  std::vector<Argument> args;
  std::vector<int> places;  // for each device of the program, its index in the mesh or -1
  std::vector<int> reads, outputs, frees;
  int state_before = -1, state_after = -1;  // slots of a generator's state
  int origin = -1;
  std::vector<std::string> names;  // of its spans, by phase; none if no device has lanes
  std::vector<Meeting> meetings;   // of a step, for each device of the program
  std::vector<Launch> launches;    // for each device of the program, or none
};

// A value that passes between the caller and the slots: for each device its index in the mesh.
struct Port {
  int slot;
  int mesh_size;
  std::vector<int> places;
};

class Worker;

struct Program {
  std::vector<std::string> devices;  // their names
  int num_slots = 0, num_exchanges = 0;
  std::vector<Port> inputs, outputs;
  std::vector<Instruction> instructions;
  std::vector<Place*> places;  // of the devices that have lanes, or none
  PyObject* local = nullptr;  // the `LocalProgram`, for messages
  mutable std::vector<Worker*> workers;  // guarded by the lock of submission
  mutable unsigned pool = 0;             // the pool that they belong to
  ~Program();
};
using ProgramPtr = std::shared_ptr<const Program>;

// What the group of a collective shows each other in one round; made by whoever comes first, freed
// by whoever leaves last.
struct Exchange {
  std::atomic<Shards*> shards{nullptr};
  std::atomic<int> left{0};
  ~Exchange();
};

// One submission of a program, shared by the workers that run it.
struct Call : c10::intrusive_ptr_target {
  ProgramPtr program;  // none for a mark in the queue, which only sets its output
  c10::SmallVector<ShardsPtr, 4> inputs;
  c10::SmallVector<ShardsPtr, 2> outputs;
  c10::SmallVector<c10::IValue, 2> scalars;
  int num_threads = 1;
  Site site;
  std::atomic<int> loaded{0};  // devices that have taken their inputs
  int64_t number = 0;          // of the submission, where a timeline was being recorded
  std::unique_ptr<Exchange[]> exchanges;
};
using CallPtr = c10::intrusive_ptr<Call>;

// What a worker did while a timeline was recorded: an instruction, or a part of a step. See `Span`
// in timeline.py.
struct Span {
  enum Phase { kRun, kShow, kWait, kTake };
  ProgramPtr program;
  Site site;
  int64_t call;
  int instruction;
  Phase phase;
  int64_t begin, end;  // in nanoseconds, by `now`
};

extern std::atomic<bool> is_recording;
int64_t now();
// The time, or 0 where no timeline is recorded.
inline int64_t clock_if_recording() {
  return C10_UNLIKELY(is_recording.load(std::memory_order_relaxed)) ? now() : 0;
}
// From now on, workers record what they begin; or no longer.
void set_recording(bool recording);
// What the workers have recorded, by device, which they forget.
std::vector<std::pair<std::string, std::vector<Span>>> take_spans();

// Queues a call on the devices of its program, all calls in one order. Does not wait.
void submit(const CallPtr& call);

// A call of a program with pending outputs and the number of threads that its workers use.
CallPtr new_call(ProgramPtr program);

// Returns shards that become ready when the workers of the devices get there.
ShardsPtr mark(const std::vector<std::string>& devices);

// The devices that have workers.
std::vector<std::string> worker_devices();

// Ends the workers; what is still queued, and what comes later, becomes `stopped`.
void stop(FailurePtr stopped);

bool on_worker();

// Launches a collective for all devices of a group: see `launch` in communicators.py.
using Launcher = void (*)(const Round& round, const std::vector<at::Tensor>& inputs,
                          const std::vector<at::Tensor>& outputs,
                          const std::vector<std::optional<c10::Stream>>& streams);
void set_launcher(Launcher launcher);

// Keeps up to `limit` bytes of freed large blocks for the next allocations of threads that use it.
void install_host_cache(size_t limit);
bool use_host_cache(bool use);  // on this thread; returns whether it did before
void empty_host_cache();
void host_cache_after_fork();
void set_thread_setters(std::vector<void (*)(int)> setters);

bool after_fork_in_child();  // whether there were workers

}  // namespace dtorch
