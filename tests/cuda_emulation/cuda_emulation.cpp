// The fibers, their order, and memory whose ends are guarded.
#include "cuda_emulation.h"

#include <csetjmp>
#include <csignal>
#include <cstdio>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

namespace emulation {

Index thread_index, block_index;

namespace {

constexpr size_t STACK = 256 << 10;

struct Fiber {
    ucontext_t context;  // where it starts
    jmp_buf state;       // where it goes on
    bool started;
    Wait waits;
    bool done;
    int exchanges;
};

Fiber fibers[THREADS];
jmp_buf scheduler;
unsigned lanes[THREADS / WARP][2][WARP];
void (*kernel)(const void*);
const void* kernel_arguments;
sigjmp_buf outside;

// Not swapcontext, which asks the system for the signal mask each time.
void back_to_scheduler() {
    if (!_setjmp(fibers[thread_index.x].state)) _longjmp(scheduler, 1);
}

void go_on(Fiber& f) {
    if (_setjmp(scheduler)) return;
    if (f.started) _longjmp(f.state, 1);
    f.started = true;
    setcontext(&f.context);
}

// A fiber lives for all thread blocks.
void body() {
    for (;;) {
        kernel(kernel_arguments);
        fibers[thread_index.x].done = true;
        back_to_scheduler();
    }
}

void make_fibers(char* stacks) {
    for (int t = 0; t < THREADS; ++t) {
        Fiber& f = fibers[t];
        f.started = false;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = stacks + t * STACK;
        f.context.uc_stack.ss_size = STACK;
        f.context.uc_link = nullptr;
        makecontext(&f.context, body, 0);
    }
}

// Release the threads [first, last) if all of them wait for the same; false if they never will.
bool release(int first, int last, bool block) {
    Wait why = fibers[first].waits;
    for (int t = first; t < last; ++t) {
        if (fibers[t].done || fibers[t].waits == NOTHING || (fibers[t].waits == SYNCTHREADS) != block) return false;
        if (fibers[t].waits != why) return false;
    }
    for (int t = first; t < last; ++t) fibers[t].waits = NOTHING;
    return true;
}

bool release_any() {
    bool any = release(0, THREADS, true);
    for (int w = 0; w < THREADS; w += WARP) any = release(w, w + WARP, false) || any;
    return any;
}

// schedule 0: threads in order; 1: from the last; above: shuffled, anew after every round.
void reorder(int (&order)[THREADS], int schedule, uint32_t& random) {
    for (int t = 0; t < THREADS; ++t) order[t] = schedule == 1 ? THREADS - 1 - t : t;
    for (int t = THREADS - 1; schedule > 1 && t > 0; --t) {
        random = random * 1664525u + 1013904223u;
        int other = (int)((random >> 8) % (unsigned)(t + 1));
        int kept = order[t];
        order[t] = order[other], order[other] = kept;
    }
}

bool run_block(int schedule, uint32_t& random) {
    for (Fiber& f : fibers) f.waits = NOTHING, f.done = false, f.exchanges = 0;
    int order[THREADS];
    for (int left = THREADS; left;) {
        reorder(order, schedule, random);
        left = 0;
        for (int t : order) {
            if (!fibers[t].done && fibers[t].waits == NOTHING) {
                thread_index.x = t;
                go_on(fibers[t]);
            }
            left += !fibers[t].done;
        }
        if (left && !release_any()) return false;
    }
    return true;
}

void out_of_bounds(int) { siglongjmp(outside, 1); }  // the current thread did it

}  // namespace

void wait_for_others(Wait why) {
    fibers[thread_index.x].waits = why;
    back_to_scheduler();
}

unsigned* shown() {
    Fiber& me = fibers[thread_index.x];
    return lanes[thread_index.x / WARP][me.exchanges++ % 2];
}

}  // namespace emulation

using namespace emulation;

extern "C" {

// 0, 1: threads wait for different things, 2: memory was touched that is not the kernel's; the thread block's
// and the thread's number go to `where`.
int emulate(void (*function)(const void*), unsigned blocks, const void* arguments, int schedule, unsigned* where) {
    static char* stacks = nullptr;
    if (!stacks) {
        void* made = mmap(nullptr, THREADS * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (made == MAP_FAILED) return 3;
        stacks = (char*)made;
        make_fibers(stacks);
    }
    static char signal_stack[64 << 10];
    stack_t alternate{}, old_stack;
    alternate.ss_sp = signal_stack, alternate.ss_size = sizeof signal_stack;
    struct sigaction guard{}, old_segv, old_bus;
    guard.sa_handler = out_of_bounds, guard.sa_flags = SA_ONSTACK;
    sigaltstack(&alternate, &old_stack);
    sigaction(SIGSEGV, &guard, &old_segv);
    sigaction(SIGBUS, &guard, &old_bus);
    kernel = function, kernel_arguments = arguments;
    volatile int result = 0;
    if (sigsetjmp(outside, 1)) {
        result = 2;
    } else {
        uint32_t random = 12345;
        for (block_index.x = 0; block_index.x < blocks && !result; ++block_index.x)
            if (!run_block(schedule, random)) result = 1;
    }
    if (result) make_fibers(stacks);  // they hang where they were
    where[0] = block_index.x, where[1] = thread_index.x;
    sigaction(SIGSEGV, &old_segv, nullptr);
    sigaction(SIGBUS, &old_bus, nullptr);
    if (!(old_stack.ss_flags & SS_ONSTACK)) sigaltstack(&old_stack, nullptr);
    return result;
}

// Memory of `nbytes` between pages that nobody may touch, its end at most `slack` bytes before the second one.
void* guarded(size_t nbytes, size_t slack) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), inside = (nbytes + slack + page - 1) / page * page;
    char* all = (char*)mmap(nullptr, inside + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED || (inside && mprotect(all + page, inside, PROT_READ | PROT_WRITE))) return nullptr;
    std::memset(all + page, 0xA5, inside);
    return all + page + inside - slack - nbytes;
}

}  // extern "C"
