#pragma once
// The emulated GPU: threads as fibers, CTAs, clusters, and the seeded scheduler, which decides the order of threads and
// the time of asynchronous operations.
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "emulator/async.h"
#include "emulator/clock.h"
#include "emulator/error.h"
#include "emulator/fiber.h"
#include "emulator/sectors.h"
#include "emulator/shadow.h"

namespace ak::emu {

struct Warp;

/// Settings of later launches.
struct Options {
  uint64_t seed = 0;            ///< selects the schedule; the same seed replays it exactly
  int sm_count = 2;             ///< result of device_sm_count()
  int shared_limit = 232448;    ///< result of device_shared_limit()
  bool runs_sm90_code = true;   ///< result of device_runs_sm90_code()
  int resident_threads = 4096;  ///< limit of concurrent threads; other CTAs wait
  int last_ctas = 0;            ///< run only the last CTAs of a grid; 0: all. For the far end of large tensors
  bool count_sectors = false;   ///< count stores of half sectors, for the launch log
  bool truncate_mma = false;    ///< tensor cores align and truncate sums (see mma.h) instead of rounding each step once
  uint64_t max_switches = 20'000'000;  ///< limit of thread switches, beyond which a livelock is reported
};
Options& options();

inline constexpr int kWarpSize = 32;
inline constexpr uint32_t kSharedBase = 1024;     // reserved by the system
inline constexpr uint32_t kSharedLimit = 232448;  // 227 KB, opt-in maximum of sm_90
inline constexpr uint32_t kWindow = 0xffffff;     // shared address = rank in the cluster << 24 | offset

struct Thread {
  Fiber fiber;
  Cta* cta = nullptr;
  Warp* warp = nullptr;
  int index = 0;
  bool done = false;
  const char* operation = "start";
  std::function<std::string()> waits_for;  // while blocked, for the deadlock report
  Clock clock;
  BulkStores bulk;
  CopyGroups copies;
  bool wgmma_fenced = false;   // since the last covering wait
  bool previous_done = false;  // wait_for_previous_kernel() was called

  int lane() const { return index % kWarpSize; }
};

struct Warp {
  Cta* cta = nullptr;
  int index = 0;
  uint32_t ready = 0;   // lanes that could run now
  bool active = false;  // listed in the scheduler
  uint64_t rank = 0;
  Rendezvous meeting;
  uint64_t slot[2][kWarpSize][4];  // the lanes' values of a collective; double-buffered, since a fast lane may already
                                   // be in the next one
};

struct Cluster {
  std::vector<Cta*> ctas;
  Rendezvous meeting;
};

struct Cta {
  int index = 0, rank = 0, live = 0;
  bool exited = false;
  Cluster* cluster = nullptr;
  uint64_t rank_in_schedule = 0;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<uint8_t> shared;
  std::unique_ptr<Shadow> shadow;
  std::map<uint32_t, Barrier> barriers;  // mbarriers, by offset
  std::vector<AsyncRead> async_reads;    // of shared memory, by TMA stores and wgmma
  Rendezvous all, named[16];
  std::vector<std::unique_ptr<Warpgroup>> warpgroups;
  int registers_free = 0;      // setmaxnreg's pool, per thread of a warpgroup
  std::vector<int> registers;  // by warpgroup
  WaitList waiting_for_registers;
};

/// Random number generator of the schedule (splitmix64).
struct Random {
  uint64_t state = 0;
  uint64_t next() {
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  uint64_t below(uint64_t n) { return next() % n; }
  bool one_in(uint64_t n) { return next() % n == 0; }
};

struct Shape {
  const char* name;
  int grid, block, cluster;
  std::size_t shared_bytes;
  bool overlap_previous;
};

class Machine {
 public:
  explicit Machine(const Shape& shape);
  ~Machine();
  /// Runs `body` as every thread of the grid; returns "" or an error message.
  std::string run(const std::function<void()>& body);

  Random random;
  const Shape shape;
  SectorCount sectors;
  uint32_t dynamic_offset = 0;  // of dynamic shared memory; a multiple of 16 that depends on the seed

  /// Blocks the running thread until `list` is woken. `describe` names the missing event, for the deadlock report.
  void block(WaitList& list, std::function<std::string()> describe);
  /// Lets other threads run.
  void yield();
  void make_ready(Thread& thread);

  /// Posts an operation that runs at any later time, at the latest when forced.
  AsyncId post(std::function<void()> operation);
  void force(AsyncId id);
  /// Adds a queue, whose operations run in order.
  void add_queue(AsyncQueue* queue) { queues_.push_back(queue); }

  /// A new asynchronous actor; `description` names it in reports.
  Actor new_actor(std::string description);
  std::string describe(Actor actor) const;
  const Clock* clock_of(Actor actor) const;

  /// Offset of a static shared array, the same in all CTAs.
  uint32_t static_shared(const void* key, std::size_t bytes);
  /// End of all shared memory allocated so far.
  uint32_t shared_end() const { return dynamic_offset + shared_used_; }
  /// Knowledge published by atomics on a location in this launch.
  Release& atomic_location(const void* p) { return atomic_locations_[p]; }

 private:
  void start_cta(int index);
  void start_waiting_ctas();
  Warp* pick();
  void run_warp(Warp& warp);
  bool run_some_async();
  void switch_to(Thread& thread);
  void finish(Thread& thread);
  void free_memory(Cluster& cluster);
  void check_end();
  std::string deadlock() const;
  static void thread_entry(void* thread);

  const std::function<void()>* body_ = nullptr;
  std::string error_;
  std::vector<std::unique_ptr<Cta>> ctas_;
  std::vector<std::unique_ptr<Cluster>> clusters_;
  int first_ = 0;  // first CTA that runs
  int started_ = 0, resident_ = 0;
  std::vector<Warp*> active_;
  std::unordered_map<AsyncId, std::function<void()>> async_;  // pending
  std::vector<AsyncId> async_order_;                          // pending, and some that have run
  std::vector<AsyncQueue*> queues_;
  AsyncId next_async_ = 1;
  uint64_t switches_ = 0, picks_ = 0;
  int warp_policy_ = 0, async_policy_ = 0, victim_ = 0;
  std::vector<std::string> actor_names_;  // of asynchronous actors
  std::vector<Thread*> thread_by_actor_;
  std::map<const void*, uint32_t> static_offsets_;
  std::map<const void*, Release> atomic_locations_;
  uint32_t shared_used_ = 0;
};

/// The running machine and thread.
extern Machine* machine;
extern Thread* current;

/// Records the running thread's operation, for error messages.
inline void enter(const char* operation) { current->operation = operation; }

/// Barrier of `expected` threads; the last to arrive runs `last` before it releases them. `ordered`: all memory
/// accesses before it happen before all accesses after it.
void meet(Rendezvous& meeting, int expected, bool ordered, const std::function<void()>& last = {});
/// Arrives at an ordered meet() without waiting. A thread arrives once per meeting.
void come(Rendezvous& meeting, int expected);
/// meet() of the running thread's warp.
void meet_warp(bool ordered, const std::function<void()>& last = {});

}  // namespace ak::emu
