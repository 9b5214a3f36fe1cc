// The threads of a loop. From the body of `#pragma omp parallel`, GCC makes a function that asks
// for its part of the whole (omp_get_thread_num of omp_get_num_threads), and hands it to
// GOMP_parallel. These three are OpenMP's library, and stand here instead, for busy machines:
//
//   - a part is taken by whoever is free. Beside other programs a thread may not run for
//     milliseconds: then the others do its part, and wait only for what it has begun;
//   - a thread whose processor another program takes rests for a while, and holds nobody up;
//   - who waits looks around for 0.1 ms, then sleeps, and other programs run. (OpenMP's own looks
//     for milliseconds.) Waking up takes longer than a loop, so a step calls early.
//
// Compiled before the other files. A loop that begins while another runs (of another thread of
// Python) has one thread.

#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifdef __clang__
#error clang asks for the threads of LLVM's OpenMP: CC=gcc
#endif
#define HIDDEN __attribute__((visibility("hidden")))    // not PyTorch's functions of these names
// SPIN: nanoseconds that who waits looks around. REST: microseconds that who was interrupted rests.
enum { SPIN = 100000, REST = 20000 };

int threads = 1;                                    // native.py says how many
static int started = 1;                             // of them; the caller is the first
static void (*body)(void *);                        // the loop, and what it knows
static void *known;
static _Atomic int all, left, unfinished;           // its parts: all, not begun, not finished
static _Atomic int loops;                           // how many there have been
static _Atomic int sleepers, caller_sleeps;
static atomic_flag running = ATOMIC_FLAG_INIT;
static _Thread_local int part, num_parts = 1;       // of this thread

HIDDEN int omp_get_thread_num(void) { return part; }
HIDDEN int omp_get_num_threads(void) { return num_parts; }

static long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

// Return when *word is not `value`, or for no reason.
static void wait_for(_Atomic int *word, int value, _Atomic int *sleeping) {
    for (long end = now() + SPIN; now() < end; ) {
        if (*word != value) return;
#ifdef __x86_64__
        for (int i = 0; i < 8; i++) __builtin_ia32_pause();
#endif
    }
    ++*sleeping;
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, 0);     // looks at *word once more
    --*sleeping;
}

static void wake(_Atomic int *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX); }

// Take parts until none is left. A loop does not end before a part that has been taken, so what
// is read after `left` belongs to the same loop.
static void take_parts(void) {
    for (int n = left; n > 0; )
        if (atomic_compare_exchange_weak(&left, &n, n - 1)) {
            num_parts = all;
            part = num_parts - n;
            body(known);
            if (--unfinished == 0 && caller_sleeps) wake(&unfinished);
            n = left;
        }
}

// How often another program has taken this thread's processor.
static long interruptions(void) {
    struct rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_nivcsw;
}

static void *work(void *number) {
    long before = interruptions();
    for (int seen = loops; ; seen = loops) {
        if ((long)number < threads) take_parts();
        if (interruptions() > before) {
            usleep(REST);
            before = interruptions();
        } else if (seen == loops) wait_for(&loops, seen, &sleepers);
    }
    return 0;
}

// A loop comes, or comes soon: who sleeps gets up.
static void call_threads(void) {
    loops++;
    if (sleepers) wake(&loops);
}

HIDDEN void GOMP_parallel(void (*function)(void *), void *data, unsigned wanted, unsigned flags) {
    if (wanted == 1 || threads == 1 || atomic_flag_test_and_set(&running)) {
        int outer = part, outer_parts = num_parts;
        part = 0, num_parts = 1;
        function(data);
        part = outer, num_parts = outer_parts;
        return;
    }
    for (pthread_t thread; started < threads; started++) {
        if (pthread_create(&thread, 0, work, (void *)(long)started)) break;
        pthread_detach(thread);
    }
    body = function, known = data;
    all = unfinished = threads;
    left = all;
    call_threads();
    take_parts();
    for (int n; (n = unfinished) > 0; ) wait_for(&unfinished, n, &caller_sleeps);
    part = 0, num_parts = 1;
    atomic_flag_clear(&running);
}
