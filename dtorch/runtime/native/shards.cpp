#include "shards.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <chrono>

namespace dtorch {

namespace {

constexpr int64_t kSpinNanoseconds = 50'000;
constexpr int kPauses = 400;  // about 10 us before the core is given up in between

int64_t now() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

struct Stripe {
  std::mutex mutex;
  std::condition_variable changed;
};
std::array<Stripe, 64> stripes;

Stripe& stripe_of(const void* shards) {
  return stripes[(reinterpret_cast<uintptr_t>(shards) >> 6) % stripes.size()];
}

std::atomic<unsigned> generation{0};
FailurePtr lost_in_fork;

}  // namespace

void relax(int turn) {
  if (turn < kPauses) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  } else {
    sched_yield();
  }
}

bool spin_time_is_over(int turn, int64_t& deadline) {
  if (turn % 32 != 0 && turn < kPauses) return false;
  int64_t time = now();
  if (deadline == 0) deadline = time + kSpinNanoseconds;
  return time >= deadline;
}

Shards::Shards(size_t size)
    : size_(size), generation_(generation.load(std::memory_order_relaxed)) {
  if (size > 1) rest_ = std::make_unique<Cell[]>(size - 1);
}

Shards::Cell::~Cell() {
  if (event && event->place.has_failed()) event->place.keep(std::move(tensor));
}

bool Shards::lost() const { return generation_ != generation.load(std::memory_order_relaxed); }

bool Shards::ready(size_t index) const {
  return cell(index).ready.load(std::memory_order_acquire) || lost();
}

bool Shards::ready(const std::vector<int>& indices) const {
  return std::all_of(indices.begin(), indices.end(), [&](int i) { return ready(i); });
}

Part Shards::get(size_t index) const {
  const Cell& c = cell(index);
  if (!c.ready.load(std::memory_order_acquire)) return {at::Tensor(), lost_in_fork};
  if (c.loan && c.loan->is_broken()) return {at::Tensor(), c.loan->broken};
  return {c.tensor, c.failure, c.loan, c.event};
}

void Shards::set(size_t index, Part part) {
  Cell& c = cell(index);
  c.tensor = std::move(part.tensor);
  c.failure = std::move(part.failure);
  c.loan = std::move(part.loan);
  c.event = std::move(part.event);
  publish(index);
}

void Shards::publish(size_t index) {
  // Sequentially consistent with `when_ready`: either that sees the part, or this sees `watched_`.
  cell(index).ready.store(true, std::memory_order_seq_cst);
  if (!watched_.load(std::memory_order_seq_cst)) return;
  std::lock_guard<std::mutex> lock(stripe_of(this).mutex);
  auto done = [&](const std::shared_ptr<Waiter>& waiter) {
    auto& missing = waiter->missing;
    missing.erase(std::remove(missing.begin(), missing.end(), int(index)), missing.end());
    if (missing.empty()) waiter->wake();
    return missing.empty();
  };
  waiters_.erase(std::remove_if(waiters_.begin(), waiters_.end(), done), waiters_.end());
}

std::shared_ptr<void> Shards::when_ready(const std::vector<int>& indices, Wake wake) {
  auto waiter = std::make_shared<Waiter>();
  waiter->wake = std::move(wake);
  std::lock_guard<std::mutex> lock(stripe_of(this).mutex);
  watched_.store(true, std::memory_order_seq_cst);
  for (int i : indices) {
    if (!cell(i).ready.load(std::memory_order_seq_cst) && !lost()) waiter->missing.push_back(i);
  }
  if (waiter->missing.empty()) {
    waiter->wake();
  } else {
    waiters_.push_back(waiter);
  }
  return waiter;
}

bool Shards::forget(const std::shared_ptr<void>& token) {
  std::lock_guard<std::mutex> lock(stripe_of(this).mutex);
  auto same = [&](const std::shared_ptr<Waiter>& w) { return w == token; };
  auto found = std::find_if(waiters_.begin(), waiters_.end(), same);
  if (found == waiters_.end()) return false;
  waiters_.erase(found);
  return true;
}

bool Shards::wait(const std::vector<int>& indices, double seconds) {
  auto done = [&] { return ready(indices); };
  if (done() || (seconds != 0 && spin(done))) return true;
  Stripe& stripe = stripe_of(this);
  auto token = when_ready(indices, [&] { stripe.changed.notify_all(); });
  std::unique_lock<std::mutex> lock(stripe.mutex);
  if (seconds < 0) {
    stripe.changed.wait(lock, done);
    return true;
  }
  bool found = stripe.changed.wait_for(lock, std::chrono::duration<double>(seconds), done);
  lock.unlock();
  if (!found) forget(token);
  return found;
}

void Shards::after_fork(FailurePtr lost) {
  // The mutexes may have been held by threads that the child does not have.
  for (Stripe& stripe : stripes) new (&stripe) Stripe();
  lost_in_fork = std::move(lost);
  generation++;
}

}  // namespace dtorch
