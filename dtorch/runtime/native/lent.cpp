#include "lent.h"

#include <algorithm>
#include <unordered_map>

namespace dtorch {

namespace {

struct Entry {
  LoanPtr loan;
  std::vector<c10::Stream> users;
  bool is_shared = false;
};

// Never destroyed, as the workers.
std::mutex* mutex = new std::mutex();
auto* entries = new std::unordered_map<const c10::StorageImpl*, Entry>();
std::atomic<size_t> count{0};  // so that who lends nothing takes no lock

const c10::StorageImpl* key_of(const at::Tensor& tensor) {
  bool none = count.load(std::memory_order_acquire) == 0 || !tensor.defined();
  return none || !tensor.has_storage() ? nullptr : tensor.storage().unsafeGetStorageImpl();
}

}  // namespace

void lend(const at::Tensor& owner, FailurePtr gone) {
  int64_t version = owner.unsafeGetTensorImpl()->version_counter().current_version();
  auto loan = std::make_shared<Loan>(Loan{owner, version, std::move(gone), /*by_graph=*/true});
  std::lock_guard<std::mutex> lock(*mutex);
  (*entries)[owner.storage().unsafeGetStorageImpl()] = {std::move(loan), {}};
  count = entries->size();
}

void withdraw(const at::Tensor& owner) {
  std::lock_guard<std::mutex> lock(*mutex);
  entries->erase(owner.storage().unsafeGetStorageImpl());
  count = entries->size();
}

LoanPtr loan_of(const at::Tensor& tensor) {
  const auto* key = key_of(tensor);
  if (!key) return nullptr;
  std::lock_guard<std::mutex> lock(*mutex);
  auto found = entries->find(key);
  return found == entries->end() ? nullptr : found->second.loan;
}

void note_user(const at::Tensor& tensor, const c10::Stream& stream) {
  const auto* key = key_of(tensor);
  if (!key) return;
  std::lock_guard<std::mutex> lock(*mutex);
  auto found = entries->find(key);
  if (found == entries->end()) return;
  auto& users = found->second.users;
  if (std::find(users.begin(), users.end(), stream) == users.end()) users.push_back(stream);
}

void note_shared(const at::Tensor& owner) {
  std::lock_guard<std::mutex> lock(*mutex);
  auto found = entries->find(owner.storage().unsafeGetStorageImpl());
  if (found != entries->end()) found->second.is_shared = true;
}

bool is_shared(const at::Tensor& owner) {
  std::lock_guard<std::mutex> lock(*mutex);
  auto found = entries->find(owner.storage().unsafeGetStorageImpl());
  return found != entries->end() && found->second.is_shared;
}

std::vector<c10::Stream> take_users(const at::Tensor& owner) {
  std::vector<c10::Stream> taken;
  const auto* key = key_of(owner);
  if (!key) return taken;
  std::lock_guard<std::mutex> lock(*mutex);
  auto found = entries->find(key);
  if (found != entries->end()) taken.swap(found->second.users);
  return taken;
}

void lent_after_fork() {
  mutex = new std::mutex();
  entries = new std::unordered_map<const c10::StorageImpl*, Entry>();
  count = 0;
}

}  // namespace dtorch
