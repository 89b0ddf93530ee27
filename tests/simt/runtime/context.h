// Switching between stacks. `Context` is where a suspended stack continues.
#pragma once

#include <cstddef>
#include <cstdlib>

#if !defined(SIMT_UCONTEXT) && !defined(__x86_64__) && !defined(__aarch64__)
#define SIMT_UCONTEXT 1
#endif

#if defined(SIMT_UCONTEXT)
#include <ucontext.h>
#endif

namespace simt {

#if defined(SIMT_UCONTEXT)  // any processor, but a system call for each switch

using Context = ucontext_t;
inline void switch_context(Context& save, Context& load) { swapcontext(&save, &load); }
inline void make_context(Context& context, char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = bytes;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}

#else

using Context = void*;  // the stack pointer; what the ABI wants kept lies there
extern "C" void simt_switch(void** save, void* load);
inline void switch_context(Context& save, Context& load) { simt_switch(&save, load); }

#if defined(__x86_64__)
asm(R"(
.pushsection .text
.hidden simt_switch
.weak simt_switch
.type simt_switch, @function
simt_switch:
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
.size simt_switch, . - simt_switch
.popsection
)");
inline void make_context(Context& context, char* stack, size_t bytes, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + bytes - 64);
  *--top = nullptr;  // entry's return address: it does not return, and finds the stack aligned as after a call
  *--top = reinterpret_cast<void*>(entry);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  context = top;
}
#else
asm(R"(
.pushsection .text
.hidden simt_switch
.weak simt_switch
.type simt_switch, %function
simt_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size simt_switch, . - simt_switch
.popsection
)");
inline void make_context(Context& context, char* stack, size_t bytes, void (*entry)()) {
  void** saved = reinterpret_cast<void**>(stack + bytes - 64 - 160);
  for (int i = 0; i < 20; ++i) saved[i] = nullptr;
  saved[11] = reinterpret_cast<void*>(entry);  // x30, where simt_switch returns to
  context = saved;
}
#endif
#endif

}  // namespace simt
