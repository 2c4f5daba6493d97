// A cache of host memory: what workers free, they use again.
//
// The pages of a fresh block cost about four times the copy that fills it, so large blocks that
// workers allocate, and fetches on the client, are kept when they are freed. All other memory is
// torch's own.

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

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

  void empty() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [size, block] : free_) {
      sizes_.erase(block);
      c10::free_cpu(block);
    }
    free_.clear();
    num_kept_ = 0;
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
    auto found = free_.find(size);
    if (found == free_.end()) return nullptr;
    void* block = found->second;
    free_.erase(found);
    num_kept_ -= size;
    return block;
  }

  void* fresh(size_t size) {
    void* block;
    try {
      block = c10::alloc_cpu(size);
    } catch (const c10::Error&) {
      empty();
      block = c10::alloc_cpu(size);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    sizes_[block] = size;
    return block;
  }

  static void release(void* block);

  std::mutex mutex_;
  std::multimap<size_t, void*> free_;
  std::unordered_map<void*, size_t> sizes_;  // of the blocks made here
  size_t num_kept_ = 0;
};

// Never destroyed: tensors outlive everything.
HostCache* cache = new HostCache();

void HostCache::release(void* block) {
  size_t size = 0;
  {
    std::lock_guard<std::mutex> lock(cache->mutex_);
    auto found = cache->sizes_.find(block);
    if (found != cache->sizes_.end()) {
      size = found->second;
      c10::profiledCPUMemoryReporter().Delete(block);
      if (cache->num_kept_ + size <= cache->limit) {
        cache->num_kept_ += size;
        cache->free_.emplace(size, block);
        return;
      }
      cache->sizes_.erase(found);
    }
  }
  if (size) {
    c10::free_cpu(block);
  } else {
    c10::GetDefaultCPUAllocator()->raw_deallocate(block);
  }
}

}  // namespace

void install_host_cache(size_t limit) {
  cache->limit = limit;
  c10::SetCPUAllocator(cache, /*priority=*/1);
}

bool use_host_cache(bool use) { return std::exchange(this_thread_uses_it, use); }
void empty_host_cache() { cache->empty(); }

void host_cache_after_fork() {
  // A worker of the parent may have been in the middle of changing it.
  size_t limit = cache->limit;
  cache = new HostCache();
  install_host_cache(limit);
}

}  // namespace dtorch
