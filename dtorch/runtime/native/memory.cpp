// A cache of host memory: what workers free, they use again.
//
// The pages of a fresh block cost about four times the copy that fills it, so large blocks that
// workers allocate, and fetches on the client, are kept when they are freed. All other memory is
// torch's own.

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <list>
#include <map>
#include <mutex>
#include <unordered_map>

#include "executor.h"

namespace dtorch {

namespace {

thread_local bool this_thread_uses_it = false;
constexpr size_t kSmallest = 256 << 10;  // below, the C library reuses memory itself

class HostCache final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    auto* torchs = c10::GetDefaultCPUAllocator();
    bool ours = this_thread_uses_it && num_bytes >= kSmallest && limit > 0;
    if (!ours) return torchs->allocate(num_bytes);
    size_t size = rounded(num_bytes);
    void* block = take(size);
    if (!block) block = fresh(size);
    c10::profiledCPUMemoryReporter().New(block, num_bytes);
    return {block, block, &release, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }

  // Gives back what has been free for longest, until at most `room` bytes are kept.
  void shrink(size_t room) {
    std::lock_guard<std::mutex> lock(mutex_);
    shrink_locked(room);
  }


  std::atomic<size_t> limit{size_t(1) << 30};

 private:
  // To an eighth of the power of two below, so that nearly equal sizes share blocks.
  static size_t rounded(size_t size) {
    size_t step = std::max<size_t>(4096, (size_t(1) << (63 - __builtin_clzll(size))) / 8);
    return (size + step - 1) / step * step;
  }

  void* take(size_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = free_.upper_bound(size);  // the last of that size, whose lines may still be cached
    if (found == free_.begin() || (--found)->first != size) return nullptr;
    void* block = found->second->second;
    oldest_.erase(found->second);
    free_.erase(found);
    num_kept_ -= size;
    return block;
  }

  void shrink_locked(size_t room) {
    while (num_kept_ > room) {
      auto [size, block] = oldest_.front();
      auto [begin, end] = free_.equal_range(size);
      free_.erase(std::find_if(begin, end, [&](auto& e) { return e.second == oldest_.begin(); }));
      oldest_.pop_front();
      num_kept_ -= size;
      sizes_.erase(block);
      c10::free_cpu(block);
    }
  }

  void* fresh(size_t size) {
    void* block;
    try {
      block = c10::alloc_cpu(size);
    } catch (const c10::Error&) {
      shrink(0);
      block = c10::alloc_cpu(size);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    sizes_[block] = size;
    return block;
  }

  static void release(void* block);

  std::mutex mutex_;
  std::list<std::pair<size_t, void*>> oldest_;  // the free blocks, in the order of their release
  std::multimap<size_t, std::list<std::pair<size_t, void*>>::iterator> free_;
  std::unordered_map<void*, size_t> sizes_;  // of the blocks made here
  size_t num_kept_ = 0;
};

// Never destroyed: tensors outlive everything.
HostCache* cache = new HostCache();

void HostCache::release(void* block) {
  {
    std::lock_guard<std::mutex> lock(cache->mutex_);
    auto found = cache->sizes_.find(block);
    if (found != cache->sizes_.end()) {
      size_t size = found->second;
      c10::profiledCPUMemoryReporter().Delete(block);
      cache->num_kept_ += size;
      cache->oldest_.emplace_back(size, block);
      cache->free_.emplace(size, std::prev(cache->oldest_.end()));
      cache->shrink_locked(cache->limit);
      return;
    }
  }
  c10::GetDefaultCPUAllocator()->raw_deallocate(block);
}

}  // namespace

void install_host_cache(size_t limit) {
  cache->limit = limit;
  c10::SetCPUAllocator(cache, /*priority=*/1);
}

bool use_host_cache(bool use) { return std::exchange(this_thread_uses_it, use); }
void empty_host_cache() { cache->shrink(0); }

void host_cache_after_fork() {
  // A worker of the parent may have been in the middle of changing it.
  size_t limit = cache->limit;
  cache = new HostCache();
  install_host_cache(limit);
}

}  // namespace dtorch
