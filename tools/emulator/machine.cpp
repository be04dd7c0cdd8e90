#include "emulator/machine.h"

#include <algorithm>

#include "emulator/memory.h"

namespace ak::emu {

Machine* machine = nullptr;
Thread* current = nullptr;

Options& options() {
  static Options options;
  return options;
}

namespace {

// Choice of the next warp. Uniform choice keeps all threads in step; a ranking lets one warp or CTA run far ahead; a
// starved CTA exposes peers that do not wait for it.
enum WarpPolicy { kUniform, kRankedWarps, kRankedCtas, kOneCtaBehind, kWarpPolicies };
// Timing of asynchronous operations: at once, now and then, or only when no thread can run.
enum AsyncPolicy { kEager, kMixed, kLazy, kAsyncPolicies };

}  // namespace

Machine::Machine(const Shape& s) : shape(s) {
  const uint64_t seed = options().seed;
  random.state = seed;
  warp_policy_ = static_cast<int>(seed % kWarpPolicies);
  async_policy_ = static_cast<int>(seed / kWarpPolicies % kAsyncPolicies);
  if (options().last_ctas > 0) first_ = std::max(0, shape.grid - options().last_ctas) / shape.cluster * shape.cluster;
  const int running = shape.grid - first_;
  started_ = first_;
  victim_ = first_ + static_cast<int>(random.below(static_cast<uint64_t>(running)));
  // Only 16 bytes of alignment are guaranteed, so seeds vary it.
  dynamic_offset = seed % 2 == 0 ? 0 : static_cast<uint32_t>(random.below(64)) * 16;
  shared_used_ = static_cast<uint32_t>(shape.shared_bytes);
  ctas_.resize(static_cast<std::size_t>(running));
  thread_by_actor_.resize(static_cast<std::size_t>(running) * shape.block);
  machine = this;
}

Machine::~Machine() {
  machine = nullptr;
  current = nullptr;
}

void Machine::start_cta(int index) {
  auto cta = std::make_unique<Cta>();
  cta->index = index;
  cta->rank = index % shape.cluster;
  cta->live = shape.block;
  if (cta->rank == 0) clusters_.push_back(std::make_unique<Cluster>());
  cta->cluster = clusters_.back().get();
  cta->cluster->ctas.push_back(cta.get());
  cta->rank_in_schedule = random.next();
  cta->shared.assign(kSharedLimit + 1024, 0xff);
  cta->shadow = std::make_unique<Shadow>(cta->shared.size());
  const int groups = (shape.block + 127) / 128;
  // Registers per thread at launch, if __launch_bounds__ allows the whole register file.
  const int each = std::min(65536 / shape.block / 8 * 8, 255 / 8 * 8 + 8);
  cta->registers.assign(static_cast<std::size_t>(groups), each);
  for (int g = 0; g < groups; g++) {
    auto group = std::make_unique<Warpgroup>();
    group->cta = cta.get();
    group->index = g;
    group->actor = new_actor(format("a wgmma of CTA %d warpgroup %d", index, g));
    add_queue(group.get());
    cta->warpgroups.push_back(std::move(group));
  }
  for (int t = 0; t < shape.block; t++) {
    if (t % kWarpSize == 0) {
      cta->warps.push_back(std::make_unique<Warp>());
      cta->warps.back()->cta = cta.get();
      cta->warps.back()->index = t / kWarpSize;
      cta->warps.back()->rank = random.next();
    }
    auto thread = std::make_unique<Thread>();
    thread->cta = cta.get();
    thread->warp = cta->warps.back().get();
    thread->index = t;
    thread->clock.actor = static_cast<Actor>(index - first_) * static_cast<Actor>(shape.block) + static_cast<Actor>(t);
    thread_by_actor_[thread->clock.actor] = thread.get();
    thread->fiber.start(thread_entry, thread.get());
    make_ready(*thread);
    cta->threads.push_back(std::move(thread));
  }
  resident_ += shape.block;
  ctas_[static_cast<std::size_t>(index - first_)] = std::move(cta);
}

void Machine::start_waiting_ctas() {
  while (started_ < shape.grid &&
         (resident_ == 0 || resident_ + shape.block * shape.cluster <= options().resident_threads)) {
    for (int i = 0; i < shape.cluster; i++) start_cta(started_++);
  }
}

std::string Machine::run(const std::function<void()>& body) {
  body_ = &body;
  start_waiting_ctas();
  while (error_.empty()) {
    const bool act = async_policy_ == kEager ? !random.one_in(3) : async_policy_ == kMixed && random.one_in(12);
    if (act && run_some_async()) continue;
    Warp* warp = pick();
    if (warp != nullptr) {
      run_warp(*warp);
    } else if (!run_some_async()) {
      if (resident_ == 0 && started_ == shape.grid) break;
      error_ = deadlock();
    }
    if (switches_ > options().max_switches) {
      error_ = format("livelock: still running after %llu switches of threads",
                      static_cast<unsigned long long>(options().max_switches));
    }
  }
  if (error_.empty()) check_end();
  if (error_.empty()) return "";
  return format("kernel %s, seed %llu: ", shape.name, static_cast<unsigned long long>(options().seed)) + error_;
}

Warp* Machine::pick() {
  for (std::size_t i = 0; i < active_.size();) {
    if (active_[i]->ready != 0) {
      i++;
      continue;
    }
    active_[i]->active = false;
    active_[i] = active_.back();
    active_.pop_back();
  }
  if (active_.empty()) return nullptr;
  if (++picks_ % 512 == 0) {
    for (Warp* w : active_) {
      w->rank = random.next();
      w->cta->rank_in_schedule = random.next();
    }
  }
  Warp* chosen = active_[random.below(active_.size())];
  if (warp_policy_ == kUniform || random.one_in(16)) return chosen;
  auto before = [&](const Warp* a, const Warp* b) {
    if (warp_policy_ == kRankedWarps) return a->rank > b->rank;
    if (warp_policy_ == kRankedCtas) return a->cta->rank_in_schedule > b->cta->rank_in_schedule;
    return b->cta->index == victim_ && a->cta->index != victim_;
  };
  for (Warp* w : active_) {
    if (before(w, chosen)) chosen = w;
  }
  return chosen;
}

void Machine::run_warp(Warp& warp) {
  const uint32_t mask = warp.ready;
  const int first = static_cast<int>(random.below(kWarpSize));
  for (int i = 0; i < kWarpSize && error_.empty(); i++) {
    const int lane = (first + i) % kWarpSize;
    if (!(mask >> lane & 1) || !(warp.ready >> lane & 1)) continue;
    warp.ready &= ~(1u << lane);
    switch_to(*warp.cta->threads[static_cast<std::size_t>(warp.index * kWarpSize + lane)]);
  }
}

void Machine::switch_to(Thread& thread) {
  switches_++;
  current = &thread;
  thread.fiber.enter();
  current = nullptr;
  if (thread.done) finish(thread);
}

void Machine::thread_entry(void* argument) {
  auto& thread = *static_cast<Thread*>(argument);
  try {
    (*machine->body_)();
    thread.operation = "exit";
    if (!thread.bulk.open.empty()) fail("bulk stores were issued but never committed");
    if (thread.bulk.known_read < thread.bulk.committed) {
      fail("the thread exits while its bulk stores may still read shared memory: no bulk_wait covers them");
    }
    if (!thread.copies.open.empty() || !thread.copies.groups.empty()) fail("cp.async copies were never waited for");
  } catch (const Error& e) {
    if (machine->error_.empty()) {
      machine->error_ = format("CTA %d, warp %d (thread %d), %s: ", thread.cta->index, thread.warp->index, thread.index,
                               thread.operation) +
                        e.what;
    }
  }
  thread.done = true;
  thread.fiber.leave();
}

void Machine::finish(Thread& thread) {
  Cta& cta = *thread.cta;
  if (--cta.live > 0) return;
  // Shared memory of an exited CTA may be reused, so it is overwritten for late readers.
  cta.exited = true;
  std::fill(cta.shared.begin(), cta.shared.end(), uint8_t{0xff});
  for (auto& group : cta.warpgroups) {
    if ((group->open || !group->queue.empty() || !group->in_flight.empty())) {
      error_ =
          format("CTA %d, warpgroup %d exits with wgmma operations that nothing waited for", cta.index, group->index);
    }
  }
  for (const Rendezvous& barrier : cta.named) {
    if (barrier.arrived == 0 || !error_.empty()) continue;
    error_ = format("CTA %d exits while %d of %d threads have come to a named barrier, and nobody waits there",
                    cta.index, barrier.arrived, barrier.expected);
  }
  resident_ -= shape.block;
  for (auto& each : cta.threads) each->fiber.release();
  free_memory(*cta.cluster);
  start_waiting_ctas();
}

// A grid may have thousands of CTAs, so those of an exited cluster give back their shared memory. Pending asynchronous
// operations may still touch it; then it stays.
void Machine::free_memory(Cluster& cluster) {
  const bool exited = std::all_of(cluster.ctas.begin(), cluster.ctas.end(), [](Cta* cta) { return cta->exited; });
  const bool pending =
      !async_.empty() || std::any_of(queues_.begin(), queues_.end(), [](auto* q) { return !q->empty(); });
  if (!exited || pending || cluster.ctas.size() < static_cast<std::size_t>(shape.cluster)) return;
  for (Cta* cta : cluster.ctas) {
    std::vector<uint8_t>().swap(cta->shared);
    cta->shadow.reset();
  }
}

void Machine::check_end() {
  while (run_some_async()) {
  }
  for (auto& cta : ctas_) {
    for (auto& [offset, barrier] : cta->barriers) {
      if (barrier.bytes != 0 && error_.empty()) {
        error_ = format("the mbarrier at shared +0x%x of CTA %d is left with %ld bytes outstanding", offset, cta->index,
                        barrier.bytes);
      }
    }
  }
}

std::string Machine::deadlock() const {
  // Threads in the same place are reported together: "CTA 0: 128 threads (warps 4-7) wait in wgmma ...".
  struct Place {
    int threads = 0, first_warp = 1 << 30, last_warp = -1;
  };
  std::map<std::string, Place> places;
  for (auto& cta : ctas_) {
    if (!cta) continue;
    for (auto& thread : cta->threads) {
      if (thread->done || !thread->waits_for) continue;
      Place& place = places[format("CTA %d waits in %s: ", cta->index, thread->operation) + thread->waits_for()];
      place.threads++;
      place.first_warp = std::min(place.first_warp, thread->warp->index);
      place.last_warp = std::max(place.last_warp, thread->warp->index);
    }
  }
  std::string text = "deadlock:";
  for (auto& [what, place] : places) {
    text += format(" %d threads (warps %d-%d) of ", place.threads, place.first_warp, place.last_warp) + what + ";";
  }
  return text;
}

void Machine::block(WaitList& list, std::function<std::string()> describe) {
  Thread& thread = *current;
  thread.waits_for = std::move(describe);
  list.threads.push_back(&thread);
  thread.fiber.leave();
  thread.waits_for = nullptr;
}

void Machine::yield() {
  make_ready(*current);
  current->fiber.leave();
}

void Machine::make_ready(Thread& thread) {
  Warp& warp = *thread.warp;
  warp.ready |= 1u << thread.lane();
  if (!warp.active) {
    warp.active = true;
    active_.push_back(&warp);
  }
}

void WaitList::wake_all() {
  for (Thread* thread : threads) machine->make_ready(*thread);
  threads.clear();
}

AsyncId Machine::post(std::function<void()> operation) {
  const AsyncId id = next_async_++;
  async_.emplace(id, std::move(operation));
  async_order_.push_back(id);
  return id;
}

void Machine::force(AsyncId id) {
  auto it = async_.find(id);
  if (it == async_.end()) return;
  auto operation = std::move(it->second);
  async_.erase(it);
  operation();
}

bool Machine::run_some_async() {
  std::size_t waiting_queues = 0;
  for (AsyncQueue* queue : queues_) waiting_queues += !queue->empty();
  if (async_.empty() && waiting_queues == 0) return false;
  try {
    std::size_t choice = random.below(async_order_.size() + waiting_queues);
    while (choice < async_order_.size()) {
      const AsyncId id = async_order_[choice];
      async_order_[choice] = async_order_.back();
      async_order_.pop_back();
      if (async_.contains(id)) {
        force(id);
        return true;
      }
      choice = random.below(async_order_.size() + waiting_queues);  // already forced
    }
    choice -= async_order_.size();
    for (AsyncQueue* queue : queues_) {
      if (queue->empty()) continue;
      if (choice-- == 0) {
        queue->run_one();
        break;
      }
    }
  } catch (const Error& e) {
    error_ = "an asynchronous operation: " + e.what;
  }
  return true;
}

Actor Machine::new_actor(std::string description) {
  actor_names_.push_back(std::move(description));
  return static_cast<Actor>(thread_by_actor_.size() + actor_names_.size() - 1);
}

std::string Machine::describe(Actor actor) const {
  if (actor >= thread_by_actor_.size()) return actor_names_[actor - thread_by_actor_.size()];
  const int cta = first_ + static_cast<int>(actor) / shape.block, index = static_cast<int>(actor) % shape.block;
  return format("CTA %d warp %d (thread %d)", cta, index / kWarpSize, index);
}

const Clock* Machine::clock_of(Actor actor) const {
  return actor < thread_by_actor_.size() ? &thread_by_actor_[actor]->clock : nullptr;
}

uint32_t Machine::static_shared(const void* key, std::size_t bytes) {
  auto it = static_offsets_.find(key);
  if (it != static_offsets_.end()) return it->second;
  const uint32_t offset = dynamic_offset + ((shared_used_ + 15) & ~15u);
  shared_used_ = ((shared_used_ + 15) & ~15u) + static_cast<uint32_t>(bytes);
  if (shared_used_ > kSharedLimit) {
    fail(format("%u bytes of shared memory are needed, %u is the limit", shared_used_, kSharedLimit));
  }
  static_offsets_.emplace(key, offset);
  return offset;
}

}  // namespace ak::emu
