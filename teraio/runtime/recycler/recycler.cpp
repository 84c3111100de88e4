// A CPU allocator for torch that hands the memory of dead tensors to new ones, and holds no more than it may.
//
// Covers blocks of kLeast bytes and over; smaller ones go to the allocator that was there before. The rules: live and
// idle blocks together stay within the limit, or nothing is idle; a block is used again as it is for the same number of
// pages, and where the limit leaves no room for another size, its huge pages are moved into the new block's addresses;
// memory taken before installation, or by others, is never touched.
//
// Why: a freed block that leaves the process costs a page fault for every page when the next tensor is made, and a C
// library that keeps it keeps more than any budget. The limit is what makes recycling fit a budget. Moving a huge page
// costs the kernel one entry of a page table; a fresh one has to be cleared.

#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
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
constexpr std::size_t kMost = std::size_t{1} << 46;  // more than there can be: rounding up must not overflow

struct Block {
  Block(char* start, std::size_t nbytes) : start(start), nbytes(nbytes) {
    order_node.push_back(this);
    size_node.push_back(this);
    order = order_node.begin();
    size = size_node.begin();
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  char* start;
  std::size_t nbytes;  // whole pages
  // Lengths of the parts that were mapped or moved here at once, from the start on; the kernel moves no more at a time.
  // All but the last are whole huge pages where a block has several.
  std::vector<std::size_t> parts;
  // List nodes are made with the block and only spliced later: giving memory back never needs memory.
  std::list<Block*> order_node, size_node;
  std::list<Block*>::iterator order, size;
};

using Blocks = std::vector<std::unique_ptr<Block>>;

class Recycler final : public c10::Allocator {
 public:
  // The allocator lives as long as the process: tensors outlast every session.
  Recycler(c10::Allocator* base, std::size_t page_nbytes, std::size_t huge_nbytes)
      : base_(base), page_nbytes_(page_nbytes), huge_nbytes_(huge_nbytes) {}

  c10::Allocator* base() const { return base_; }

  c10::DataPtr allocate(std::size_t nbytes) override {
    if (nbytes < kLeast || nbytes > kMost) return base_->allocate(nbytes);
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
    Blocks leaving;
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
    Blocks leaving;
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      live_nbytes_ += size;  // counted first: what comes back meanwhile leaves room for it
      evict_above(limit_nbytes_, leaving);
    }
    char* start = map(size);
    if (start == nullptr) {
      unmap(leaving);
      leaving.clear();
      drop_idle();
      start = map(size);
    }
    if (start == nullptr) {
      const std::lock_guard<std::mutex> guard(mutex_);
      live_nbytes_ -= size;
      return nullptr;
    }
    auto block = std::make_unique<Block>(start, size);
    const std::size_t moved = move_pages(*block, leaving);
    keep_rests(leaving);
    if (block->start == nullptr) {
      const std::lock_guard<std::mutex> guard(mutex_);
      live_nbytes_ -= size;
      return nullptr;
    }
    const std::lock_guard<std::mutex> guard(mutex_);
    idle_by_size_.try_emplace(size);
    blocks_.emplace(start, std::move(block));
    fresh_nbytes_ += size - moved;
    recycled_nbytes_ += moved;
    return start;
  }

