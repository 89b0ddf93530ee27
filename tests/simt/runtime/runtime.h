// What the parts of the emulator share: the machine's state while a grid runs, and its reports.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "context.h"
#include "simt.h"

#if !defined(SIMT_CHECK)
#define SIMT_CHECK 0
#endif

namespace simt {

constexpr size_t kStack = 256 << 10, kPage = 4096;
constexpr size_t kMaxShared = 227 << 10;  // of a block, on sm_90
constexpr size_t kMaxArrays = 64, kSharedMap = kMaxShared + (kMaxArrays + 1) * kRedZone;

enum class State : uint8_t { ready, barrier, warp, done };

struct Copy {  // a cp.async under way
  char* to;
  const char* from;
  bool valid;
};

struct Fiber {
  Thread thread;
  Context context;
  State state = State::done;
  Site site{};         // of the barrier or collective it waits in
  uintptr_t path = 0;  // through which calls it came to the barrier
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

struct Pending {  // a collective that some lanes have reached
  unsigned mask, arrived;
  Collective kind;
  WarpFunction function;
  bool aligned;
  Site site;
  std::array<void*, 32> arguments;
};

struct Warp {
  unsigned born = 0, alive = 0, ready = 0;  // lanes
  uint16_t epoch = 0;                       // counts __syncwarp since the last __syncthreads
  std::vector<Pending> pending;
};

enum class Order { forward, reverse, random };

struct Statistics {
  uint64_t switches, collectives, barriers, accesses;
};

extern std::vector<Fiber> fibers;
extern std::vector<Warp> warps;
extern unsigned current;  // fiber that runs
extern bool aborted;
extern Statistics statistics;
extern char* stacks;
extern size_t stack_count;
extern char* shared_map;

void set_order(Order order, unsigned seed);
// For mutation tests: __syncthreads(), __syncwarp() and cp_async_wait() on that line do nothing. Line 0: all work.
void leave_out(const std::string& file, int line);
bool is_left_out(Site site);
void note_passed(Site site);
std::vector<std::pair<std::string, int>> take_passed();  // files and lines of those passed since the last call
[[noreturn]] void abort_block();

// Reports, for the Fault at the end of the launch. "pc=+0x..." in a text becomes file and line there.
void report(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string where();         // "block (0,0,0) thread (5,0,0)"
std::string block_name();    // "block (0,0,0)"
std::string take_reports();  // every report since the last call, with source lines; empty if none
bool reported();

// This module's file, and its static shared arrays.
struct Image {
  std::string path;
  uintptr_t base = 0, low = 0, high = 0;
  struct Array {
    std::string name;
    uintptr_t offset;  // from the start of thread-local storage
    size_t bytes;      // without the red zone
  };
  std::vector<Array> arrays;
};
const Image& image();
char* thread_local_storage();  // of the calling thread

// The shadow memory. In a build without checks these do nothing.
namespace shadow {
void begin_launch(const Call& call);
void begin_block();
void begin_epoch();  // after each __syncthreads
void shared_array(uintptr_t low, uintptr_t high);
void set_pending(const void* address, size_t bytes, bool pending);
// Memory that kernels may use. It need not lie apart from memory named before: that is joined, writable if either is.
void allow(uintptr_t address, size_t bytes, const std::string& name, bool writable, bool initialised);
void forget();
}  // namespace shadow

}  // namespace simt
