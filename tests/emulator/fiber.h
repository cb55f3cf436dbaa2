/* SPDX-License-Identifier: Apache-2.0 */
/* Fibers: functions that run in turns on one operating system thread, each on its own stack. */
#ifndef RAFTER_TESTS_EMULATOR_FIBER_H
#define RAFTER_TESTS_EMULATOR_FIBER_H

#include <stddef.h>
#include <stdint.h>

#if defined __x86_64__

struct Context {
    void *stack;
};

/* Saves what the calling convention has a function keep, and the stack; then takes the other's. */
extern "C" void emulator_switch(void **save, void *load);
asm(".text\n.globl emulator_switch\n.hidden emulator_switch\n.type emulator_switch, @function\n"
    "emulator_switch:\n\t"
    "push %rbp\n\tpush %rbx\n\tpush %r12\n\tpush %r13\n\tpush %r14\n\tpush %r15\n\t"
    "mov %rsp, (%rdi)\n\tmov %rsi, %rsp\n\t"
    "pop %r15\n\tpop %r14\n\tpop %r13\n\tpop %r12\n\tpop %rbx\n\tpop %rbp\n\tret\n"
    ".size emulator_switch, . - emulator_switch\n");

static inline void switch_context(Context &from, Context &to) {
    emulator_switch(&from.stack, to.stack);
}

struct Fiber {
    Context context;

    /* f does not return. */
    void start(char *stack, size_t bytes, void (*f)()) {
        void **top = reinterpret_cast<void **>(stack + bytes) - 1; /* as a call would leave it: 8 bytes off 16 */
        *--top = reinterpret_cast<void *>(f);
        for (int i = 0; i < 6; i++)
            *--top = nullptr;
        context.stack = top;
    }
};

#else

#include <ucontext.h>

typedef ucontext_t Context;

static inline void switch_context(Context &from, Context &to) {
    swapcontext(&from, &to);
}

struct Fiber {
    Context context;

    void start(char *stack, size_t bytes, void (*f)()) {
        getcontext(&context);
        context.uc_stack.ss_sp = stack;
        context.uc_stack.ss_size = bytes;
        context.uc_link = nullptr;
        makecontext(&context, f, 0);
    }
};

#endif

#endif
