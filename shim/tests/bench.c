/* Nanoseconds of one ALLOC+FREE pair, and of an ioctl that is none of the gate's, over libstubkfd.so.
 *
 *   LD_PRELOAD="libstubkfd.so" gatebench 0x1 4096 200000                                     without the gate
 *   AMDVGPU_SLICE_DIR=... LD_PRELOAD="libamdvgpu.so libstubkfd.so" gatebench 0x1 4096 200000   with it
 *   ... gatebench GPU BYTES LOOPS NEIGHBOURS     with that many other live slots in the ledger
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../src/kfd.h"

/* Processor time: a busy machine must not count as cost of the gate. */
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}
static int pair(uint32_t gpu, uint64_t bytes) {
    struct kfd_alloc_memory a = {.bytes = bytes, .gpu_id = gpu, .flags = 0xb0000001u};
    if (ioctl(1000, KFD_ALLOC_MEMORY, &a)) return -1;
    struct kfd_free_memory f = {a.handle};
    return ioctl(1000, KFD_FREE_MEMORY, &f);
}
int main(int argc, char **argv) {
    uint32_t gpu = strtoul(argv[1], 0, 0);
    uint64_t bytes = strtoull(argv[2], 0, 0), loops = strtoull(argv[3], 0, 0);
    int neighbours = argc > 4 ? atoi(argv[4]) : 0, ready[2];
    if (pipe(ready)) return 1;
    pid_t children[128];
    for (int i = 0; i < neighbours && i < 128; i++)
        if (!(children[i] = fork())) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            struct kfd_alloc_memory a = {.bytes = 4096, .gpu_id = gpu, .flags = 0xb0000001u};
            if (ioctl(1000, KFD_ALLOC_MEMORY, &a) || write(ready[1], "x", 1) != 1) _exit(1);
            for (;;) pause();
        }
    for (int i = 0; i < neighbours; i++) {
        char byte;
        if (read(ready[0], &byte, 1) != 1) return 1;
    }
    for (uint64_t i = 0; i < loops / 10; i++)
        if (pair(gpu, bytes)) {
            perror("pair");
            return 1;
        }
    double start = now();
    for (uint64_t i = 0; i < loops; i++) pair(gpu, bytes);
    double pairs = (now() - start) / loops;
    int word;
    start = now();
    for (uint64_t i = 0; i < loops; i++) ioctl(-1, 0x541B, &word); /* FIONREAD: fails at once */
    printf("{\"pair_ns\": %.1f, \"other_ns\": %.1f}\n", pairs, (now() - start) / loops);
    for (int i = 0; i < neighbours; i++) kill(children[i], SIGKILL);
    while (wait(0) > 0) {}
    return 0;
}
