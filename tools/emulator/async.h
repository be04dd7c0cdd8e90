#pragma once
// State of asynchronous units: mbarriers, bulk stores, cp.async groups, wgmma queues. Only the structures that the
// machine owns; the operations are in the header of each unit.
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "emulator/shadow.h"

namespace ak::emu {

using AsyncId = uint64_t;
struct Cta;
struct Thread;

/// Threads that wait for the same event.
struct WaitList {
  std::vector<Thread*> threads;
  void wake_all();
};

/// Barrier of a fixed number of threads that all call the same operation.
struct Rendezvous {
  const char* operation = nullptr;
  int arrived = 0, expected = 0;
  uint64_t generation = 0;
  Release release;
  WaitList waiting;
  std::vector<const Thread*> passed;  // arrived without waiting
};

struct AsyncQueue {
  virtual ~AsyncQueue() = default;
  virtual bool empty() const = 0;
  /// Executes the operation at the front.
  virtual void run_one() = 0;
};

/// Shared bytes [low, high) that an asynchronous actor reads in `epoch`. A writer must know that epoch.
struct AsyncRead {
  uint32_t low, high;
  Actor actor;
  Epoch epoch;
};

/// Bulk stores (TMA stores and reductions) of one thread. Epochs of actor `reader` are groups that have read shared
/// memory, epochs of `writer` are groups complete in global memory.
struct BulkStores {
  std::vector<AsyncId> open;                // issued, not committed
  std::deque<std::vector<AsyncId>> groups;  // committed, not waited for
  uint32_t committed = 0;
  bool used = false;
  Actor reader = 0, writer = 0;
  uint32_t known_read = 0;  // groups that a wait has covered
};

/// cp.async copies of one thread.
struct CopyGroups {
  std::vector<AsyncId> open;
  std::deque<std::vector<AsyncId>> groups;
  uint32_t committed = 0;
  bool used = false;
  Actor actor = 0;
};

/// An mbarrier in shared memory.
struct Barrier {
  int count = 0, pending = 0;
  long bytes = 0;       // expected, not yet arrived
  Epoch completed = 0;  // phases
  Actor actor = 0;      // its epoch p is the completion of phase p
  Access initialised;   // by mbarrier_init
  Access init_fence;    // the same thread's fence.mbarrier_init
  Release release;
  Knowledge published;
  WaitList waiting;
};

/// One wgmma: D[64 x n] (+)= A[64 x 16] B[16 x n], operands in shared memory through descriptors.
struct WgmmaOperation {
  uint64_t a, b;
  int n;
  bool a_mn_major, b_mn_major, fp16, accumulate;
  uint32_t group;
  float* registers[128];  // by thread of the warpgroup
};

/// The wgmma stream of a warpgroup. Operations run in order, each between its issue and the wait that covers it.
struct Warpgroup final : AsyncQueue {
  /// Accumulator registers of operations in flight: threads read NaN until the covering wait.
  struct Accumulator {
    int n;
    uint32_t last_group;
    std::vector<float> values;  // [64][n]
    float* registers[128];
  };

  Cta* cta = nullptr;
  int index = 0;
  Actor actor = 0;  // epoch g: group g has finished
  std::deque<WgmmaOperation> queue;
  WgmmaOperation next;  // being issued: threads add their registers one by one
  std::map<float*, Accumulator> in_flight;
  uint32_t committed = 0;
  bool open = false;  // operations after the last commit
  Rendezvous meeting;

  bool empty() const override { return queue.empty(); }
  void run_one() override;
};

}  // namespace ak::emu
