// The shadow memory of a checking build: for each byte, who wrote and read it last, and when. The compiler's instrumentation
// (hooks.cpp) calls touch() for each access of a kernel.
//
// Time is counted in epochs: one for each block and each __syncthreads, and within them one of the warp for each __syncwarp.
// Two accesses of a byte race if one of them writes, they are of different threads, and neither epoch tells them apart.
#include "runtime.h"

#if SIMT_CHECK

#include <sys/mman.h>

#include <map>
#include <tuple>

namespace simt {
namespace {

struct Cell {
  uint32_t write_epoch, read_epoch, write_pc;
  uint16_t writer, write_warp_epoch;
  uint16_t reader[2], read_warp_epoch[2];  // two of the readers; of different warps if there are any
  uint8_t initialised, atomic, pending;
};

struct Region {
  uintptr_t low, high;
  std::string name;
  bool shared, writable, initialised;
  Cell* cells;
};

uint32_t epoch = 1, launch_epoch = 1, block_epoch = 1;
uint32_t acquired = 0;  // blocks up to this epoch are ordered before this one, by a fence and an atomic
bool fenced = false;
std::map<uintptr_t, Region> global, statics;
Region dynamic{0, 0, "dynamic shared memory", true, true, false, nullptr};
std::vector<std::pair<uintptr_t, uintptr_t>> arrays;  // taken from it by this block
Region* last = nullptr;
uintptr_t parameters_low = 0, parameters_high = 0, statics_base = 0;

Cell* make_cells(size_t count) {
  const auto flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const mapped = mmap(nullptr, count * sizeof(Cell), PROT_READ | PROT_WRITE, flags, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  return static_cast<Cell*>(mapped);
}
void drop_cells(const Region& region) { munmap(region.cells, (region.high - region.low) * sizeof(Cell)); }

Region* find(uintptr_t address) {
  if (last && address >= last->low && address < last->high) return last;
  if (address >= dynamic.low && address < dynamic.high) return last = &dynamic;
  for (auto* regions : {&statics, &global}) {
    auto at = regions->upper_bound(address);
    if (at == regions->begin()) continue;
    --at;
    if (address < at->second.high) return last = &at->second;
  }
  return nullptr;
}

bool in_array(uintptr_t low, uintptr_t high) {
  for (const auto& [from, to] : arrays)
    if (low >= from && high <= to) return true;
  return false;
}

// Whether an access then, by `thread`, is not ordered before one made now.
bool unordered(const Region& region, uint32_t then, uint16_t thread, uint16_t warp_epoch) {
  if (then < launch_epoch) return false;
  if (then < block_epoch) return !region.shared && then > acquired;  // another block of this launch
  if (then < epoch || thread == self->linear) return false;
  return thread / 32u != self->warp || warp_epoch >= warps[self->warp].epoch;
}

const char* verb(Access access) { return access == Access::read ? "reads" : access == Access::write ? "writes" : "updates"; }

// "input 0[4] of 256": the region, the byte in it and its size.
std::string place(const Region& region, uintptr_t address) {
  std::string name = region.name;
  uintptr_t low = region.low, high = region.high;
  if (&region == &dynamic) {
    size_t index = arrays.size();
    while (index && arrays[index - 1].first > address) --index;
    if (index) {
      name = "shared array " + std::to_string(index - 1) + " taken";
      std::tie(low, high) = arrays[index - 1];
    }
  }
  return name + "[" + std::to_string(ptrdiff_t(address - low)) + "] of " + std::to_string(high - low);
}

[[noreturn]] void out_of_bounds(uintptr_t address, size_t bytes, Access access, uintptr_t pc, const char* why) {
  const Region* nearest = nullptr;
  uintptr_t distance = ~uintptr_t(0);
  const auto consider = [&](const Region& region) {
    if (region.low == region.high) return;
    const uintptr_t d = address < region.low ? region.low - address : address < region.high ? 0 : address - region.high;
    if (d < distance) {
      distance = d;
      nearest = &region;
    }
  };
  for (const auto& [_, region] : global) consider(region);
  for (const auto& [_, region] : statics) consider(region);
  consider(dynamic);
  report("[out of bounds] %s %s %zu bytes %s: %s; pc=+0x%zx", where().c_str(), verb(access), bytes, why,
         nearest ? place(*nearest, address).c_str() : "?", pc);
  abort_block();
}

void touch_bytes(Region& region, uintptr_t address, size_t bytes, Access access, uintptr_t pc) {
  const auto thread = uint16_t(self->linear), warp_epoch = warps[self->warp].epoch;
  bool raced = false, uninitialised = false;
  Cell* cell = region.cells + (address - region.low);
  for (size_t i = 0; i < bytes; ++i, ++cell) {
    const auto race = [&](const char* what, unsigned other) {
      if (raced) return;
      raced = true;
      char last_write[32] = "";
      if (cell->write_epoch) std::snprintf(last_write, sizeof last_write, ", last written pc=+0x%x", cell->write_pc);
      report("[race] %s %s %s, which thread %u %s, and nothing orders the two; pc=+0x%zx%s", where().c_str(), verb(access),
             place(region, address).c_str(), other, what, pc, last_write);
    };
    if (cell->pending) {
      report("[async] %s %s %s, where a cp.async that has not been waited for writes; pc=+0x%zx", where().c_str(), verb(access),
             place(region, address).c_str(), pc);
      cell->pending = 0;
    }
    const bool written = region.shared ? cell->write_epoch >= block_epoch : region.initialised || cell->initialised;
    if (access != Access::write && !written && !uninitialised) {
      uninitialised = true;
      report("[uninitialised] %s reads %s, which nobody has written; pc=+0x%zx", where().c_str(), place(region, address).c_str(),
             pc);
    }
    const bool both_atomic = access == Access::atomic && cell->atomic;
    if (cell->write_epoch && !both_atomic && unordered(region, cell->write_epoch, cell->writer, cell->write_warp_epoch))
      race("wrote", cell->writer);
    if (access != Access::read && cell->read_epoch)
      for (int k = 0; k < 2; ++k)
        if (unordered(region, cell->read_epoch, cell->reader[k], cell->read_warp_epoch[k])) {
          race("read", cell->reader[k]);
          break;
        }
    if (access == Access::read) {
      const auto note = [&](int k) {
        cell->reader[k] = thread;
        cell->read_warp_epoch[k] = warp_epoch;
      };
      if (cell->read_epoch != epoch) {
        cell->read_epoch = epoch;
        note(0);
        note(1);
      } else if (cell->reader[0] / 32 != thread / 32) {
        note(1);
      } else {
        if (cell->reader[0] != thread && cell->reader[1] / 32 == thread / 32) {
          cell->reader[1] = cell->reader[0];
          cell->read_warp_epoch[1] = cell->read_warp_epoch[0];
        }
        note(0);
      }
    } else {
      if (both_atomic && fenced && cell->write_epoch < block_epoch) acquired = std::max(acquired, cell->write_epoch);
      cell->write_epoch = epoch;
      cell->writer = thread;
      cell->write_warp_epoch = warp_epoch;
      cell->write_pc = uint32_t(pc);
      cell->atomic = access == Access::atomic;
      cell->initialised = 1;
    }
  }
}

}  // namespace

void touch(const volatile void* pointer, size_t bytes, Access access, void* return_address) {
  if (!self || aborted) return;
  ++statistics.accesses;
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const uintptr_t pc = reinterpret_cast<uintptr_t>(return_address) - image().base;
  const auto stack = reinterpret_cast<uintptr_t>(stacks);
  if (address >= stack && address < stack + stack_count * kStack) {
    const size_t owner = (address - stack) / kStack;
    if (owner != current) report("[local] %s %s local memory of thread %zu; pc=+0x%zx", where().c_str(), verb(access), owner, pc);
    return;
  }
  if (address >= parameters_low && address < parameters_high) return;
  const auto own = reinterpret_cast<uintptr_t>(fibers.data());
  if (address >= own && address < own + fibers.size() * sizeof(Fiber)) return;  // threadIdx
  Region* const region = find(address);
  if (!region && address >= image().low && address < image().high) return;  // constants
  if (!region) out_of_bounds(address, bytes, access, pc, "outside of every tensor and array");
  if (address + bytes > region->high) out_of_bounds(address, bytes, access, pc, "across an end");
  if (region == &dynamic && !in_array(address, address + bytes))
    out_of_bounds(address, bytes, access, pc, "between shared arrays");
  if (access != Access::read && !region->writable) {
    report("[read-only] %s %s %s, an input; pc=+0x%zx", where().c_str(), verb(access), place(*region, address).c_str(), pc);
    return;
  }
  touch_bytes(*region, address, bytes, access, pc);
}

void fence() { fenced = true; }

namespace shadow {

void begin_launch(const Call& call) {
  const auto map = reinterpret_cast<uintptr_t>(shared_map);
  if (!dynamic.cells) dynamic = {map, map + kSharedMap, dynamic.name, true, true, false, make_cells(kSharedMap)};
  const auto base = reinterpret_cast<uintptr_t>(thread_local_storage());
  if (base != statics_base) {  // another thread launches
    for (const auto& [_, region] : statics) drop_cells(region);
    statics.clear();
    for (const auto& array : image().arrays) {
      const uintptr_t low = base + array.offset;
      statics[low] = {low, low + array.bytes, array.name, true, true, false, make_cells(array.bytes)};
    }
    statics_base = base;
  }
  last = nullptr;
  parameters_low = reinterpret_cast<uintptr_t>(call.parameters);
  parameters_high = parameters_low + call.bytes;
  launch_epoch = ++epoch;
}

void begin_block() {
  block_epoch = ++epoch;
  acquired = 0;
  fenced = false;
  arrays.clear();
}

void begin_epoch() { ++epoch; }

void shared_array(uintptr_t low, uintptr_t high) { arrays.emplace_back(low, high); }

void set_pending(const void* pointer, size_t bytes, bool pending) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (Region* const region = find(address))
    for (size_t i = 0; i < bytes; ++i) region->cells[address - region->low + i].pending = pending;
}

void allow(uintptr_t address, size_t bytes, const std::string& name, bool writable, bool initialised) {
  if (!bytes) return;
  Region joined{address, address + bytes, name, false, writable, initialised, nullptr};
  for (auto at = global.begin(); at != global.end();) {
    const Region& other = at->second;
    if (other.high <= joined.low || other.low >= joined.high) {
      ++at;
      continue;
    }
    joined.low = std::min(joined.low, other.low);
    joined.high = std::max(joined.high, other.high);
    joined.name = other.name;
    joined.writable |= other.writable;
    joined.initialised |= other.initialised;
    drop_cells(other);
    at = global.erase(at);
  }
  joined.cells = make_cells(joined.high - joined.low);
  global[joined.low] = joined;
  last = nullptr;
}

void forget() {
  for (const auto& [_, region] : global) drop_cells(region);
  global.clear();
  last = nullptr;
}

}  // namespace shadow
}  // namespace simt

#else

namespace simt {
void touch(const volatile void*, size_t, Access, void*) {}
void fence() {}
namespace shadow {
void begin_launch(const Call&) {}
void begin_block() {}
void begin_epoch() {}
void shared_array(uintptr_t, uintptr_t) {}
void set_pending(const void*, size_t, bool) {}
void allow(uintptr_t, size_t, const std::string&, bool, bool) {}
void forget() {}
}  // namespace shadow
}  // namespace simt

#endif
