// A CPU allocator for torch that hands the memory of dead tensors to new ones, and holds no more than it may.
//
// Covers blocks of kLeast bytes and over; smaller ones go to the allocator that was there before. The rules: live and
// idle blocks together stay within the limit, or nothing is idle; a block is used again only for the same number of
// pages; memory taken before installation, or by others, is never touched.
//
// Why: a freed block that leaves the process costs a page fault for every page when the next tensor is made, and a C
// library that keeps it keeps more than any budget. The limit is what makes recycling fit a budget.

#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>

#include <cstdint>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr std::size_t kLeast = 64 << 10;

struct Block {
  char* start;
  std::size_t nbytes;  // whole pages
  // List nodes are made with the block and only spliced later: giving memory back never needs memory.
  std::list<Block*> order_node, size_node;
  std::list<Block*>::iterator order, size;
};

class Recycler final : public c10::Allocator {
 public:
  // The allocator lives as long as the process: tensors outlast every session.
  Recycler(c10::Allocator* base, std::size_t page_nbytes, std::size_t huge_nbytes)
      : base_(base), page_nbytes_(page_nbytes), huge_nbytes_(huge_nbytes) {}

  c10::Allocator* base() const { return base_; }

  c10::DataPtr allocate(std::size_t nbytes) override {
    if (nbytes < kLeast) return base_->allocate(nbytes);
    const std::size_t size = (nbytes + page_nbytes_ - 1) / page_nbytes_ * page_nbytes_;
    char* start = take_idle(size);
    if (start == nullptr) start = take_fresh(size);
    if (start == nullptr) return base_->allocate(nbytes);  // which says properly what is missing
    c10::profiledCPUMemoryReporter().New(start, nbytes);
    return {start, start, &give_back, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* target, const void* source, std::size_t count) const override {
    default_copy_data(target, source, count);
  }

  void set_limit(std::size_t nbytes) {
    std::vector<std::unique_ptr<Block>> leaving;
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      limit_nbytes_ = nbytes;
      evict_above(limit_nbytes_, leaving);
    }
    unmap(leaving);
  }

  void statistics(std::uint64_t* out) {
    const std::lock_guard<std::mutex> guard(mutex_);
    out[0] = live_nbytes_;
    out[1] = idle_nbytes_;
    out[2] = fresh_nbytes_;
    out[3] = recycled_nbytes_;
  }

  std::mutex& mutex() { return mutex_; }

 private:
  static void give_back(void* memory);

