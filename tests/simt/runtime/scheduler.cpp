// Blocks one after another, each thread a fiber that runs until it waits: for the block, or for lanes of its warp.
#include <sys/mman.h>

#include <map>
#include <mutex>
#include <random>
#include <set>

#include "runtime.h"

namespace simt {

Thread* self = nullptr;
Block block;
std::vector<Fiber> fibers;
std::vector<Warp> warps;
unsigned current = 0;
bool aborted = false;
Statistics statistics{};
char* stacks = nullptr;
size_t stack_count = 0;
char* shared_map = nullptr;

namespace {

std::mutex one_launch;
Context scheduler;
Call call;
unsigned alive = 0, at_barrier = 0;
Order order = Order::forward;
std::mt19937 random_bits;

struct Taken {
  size_t offset, bytes;
};
std::set<std::pair<std::string, int>> passed;  // barriers' places
std::pair<std::string, int> left_out{"", 0};
std::vector<Taken> taken;  // of this block's dynamic shared memory
size_t shared_bytes = 0, taken_bytes = 0;

char* stack_of(size_t fiber) { return stacks + fiber * kStack; }

void suspend() { switch_context(fibers[current].context, scheduler); }

void wake(Fiber& fiber) {
  fiber.state = State::ready;
  warps[fiber.thread.warp].ready |= 1u << fiber.thread.lane;
}

void wait(Fiber& fiber, State state, Site site) {
  fiber.state = state;
  fiber.site = site;
  warps[fiber.thread.warp].ready &= ~(1u << fiber.thread.lane);
}

void complete(Warp& warp, size_t index, unsigned members) {
  const Pending pending = warp.pending[index];
  warp.pending.erase(warp.pending.begin() + std::ptrdiff_t(index));
  ++statistics.collectives;
  if (pending.aligned && members != 0xffffffffu)
    report("[divergence] %s: lanes 0x%08x only run an instruction that needs the whole warp, at %s:%d", block_name().c_str(),
           members, pending.site.file, pending.site.line);
  else if (pending.mask & warp.born & ~members)
    report("[divergence] %s: lanes 0x%08x of a warp's operation's mask have ended before it, at %s:%d", block_name().c_str(),
           pending.mask & warp.born & ~members, pending.site.file, pending.site.line);
  Thread* const me = self;
  self = nullptr;  // the shadow memory looks away
  auto arguments = pending.arguments;
  pending.function(arguments.data(), members);
  self = me;
  if (pending.kind == Collective::sync) {
    ++warp.epoch;
    passed.insert({pending.site.file, pending.site.line});
  }
  const size_t base = size_t(&warp - warps.data()) * 32;
  for (unsigned lane = 0; lane < 32; ++lane)
    if (members >> lane & 1) wake(fibers[base + lane]);
}

// Hash of the return addresses up to the kernel: threads at one barrier, called from different places, are divergent too.
uintptr_t call_path(void* frame) {
  uintptr_t hash = 0;
#if SIMT_CHECK
  const uintptr_t low = reinterpret_cast<uintptr_t>(stack_of(current)), high = low + kStack - 128;
  for (auto pointer = reinterpret_cast<uintptr_t>(frame); pointer > low && pointer < high;) {
    auto* words = reinterpret_cast<uintptr_t*>(pointer);
    hash = hash * 31 + words[1];
    if (words[0] <= pointer) break;
    pointer = words[0];
  }
#else
  (void)frame;
#endif
  return hash;
}

void release_barrier() {
  ++statistics.barriers;
  const Fiber* first = nullptr;
  for (const Fiber& fiber : fibers) {
    if (fiber.state != State::barrier) continue;
    if (!first) first = &fiber;
    if (fiber.path != first->path || fiber.site.line != first->site.line || std::strcmp(fiber.site.file, first->site.file) != 0)
      report("[divergence] %s: threads wait at different barriers: thread %u at %s:%d, thread %u at %s:%d", block_name().c_str(),
             first->thread.linear, first->site.file, first->site.line, fiber.thread.linear, fiber.site.file, fiber.site.line);
  }
  if (alive < fibers.size())
    report("[divergence] %s: only %u of %zu threads come to the barrier at %s:%d, the others have ended", block_name().c_str(),
           alive, fibers.size(), first->site.file, first->site.line);
  for (Fiber& fiber : fibers)
    if (fiber.state == State::barrier) wake(fiber);
  passed.insert({first->site.file, first->site.line});
  at_barrier = 0;
  for (Warp& warp : warps) warp.epoch = 0;
  shadow::begin_epoch();
}

// The running thread has returned from the kernel: what waits for it need not any more.
void retire() {
  Fiber& fiber = fibers[current];
  wait(fiber, State::done, {});
  --alive;
  if (!fiber.open.empty() || !fiber.groups.empty())
    report("[async] %s ended without waiting for its cp.async copies", where().c_str());
  Warp& warp = warps[fiber.thread.warp];
  warp.alive &= ~(1u << fiber.thread.lane);
  for (size_t i = 0; i < warp.pending.size();) {
    const unsigned needed = warp.pending[i].mask & warp.alive;
    if (needed && (warp.pending[i].arrived & needed) == needed)
      complete(warp, i, needed);
    else
      ++i;
  }
  if (alive && at_barrier == alive) release_barrier();
}

void begin_fiber() {
  call.run(call.parameters);
  retire();
  suspend();
  std::abort();
}

void reserve_stacks(size_t count) {
  if (count <= stack_count) return;
  const auto flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  if (stacks) munmap(stacks, stack_count * kStack);
  void* const mapped = mmap(nullptr, count * kStack, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  stacks = static_cast<char*>(mapped);
  stack_count = count;
  for (size_t i = 0; i < count; ++i) mprotect(stack_of(i), kPage, PROT_NONE);
}

void begin_block() {
  const unsigned threads = block.size.x * block.size.y * block.size.z;
  fibers.resize(threads);
  warps.assign((threads + 31) / 32, Warp());
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.thread.index = {i % block.size.x, i / block.size.x % block.size.y, i / (block.size.x * block.size.y)};
    fiber.thread.linear = i;
    fiber.thread.lane = i % 32;
    fiber.thread.warp = i / 32;
    fiber.open.clear();
    fiber.groups.clear();
    warps[i / 32].alive |= 1u << (i % 32);
    warps[i / 32].born = warps[i / 32].alive;
    wake(fiber);
    make_context(fiber.context, stack_of(i) + kPage, kStack - kPage, begin_fiber);
  }
  alive = threads;
  at_barrier = 0;
  aborted = false;
  taken.clear();
  taken_bytes = 0;
  // What nobody has written is NaN, or -1.
  std::memset(shared_map, 0xff, shared_bytes + (kMaxArrays + 1) * kRedZone);
  char* const statics = thread_local_storage();
  for (const auto& array : image().arrays) std::memset(statics + array.offset, 0xff, array.bytes);
  shadow::begin_block();
}

void report_deadlock() {
  std::map<std::string, unsigned> waiting;
  for (const Fiber& fiber : fibers)
    if (fiber.state != State::done)
      ++waiting[std::string(fiber.state == State::barrier ? "a barrier at " : "a warp's operation at ") + fiber.site.file + ":" +
                std::to_string(fiber.site.line)];
  std::string places;
  for (const auto& [place, threads] : waiting) places += "; " + std::to_string(threads) + " threads wait in " + place;
  report("[deadlock] %s%s", block_name().c_str(), places.c_str());
  aborted = true;
}

// A warp runs as far as it gets before the next one, so that warps are as far apart as barriers allow; in random order, now and
// then a single lane.
bool run_block() {
  begin_block();
  const unsigned count = unsigned(warps.size());
  std::array<unsigned, 32> lanes;
  for (unsigned i = 0; i < 32; ++i) lanes[i] = order == Order::reverse ? 31 - i : i;
  while (alive && !aborted) {
    const unsigned start = order == Order::random ? random_bits() % count : 0;
    unsigned pick = count;
    for (unsigned k = 0; k < count && pick == count; ++k) {
      const unsigned warp = order == Order::reverse ? count - 1 - k : (start + k) % count;
      if (warps[warp].ready) pick = warp;
    }
    if (pick == count) {
      report_deadlock();
      break;
    }
    bool single = false;
    if (order == Order::random) {
      std::shuffle(lanes.begin(), lanes.end(), random_bits);
      single = random_bits() % 8 == 0;
    }
    const unsigned ready = warps[pick].ready;
    for (const unsigned lane : lanes) {
      if (!(ready >> lane & 1)) continue;
      current = pick * 32 + lane;
      self = &fibers[current].thread;
      ++statistics.switches;
      switch_context(scheduler, fibers[current].context);
      self = nullptr;
      if (aborted || single) break;
    }
  }
  return !aborted;
}

[[noreturn]] void refuse(const char* why) { throw std::runtime_error(std::string("CUDA: launch: ") + why); }

}  // namespace

void set_order(Order o, unsigned seed) {
  const std::lock_guard<std::mutex> lock(one_launch);
  order = o;
  random_bits.seed(seed);
}

void abort_block() {
  aborted = true;
  suspend();
  std::abort();
}

bool is_left_out(Site site) { return left_out.second == site.line && left_out.first == site.file; }

void note_passed(Site site) { passed.insert({site.file, site.line}); }

void leave_out(const std::string& file, int line) {
  const std::lock_guard<std::mutex> lock(one_launch);
  left_out = {file, line};
}

std::vector<std::pair<std::string, int>> take_passed() {
  const std::lock_guard<std::mutex> lock(one_launch);
  const std::vector<std::pair<std::string, int>> result(passed.begin(), passed.end());
  passed.clear();
  return result;
}

void barrier(Site site) {
  if (is_left_out(site)) return;
  Fiber& fiber = fibers[current];
  fiber.path = call_path(__builtin_frame_address(0));
  wait(fiber, State::barrier, site);
  if (++at_barrier == alive)
    release_barrier();
  else
    suspend();
}

void collective(unsigned mask, Collective kind, void* argument, WarpFunction function, bool aligned, Site site) {
  if (kind == Collective::sync && is_left_out(site)) return;
  Fiber& fiber = fibers[current];
  Warp& warp = warps[fiber.thread.warp];
  const unsigned bit = 1u << fiber.thread.lane;
  if (!(mask & bit)) {
    report("[divergence] %s is not in the mask 0x%08x of the warp's operation it calls, at %s:%d", where().c_str(), mask,
           site.file, site.line);
    abort_block();
  }
  size_t index = 0;
  while (index < warp.pending.size() && !(warp.pending[index].mask & mask)) ++index;
  if (index == warp.pending.size()) warp.pending.push_back({mask, 0, kind, function, aligned, site, {}});
  Pending& pending = warp.pending[index];
  if (pending.mask != mask || pending.kind != kind || pending.function != function) {
    report("[divergence] %s calls a warp's operation at %s:%d while others of its warp wait in one at %s:%d", where().c_str(),
           site.file, site.line, pending.site.file, pending.site.line);
    abort_block();
  }
  pending.arrived |= bit;
  pending.arguments[fiber.thread.lane] = argument;
  wait(fiber, State::warp, site);
  const unsigned needed = mask & warp.alive;
  if ((pending.arrived & needed) == needed)
    complete(warp, index, needed);
  else
    suspend();
}

void* take_shared(unsigned index, size_t bytes, Site site) {
  if (index >= kMaxArrays) trap(site);
  if (index == taken.size()) {
    const size_t offset = taken_bytes + (index + 1) * kRedZone;
    taken_bytes += bytes;
    if (taken_bytes > shared_bytes) {
      report("[out of bounds] %s takes %zu bytes of shared memory, more than the launch's %zu, at %s:%d", where().c_str(),
             taken_bytes, shared_bytes, site.file, site.line);
      abort_block();
    }
    taken.push_back({offset, bytes});
    const auto low = reinterpret_cast<uintptr_t>(shared_map) + offset;
    shadow::shared_array(low, low + bytes);
  }
  if (taken[index].bytes != bytes) {
    report("[divergence] %s takes %zu bytes as shared array %u, another thread took %zu, at %s:%d", where().c_str(), bytes, index,
           taken[index].bytes, site.file, site.line);
    abort_block();
  }
  return shared_map + taken[index].offset;
}

void trap(Site site) {
  report("[trap] %s at %s:%d", where().c_str(), site.file, site.line);
  abort_block();
}

void run(const Call& what, dim3 grid, dim3 size, size_t bytes, Stream stream) {
  const std::lock_guard<std::mutex> lock(one_launch);
  const size_t threads = size_t(size.x) * size.y * size.z;
  if (stream.device != 0) refuse("invalid device ordinal (cudaErrorInvalidDevice)");
  if (!threads || threads > 1024 || size.z > 64) refuse("invalid configuration argument (cudaErrorInvalidConfiguration)");
  if (bytes > kMaxShared) refuse("invalid argument (cudaErrorInvalidValue): more shared memory than a block can have");
  if (!shared_map) {
    void* const mapped = mmap(nullptr, kSharedMap, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    shared_map = static_cast<char*>(mapped);
  }
  reserve_stacks(threads);
  call = what;
  shared_bytes = bytes;
  block.size = size;
  block.grid = grid;
  shadow::begin_launch(call);
  std::vector<uint64_t> blocks(size_t(grid.x) * grid.y * grid.z);
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = order == Order::reverse ? blocks.size() - 1 - i : i;
  if (order == Order::random) std::shuffle(blocks.begin(), blocks.end(), random_bits);
  for (const uint64_t i : blocks) {
    block.index = {unsigned(i % grid.x), unsigned(i / grid.x % grid.y), unsigned(i / grid.x / grid.y)};
    if (!run_block()) break;
  }
  self = nullptr;
  if (reported()) throw Fault(take_reports());
}

}  // namespace simt
