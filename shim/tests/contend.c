/* Many processes and threads at one quota, over libstubkfd.so, which keeps the truth (STUB_HELD).
 *
 *   contend race GPU BYTES ROUNDS          two processes ask for BYTES at the same moment; prints rounds won by 0, 1, 2
 *   contend mixed GPU PROCS THREADS LOOPS SMALL BIG   allocations of up to SMALL bytes, two at a time, in all but one process,
 *                                          which asks for BIG again and again; prints refusals of small ones
 *   contend hold GPU MOST LOOPS            one process that takes and gives random amounts for ever (to be killed)
 *   contend signals GPU BYTES LOOPS        takes and gives, interrupted all the time by a handler that does so as well; prints
 *                                          how often the handler was granted memory and how often refused
 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../src/kfd.h"

static uint32_t gpu;
struct shared { _Atomic uint64_t round[2], won[2], refused, done; };
static struct shared *shared;

static int take(uint64_t bytes, uint64_t *handle) {
    struct kfd_alloc_memory a = {.bytes = bytes, .gpu_id = gpu, .flags = 0xb0000001u};
    if (ioctl(1000, KFD_ALLOC_MEMORY, &a)) return -1;
    *handle = a.handle;
    return 0;
}
static void give(uint64_t handle) {
    struct kfd_free_memory a = {handle};
    if (ioctl(1000, KFD_FREE_MEMORY, &a)) abort();
}

static uint64_t draw(uint64_t *seed) {
    *seed ^= *seed << 13, *seed ^= *seed >> 7, *seed ^= *seed << 17;
    return *seed;
}

static void meet(int who, uint64_t round) { /* both are here before either goes on */
    atomic_store(&shared->round[who], round);
    for (int spin = 0; atomic_load(&shared->round[!who]) < round; spin++)
        if (spin > 1000) sched_yield();
}

static void race(int who, uint64_t bytes, uint64_t rounds, uint64_t *results) {
    for (uint64_t i = 1; i <= rounds; i++) {
        uint64_t handle = 0;
        meet(who, 3 * i);
        int won = !take(bytes, &handle);
        atomic_store(&shared->won[who], won);
        meet(who, 3 * i + 1);
        if (!who) results[atomic_load(&shared->won[0]) + atomic_load(&shared->won[1])]++;
        if (won) give(handle);
        meet(who, 3 * i + 2);
    }
}

static struct { uint64_t loops, small, big; int greedy, process; } plan;
static void *work(void *index) {
    uint64_t seed = 88172645463325252ULL + (uintptr_t)index * 7919 + plan.process * 104729, handle, last = 0, refused = 0, done = 0;
    for (uint64_t i = 0; i < plan.loops; i++) {
        uint64_t bytes = plan.greedy ? plan.big : draw(&seed) % plan.small / 4096 * 4096 + 4096;
        if (take(bytes, &handle)) refused++;
        else {
            if (last) give(last); /* each thread holds one allocation while it asks for the next */
            last = handle, done++;
            if (plan.greedy) give(last), last = 0;
        }
    }
    if (last) give(last);
    if (!plan.greedy) atomic_fetch_add(&shared->refused, refused), atomic_fetch_add(&shared->done, done);
    return 0;
}

static volatile uint64_t interrupt_bytes, granted, denied;
static void interrupt(int number) {
    uint64_t handle;
    int error = errno;
    (void)number;
    if (take(interrupt_bytes, &handle)) denied++;
    else give(handle), granted++;
    errno = error;
}

int main(int argc, char **argv) {
    shared = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    gpu = strtoul(argv[2], 0, 0);
    uint64_t n[9] = {0};
    for (int i = 3; i < argc && i < 9; i++) n[i] = strtoull(argv[i], 0, 0);
    if (!strcmp(argv[1], "race")) {
        uint64_t results[3] = {0};
        if (!fork()) race(1, n[3], n[4], results), _exit(0);
        race(0, n[3], n[4], results);
        wait(0);
        printf("%llu %llu %llu\n", (unsigned long long)results[0], (unsigned long long)results[1], (unsigned long long)results[2]);
    } else if (!strcmp(argv[1], "mixed")) {
        for (uint64_t p = 0; p < n[3]; p++) {
            if (fork()) continue;
            pthread_t threads[64];
            plan.loops = n[5], plan.small = n[6], plan.big = n[7], plan.greedy = p == 0 && n[7], plan.process = (int)p;
            for (uint64_t t = 0; t < n[4]; t++) pthread_create(&threads[t], 0, work, (void *)t);
            for (uint64_t t = 0; t < n[4]; t++) pthread_join(threads[t], 0);
            _exit(0);
        }
        while (wait(0) > 0 || errno == EINTR) {}
        printf("%llu %llu\n", (unsigned long long)shared->refused, (unsigned long long)shared->done);
    } else if (!strcmp(argv[1], "signals")) {
        struct itimerval often = {{0, 50}, {0, 50}};
        uint64_t first; /* before the first signal, or it could find the stub half started */
        if (!take(n[3], &first)) give(first);
        interrupt_bytes = n[3];
        signal(SIGALRM, interrupt);
        setitimer(ITIMER_REAL, &often, 0);
        for (uint64_t i = 0, handle; i < n[4] || granted + denied < 1000 || !denied; i++)
            if (!take(n[3], &handle)) give(handle);
        memset(&often, 0, sizeof often);
        setitimer(ITIMER_REAL, &often, 0);
        printf("%llu %llu\n", (unsigned long long)granted, (unsigned long long)denied);
    } else {
        uint64_t seed = getpid() * 2654435761ULL + 1, handles[64];
        int count = 0;
        for (uint64_t i = 0; i < n[4]; i++) {
            if (count < 64 && draw(&seed) % 3) {
                if (!take(4096 + draw(&seed) % n[3] / 4096 * 4096, &handles[count])) count++;
            } else if (count)
                give(handles[--count]);
        }
    }
    return 0;
}