  char* take_idle(std::size_t size) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto found = idle_by_size_.find(size);
    if (found == idle_by_size_.end() || found->second.empty()) return nullptr;
    Block* block = found->second.back();  // the last one freed may still be in the processor's cache
    leave_idle(block);
    live_nbytes_ += size;
    recycled_nbytes_ += size;
    return block->start;
  }

  char* take_fresh(std::size_t size) {
    std::vector<std::unique_ptr<Block>> leaving;
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      live_nbytes_ += size;  // counted first: what comes back meanwhile leaves room for it
      evict_above(limit_nbytes_, leaving);
    }
    unmap(leaving);
    char* start = map(size);
    if (start == nullptr) {
      drop_idle();
      start = map(size);
    }
    const std::lock_guard<std::mutex> guard(mutex_);
    if (start == nullptr) {
      live_nbytes_ -= size;
      return nullptr;
    }
    auto block = std::make_unique<Block>();
    block->start = start;
    block->nbytes = size;
    block->order_node.push_back(block.get());
    block->size_node.push_back(block.get());
    block->order = block->order_node.begin();
    block->size = block->size_node.begin();
    idle_by_size_.try_emplace(size);
    blocks_.emplace(start, std::move(block));
    fresh_nbytes_ += size;
    return start;
  }

  // The system has no memory left: all that is idle goes, then it is asked once more.
  void drop_idle() {
    std::vector<std::unique_ptr<Block>> leaving;
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      evict_above(0, leaving);
    }
    unmap(leaving);
  }

  void release(void* memory) {
    if (!owns(memory)) {
      base_->raw_deleter()(memory);  // it was too small for a block
      return;
    }
    c10::profiledCPUMemoryReporter().Delete(memory);
    std::vector<std::unique_ptr<Block>> leaving;
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      Block* block = blocks_.find(memory)->second.get();
      live_nbytes_ -= block->nbytes;
      idle_nbytes_ += block->nbytes;
      order_.splice(order_.end(), block->order_node, block->order);
      auto& same = idle_by_size_.find(block->nbytes)->second;
      same.splice(same.end(), block->size_node, block->size);
      evict_above(limit_nbytes_, leaving);
    }
    unmap(leaving);
  }

  bool owns(void* memory) {
    const std::lock_guard<std::mutex> guard(mutex_);
    return blocks_.count(memory) != 0;
  }

  void leave_idle(Block* block) {
    idle_nbytes_ -= block->nbytes;
    block->order_node.splice(block->order_node.begin(), order_, block->order);
    auto& same = idle_by_size_.find(block->nbytes)->second;
    block->size_node.splice(block->size_node.begin(), same, block->size);
  }

  // Takes idle blocks, those that have been idle for longest first, until all blocks fit below `limit`.
  void evict_above(std::size_t limit, std::vector<std::unique_ptr<Block>>& leaving) {
    while (idle_nbytes_ > 0 && live_nbytes_ + idle_nbytes_ > limit) {
      Block* block = order_.front();
      leave_idle(block);
      const auto found = blocks_.find(block->start);
      leaving.push_back(std::move(found->second));
      blocks_.erase(found);
    }
  }

  static void unmap(const std::vector<std::unique_ptr<Block>>& leaving) {
    for (const auto& block : leaving) munmap(block->start, block->nbytes);
  }

  // Pages of a new block; those of a large one begin where a huge page does.
  char* map(std::size_t size) const {
    const bool huge = huge_nbytes_ != 0 && size >= huge_nbytes_;
    const std::size_t span = huge ? size + huge_nbytes_ : size;
    void* mapped = mmap(nullptr, span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    char* first = static_cast<char*>(mapped);
    if (!huge) return first;
    const auto address = reinterpret_cast<std::uintptr_t>(first);
    char* start = first + ((huge_nbytes_ - address % huge_nbytes_) % huge_nbytes_);
    char* end = start + size;
    if (start != first) munmap(first, start - first);
    if (end != first + span) munmap(end, first + span - end);
    madvise(start, size, MADV_HUGEPAGE);
    return start;
  }

  c10::Allocator* const base_;
  const std::size_t page_nbytes_, huge_nbytes_;
  std::mutex mutex_;
  std::unordered_map<void*, std::unique_ptr<Block>> blocks_;              // live and idle, by their start
  std::unordered_map<std::size_t, std::list<Block*>> idle_by_size_;       // last freed at the back
  std::list<Block*> order_;                                               // idle ones, longest idle at the front
  std::size_t limit_nbytes_ = 0, live_nbytes_ = 0, idle_nbytes_ = 0;
  std::uint64_t fresh_nbytes_ = 0, recycled_nbytes_ = 0;
};

Recycler* recycler = nullptr;

void Recycler::give_back(void* memory) {
  if (memory != nullptr) recycler->release(memory);
}

}  // namespace

extern "C" {

// Makes it torch's allocator for CPU tensors. `huge_nbytes` is 0 where huge pages are not wanted.
void teraio_recycler_install(std::size_t page_nbytes, std::size_t huge_nbytes) {
  if (recycler == nullptr) {
    recycler = new Recycler(c10::GetCPUAllocator(), page_nbytes, huge_nbytes);
    // A forked child must not inherit a lock that a thread of its parent holds.
    pthread_atfork([] { recycler->mutex().lock(); }, [] { recycler->mutex().unlock(); },
                   [] { recycler->mutex().unlock(); });
  }
  c10::SetCPUAllocator(recycler);
}

// Puts the former allocator back and gives idle memory away; blocks in use leave the process when they are freed.
void teraio_recycler_uninstall() {
  if (recycler == nullptr) return;
  if (c10::GetCPUAllocator() == recycler) c10::SetCPUAllocator(recycler->base());
  recycler->set_limit(0);
}

// Most bytes that live and idle blocks take together; live ones alone may take more.
void teraio_recycler_set_limit(std::size_t nbytes) {
  if (recycler != nullptr) recycler->set_limit(nbytes);
}

// Memory as a tensor of that many bytes would get it; null where there is none.
void* teraio_recycler_allocate(std::size_t nbytes) {
  try {
    return recycler->raw_allocate(nbytes);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void teraio_recycler_free(void* memory) { recycler->raw_deallocate(memory); }

// Fills in the bytes that are live and idle now, and those of all blocks ever taken fresh and used again.
void teraio_recycler_statistics(std::uint64_t* out) {
  for (int i = 0; i < 4; ++i) out[i] = 0;
  if (recycler != nullptr) recycler->statistics(out);
}

}  // extern "C"
