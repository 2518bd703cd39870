/* Two processes at the threshold of the scratch reserve, as ROCr behaves there: it asks what is free, and if that is more
 * than eight times 140 MiB it asks for 140 MiB which it must get, or it ends the process.
 *
 *   LD_PRELOAD="libamdvgpu.so libsoftkfd.so" chaos_reserve ROUNDS
 *
 * Each round two new processes do so at the same moment, and each then takes as much as it was told was free. Prints
 * {"rounds", "reserves": asked for, "aborts": of them refused}.
 * HIP 5.2.3 does not ask AVAILABLE_MEMORY, so this plays the requests by hand. */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../src/kfd.h"

#define TOPOLOGY "/sys/devices/virtual/kfd/kfd/topology/nodes"
#define RESERVE (140ULL << 20)
struct acquire_vm { uint32_t drm_fd, gpu_id; };
#define KFD_ACQUIRE_VM _IOW('K', 0x15, struct acquire_vm)

static struct { _Atomic int ready, reserves, aborts, failed; } *shared;

static uint64_t number_in(const char *path, const char *key) {
    char line[256], name[64];
    unsigned long long value = 0, found = 0;
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file)) {
        if (!key) found = strtoull(line, NULL, 10);
        else if (sscanf(line, "%63s %llu", name, &value) == 2 && !strcmp(name, key)) found = value;
    }
    if (file) fclose(file);
    return found;
}

static int take(int kfd, uint32_t gpu, uint64_t bytes, uint32_t flags) {
    void *va = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    struct kfd_alloc_memory asked = {.va = (uintptr_t)va, .bytes = bytes, .gpu_id = gpu, .flags = flags};
    return ioctl(kfd, KFD_ALLOC_MEMORY, &asked);
}

static int play(int round) {
    char path[128];
    uint32_t gpu = 0;
    uint64_t minor = 0;
    for (int node = 0; node < 16 && !gpu; node++) {
        snprintf(path, sizeof path, TOPOLOGY "/%d/gpu_id", node);
        gpu = (uint32_t)number_in(path, NULL);
        snprintf(path, sizeof path, TOPOLOGY "/%d/properties", node);
        if (gpu) minor = number_in(path, "drm_render_minor");
    }
    snprintf(path, sizeof path, "/dev/dri/renderD%d", (int)minor);
    int kfd = open("/dev/kfd", O_RDWR | O_CLOEXEC), drm = open(path, O_RDWR | O_CLOEXEC);
    struct acquire_vm vm = {(uint32_t)drm, gpu};
    if (!gpu || kfd < 0 || drm < 0 || ioctl(kfd, KFD_ACQUIRE_VM, &vm)) return -1;
    atomic_fetch_add(&shared->ready, 1);
    for (int spin = 0; atomic_load(&shared->ready) < 2; spin++)
        if (spin > 1000) sched_yield();
    struct kfd_available_memory available = {0, gpu, 0};
    if (ioctl(kfd, KFD_AVAILABLE_MEMORY, &available)) return -1;
    for (int i = 0; i < round % 7; i++) sched_yield(); /* the other may come between */
    int wanted = available.available > 8 * RESERVE;
    if (wanted) {
        atomic_fetch_add(&shared->reserves, 1);
        if (take(kfd, gpu, RESERVE, 0x90000001u)) atomic_fetch_add(&shared->aborts, 1);
    }
    take(kfd, gpu, (available.available - (wanted ? RESERVE : 0)) & ~((2ULL << 20) - 1), 0xb0000001u);
    return wanted;
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    int rounds = atoi(argv[1]);
    shared = mmap(0, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int round = 0; round < rounds; round++) {
        atomic_store(&shared->ready, 0);
        for (int i = 0; i < 2; i++)
            if (!fork()) {
                int wanted = play(round);
                if (wanted < 0) fprintf(stderr, "chaos_reserve: %s\n", strerror(errno)), atomic_store(&shared->failed, 1), atomic_store(&shared->ready, 2);
                _exit(0);
            }
        for (int i = 0; i < 2; i++) wait(NULL);
        if (shared->failed) return 1;
    }
    printf("{\"rounds\": %d, \"reserves\": %d, \"aborts\": %d}\n", rounds, shared->reserves, shared->aborts);
    return 0;
}
