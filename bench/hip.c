/* Times calls of the HIP runtime, for bench/gate.py: nanoseconds, the mean of the lowest tenth of all calls.
 *
 *   hip pairs BYTES LOOPS [PROCESSES THREADS]   one hipMalloc and the hipFree of it
 *   hip info LOOPS                              hipMemGetInfo
 *   hip start                                   nothing timed: one small hipMalloc and the end, to be timed from outside */
#include <hip/hip_runtime_api.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static size_t bytes;
static long loops;
static int is_info;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}
static int by_size(const void *a, const void *b) { return *(const double *)a < *(const double *)b ? -1 : *(const double *)a > *(const double *)b; }

static void *work(void *result) {
    double *took = malloc(loops * sizeof *took), sum = 0;
    for (long i = -loops / 10; i < loops; i++) {
        void *memory;
        size_t free_bytes, total;
        double start = now();
        if (is_info ? hipMemGetInfo(&free_bytes, &total) : hipMalloc(&memory, bytes) || hipFree(memory)) exit(1);
        if (i >= 0) took[i] = now() - start;
    }
    qsort(took, loops, sizeof *took, by_size);
    for (long i = 0; i < loops / 10; i++) sum += took[i];
    *(double *)result = sum / (loops / 10);
    free(took);
    return NULL;
}

int main(int argc, char **argv) {
    int processes = 1, threads = 1;
    void *memory;
    if (argc > 1 && !strcmp(argv[1], "start")) return hipMalloc(&memory, 4096) || hipFree(memory);
    if (argc < 3) return 2;
    is_info = !strcmp(argv[1], "info");
    bytes = is_info ? 0 : strtoull(argv[2], 0, 0), loops = atol(argv[is_info ? 2 : 3]);
    if (argc > 5) processes = atoi(argv[4]), threads = atoi(argv[5]);
    double *results = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0), sum = 0;
    for (int p = 0; p < processes; p++)
        if (!fork()) {
            pthread_t running[64];
            if (hipMalloc(&memory, 4096)) _exit(1);
            for (int t = 0; t < threads; t++) pthread_create(&running[t], 0, work, &results[p * threads + t]);
            for (int t = 0; t < threads; t++) pthread_join(running[t], 0);
            _exit(0);
        }
    for (int status; wait(&status) > 0;)
        if (status) return 1;
    for (int i = 0; i < processes * threads; i++) sum += results[i];
    printf("%.1f\n", sum / (processes * threads));
    return 0;
}