  // Moves huge pages of `donors` under the addresses of a new block; gives their bytes. The donors keep the rest.
  std::size_t move_pages(Block& block, const Blocks& donors) const {
    std::size_t done = 0, refilled = 0;
    std::size_t wanted = huge_nbytes_ == 0 ? 0 : block.nbytes / huge_nbytes_ * huge_nbytes_;
    for (const auto& donor : donors) {
      std::size_t given = 0;
      std::vector<std::size_t> rest;
      for (const std::size_t part : donor->parts) {
        const bool more = done < wanted && rest.empty();  // a donor gives from its start on, without a gap
        std::size_t take = more ? std::min(part / huge_nbytes_ * huge_nbytes_, wanted - done) : 0;
        if (take != 0) {
          const Move outcome = move(donor->start + given, block.start + done, take);
          if (outcome != Move::kMoved) {
            if (outcome == Move::kRefilled) refilled = take;
            if (outcome == Move::kLost) give_up(block, done, take);
            wanted = done;
            take = 0;
          }
        }
        if (take != 0) block.parts.push_back(take);
        done += take;
        given += take;
        if (take != part) rest.push_back(part - take);
      }
      donor->start += given;
      donor->nbytes -= given;
      donor->parts = std::move(rest);
    }
    if (block.start == nullptr) return 0;
    if (refilled != 0) block.parts.push_back(refilled);
    if (block.nbytes != done + refilled) block.parts.push_back(block.nbytes - done - refilled);
    return done;
  }

  // A range in the middle of a new block is somebody else's now: the rest of it goes back to the system.
  static void give_up(Block& block, std::size_t lost_from, std::size_t lost_nbytes) {
    const std::size_t lost_to = lost_from + lost_nbytes;
    if (lost_from != 0) munmap(block.start, lost_from);
    if (lost_to != block.nbytes) munmap(block.start + lost_to, block.nbytes - lost_to);
    block.start = nullptr;
  }

  enum class Move { kMoved, kRefilled, kLost };

  static Move move(char* from, char* to, std::size_t nbytes) {
    if (mremap(from, nbytes, nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) != MAP_FAILED) return Move::kMoved;
    // The kernel may have cleared the target before it failed, and any thread may have been given the addresses since.
    void* again = mmap(to, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (again == to) {
      madvise(to, nbytes, MADV_HUGEPAGE);
      return Move::kRefilled;
    }
    if (again != MAP_FAILED) munmap(again, nbytes);  // a kernel that does not know the flag
    return Move::kLost;
  }

  // What blocks that had to leave have not given away stays idle as far as the limit allows, in whole huge pages.
  void keep_rests(Blocks& leaving) {
    for (auto& block : leaving) {
      if (block->nbytes == 0) continue;
      std::size_t kept = 0;
      {
        const std::lock_guard<std::mutex> guard(mutex_);
        const std::size_t held = live_nbytes_ + idle_nbytes_;
        const std::size_t room = limit_nbytes_ > held ? limit_nbytes_ - held : 0;
        if (huge_nbytes_ != 0) kept = std::min(block->nbytes, room) / huge_nbytes_ * huge_nbytes_;
        idle_nbytes_ += kept;  // spoken for
      }
      if (kept != block->nbytes) munmap(block->start + kept, block->nbytes - kept);
      if (kept == 0) continue;
      block->nbytes = kept;
      shorten(block->parts, kept);
      const std::lock_guard<std::mutex> guard(mutex_);
      auto& same = idle_by_size_.try_emplace(kept).first->second;
      order_.splice(order_.begin(), block->order_node, block->order);
      same.splice(same.begin(), block->size_node, block->size);
      char* start = block->start;
      blocks_.emplace(start, std::move(block));
    }
  }

  static void shorten(std::vector<std::size_t>& parts, std::size_t nbytes) {
    std::size_t sum = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (sum + parts[i] >= nbytes) {
        parts[i] = nbytes - sum;
        parts.resize(i + 1);
        return;
      }
      sum += parts[i];
    }
  }

  // The system has no memory left: all that is idle goes, then it is asked once more.
  void drop_idle() {
    Blocks leaving;
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
    Blocks leaving;
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
  void evict_above(std::size_t limit, Blocks& leaving) {
    while (!order_.empty() && live_nbytes_ + idle_nbytes_ > limit) {
      Block* block = order_.front();
      leave_idle(block);
      const auto found = blocks_.find(block->start);
      leaving.push_back(std::move(found->second));
      blocks_.erase(found);
    }
  }

  static void unmap(const Blocks& leaving) {
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
