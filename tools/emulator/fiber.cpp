#include "emulator/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <vector>

#if !defined(__x86_64__) || defined(AK_EMULATOR_UCONTEXT)
#define AK_FIBER_UCONTEXT
#include <ucontext.h>
#endif

namespace ak::emu {
namespace {

constexpr std::size_t kGuardBytes = 4096;

// Stacks are reused by later blocks and launches: mapping one costs more than running a small kernel.
std::vector<char*>& free_stacks() {
  static std::vector<char*> stacks;
  return stacks;
}

char* take_stack() {
  auto& stacks = free_stacks();
  if (!stacks.empty()) {
    char* stack = stacks.back();
    stacks.pop_back();
    return stack;
  }
  void* memory = mmap(nullptr, kGuardBytes + kFiberStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) std::abort();
  return static_cast<char*>(memory);
}

}  // namespace

#ifdef AK_FIBER_UCONTEXT

namespace {
void run_entry(unsigned a, unsigned b, unsigned c, unsigned d) {
  auto join = [](unsigned high, unsigned low) { return static_cast<uintptr_t>(high) << 32 | low; };
  reinterpret_cast<void (*)(void*)>(join(a, b))(reinterpret_cast<void*>(join(c, d)));
}
}  // namespace

void Fiber::start(void (*entry)(void*), void* argument) {
  stack_ = take_stack();
  auto* context = new ucontext_t;
  getcontext(context);
  context->uc_stack.ss_sp = stack_ + kGuardBytes;
  context->uc_stack.ss_size = kFiberStackBytes;
  context->uc_link = nullptr;
  const auto e = reinterpret_cast<uintptr_t>(entry), p = reinterpret_cast<uintptr_t>(argument);
  makecontext(context, reinterpret_cast<void (*)()>(run_entry), 4, static_cast<unsigned>(e >> 32),
              static_cast<unsigned>(e), static_cast<unsigned>(p >> 32), static_cast<unsigned>(p));
  context_ = context;
  caller_ = new ucontext_t;
}
void Fiber::enter() { swapcontext(static_cast<ucontext_t*>(caller_), static_cast<ucontext_t*>(context_)); }
void Fiber::leave() { swapcontext(static_cast<ucontext_t*>(context_), static_cast<ucontext_t*>(caller_)); }
void Fiber::release() {
  if (stack_ == nullptr) return;
  free_stacks().push_back(stack_);
  stack_ = nullptr;
  delete static_cast<ucontext_t*>(context_);
  delete static_cast<ucontext_t*>(caller_);
}

#else

// swapcontext makes two system calls to save the signal mask, which kernels do not change. This switch saves the
// registers that the ABI requires and is about fifty times faster.
asm(R"(
.text
.type ak_emu_switch, @function
ak_emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.type ak_emu_start, @function
ak_emu_start:
  movq %r13, %rdi
  jmpq *%r12
)");
extern "C" void ak_emu_switch(void** save, void* load);
extern "C" void ak_emu_start();

void Fiber::start(void (*entry)(void*), void* argument) {
  stack_ = take_stack();
  auto* top = reinterpret_cast<uint64_t*>(stack_ + kGuardBytes + kFiberStackBytes);
  *--top = 0;  // return address of entry: ends back traces and aligns the stack as a call does
  *--top = reinterpret_cast<uint64_t>(ak_emu_start);
  *--top = 0;                                     // rbp
  *--top = 0;                                     // rbx
  *--top = reinterpret_cast<uint64_t>(entry);     // r12
  *--top = reinterpret_cast<uint64_t>(argument);  // r13
  *--top = 0;                                     // r14
  *--top = 0;                                     // r15
  context_ = top;
}
void Fiber::enter() { ak_emu_switch(&caller_, context_); }
void Fiber::leave() { ak_emu_switch(&context_, caller_); }
void Fiber::release() {
  if (stack_ != nullptr) free_stacks().push_back(stack_);
  stack_ = nullptr;
}

#endif

}  // namespace ak::emu
