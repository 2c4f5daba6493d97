// Memory that a graph gives its results in and writes to again: see `lent.py`.
#pragma once

#include "shards.h"

namespace dtorch {

// Notes that what shares the memory of a tensor is on loan until the tensor is written to; then it
// is `gone`.
void lend(const at::Tensor& owner, FailurePtr gone);
// Forgets the memory of a tensor, which nobody writes to any more.
void withdraw(const at::Tensor& owner);
// The loan of the memory of a tensor, or none.
LoanPtr loan_of(const at::Tensor& tensor);
// Notes that a stream reads a tensor from now on.
void note_user(const at::Tensor& tensor, const c10::Stream& stream);
// Notes that a call was given the memory of a tensor more than once.
void note_shared(const at::Tensor& owner);
// Whether that was so since it was lent.
bool is_shared(const at::Tensor& owner);
// The streams that have used the memory of a tensor since it was lent.
std::vector<c10::Stream> take_users(const at::Tensor& owner);
// In a forked child, where a thread of the parent may have held the lock.
void lent_after_fork();

}  // namespace dtorch
