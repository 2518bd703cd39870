/* Eight processes at one quota, and somebody is always being killed.
 *
 *   AMDVGPU_SLICE_DIR=... chaos GPU QUOTA ROUNDS SEED
 *
 * Each round kills one at a random moment and starts another in its place. The gate's own code is linked in, above a
 * driver that keeps the truth: a word for each process with the bytes it was really given. Prints
 * {"rounds", "granted", "refused", "over": moments above the quota, "most_bytes", "left_bytes": charged when all are dead}.
 *
 * The truth has to be read as of one moment, and the dead hold nothing: see over_quota. */
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../src/memory.h"

#define WORKERS 8
#define PAGE_BITS 40 /* pages held, below; above them a count of changes, so that two equal readings mean no change */
#define PAGES(word) ((word) & ((1ULL << PAGE_BITS) - 1))

static struct { _Atomic uint64_t held[WORKERS]; _Atomic pid_t pid[WORKERS]; _Atomic uint64_t granted, refused, over, most; } *truth;
static uint64_t quota, seed;
static uint32_t gpu;
static int self;

static uint64_t draw(void) {
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return seed;
}

static void hold(int who, int64_t pages) {
    uint64_t word = atomic_load(&truth->held[who]), next;
    do next = ((word >> PAGE_BITS) + 1) << PAGE_BITS | (PAGES(word) + (uint64_t)pages);
    while (!atomic_compare_exchange_weak(&truth->held[who], &word, next));
}

/* Ended, if only as a zombie: the driver has taken its memory back. */
static int is_dead(pid_t pid) {
    char path[32], text[256] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file) return 1;
    if (!fgets(text, sizeof text, file)) *text = 0;
    fclose(file);
    const char *end = strrchr(text, ')');
    return !end || end[2] == 'Z' || end[2] == 'X';
}

/* Whether the living hold more than the quota at some moment during this call. */
static int over_quota(void) {
    for (;;) {
        uint64_t first[WORKERS], sum = 0;
        pid_t pid[WORKERS];
        int same = 1, died = 0;
        for (int i = 0; i < WORKERS; i++) first[i] = atomic_load(&truth->held[i]), pid[i] = atomic_load(&truth->pid[i]);
        for (int i = 0; i < WORKERS; i++) same &= first[i] == atomic_load(&truth->held[i]), sum += PAGES(first[i]) * 4096;
        if (!same) continue;
        uint64_t most = atomic_load(&truth->most);
        if (sum <= quota) {
            while (most < sum && !atomic_compare_exchange_weak(&truth->most, &most, sum)) {}
            return 0;
        }
        /* Whoever is alive now was so then. If somebody has died meanwhile, forget what it held and look again. */
        for (int i = 0; i < WORKERS; i++)
            if (PAGES(first[i]) && pid[i] && is_dead(pid[i])) {
                uint64_t word = first[i];
                atomic_compare_exchange_strong(&truth->held[i], &word, ((word >> PAGE_BITS) + 1) << PAGE_BITS);
                died = 1;
            }
        if (!died) return 1;
    }
}

static uint64_t next_handle, bytes_of[64];
static int driver(int fd, unsigned long request, void *argument) {
    (void)fd;
    if (_IOC_NR(request) == _IOC_NR(KFD_ALLOC_MEMORY)) {
        struct kfd_alloc_memory *asked = argument;
        if (draw() % 64 == 0) {
            errno = ENOMEM;
            return -1;
        }
        while (bytes_of[next_handle % 64]) next_handle++;
        asked->handle = next_handle++;
        bytes_of[asked->handle % 64] = asked->bytes;
        hold(self, (int64_t)(asked->bytes / 4096));
        atomic_fetch_add(&truth->granted, 1);
        if (over_quota()) atomic_fetch_add(&truth->over, 1);
    } else if (_IOC_NR(request) == _IOC_NR(KFD_FREE_MEMORY)) {
        struct kfd_free_memory *asked = argument;
        hold(self, -(int64_t)(bytes_of[asked->handle % 64] / 4096));
        bytes_of[asked->handle % 64] = 0;
    } else if (_IOC_NR(request) == _IOC_NR(KFD_AVAILABLE_MEMORY))
        ((struct kfd_available_memory *)argument)->available = UINT64_MAX;
    return 0;
}

static void work(void) {
    uint64_t handles[32];
    int count = 0;
    for (;;) {
        if (count < 32 && draw() % 3) {
            struct kfd_alloc_memory asked = {.bytes = (draw() % (quota / 4) / 4096 + 1) * 4096, .gpu_id = gpu, .flags = 0xb0000001u};
            if (!avg_alloc_memory(3, KFD_ALLOC_MEMORY, &asked, driver)) handles[count++] = asked.handle;
            else atomic_fetch_add(&truth->refused, 1);
        } else if (count) {
            struct kfd_free_memory asked = {handles[--count]};
            avg_free_memory(3, KFD_FREE_MEMORY, &asked, driver);
        }
    }
}

static void start(int who) {
    uint64_t its = draw();
    pid_t parent = getpid(), child = fork();
    if (child < 0) perror("fork"), exit(2);
    if (!child) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(0);
        self = who, seed = its | 1;
        atomic_store(&truth->pid[who], getpid());
        work();
    }
    atomic_store(&truth->pid[who], child);
}

int main(int argc, char **argv) {
    if (argc < 5) return 2;
    gpu = (uint32_t)strtoul(argv[1], 0, 0), quota = strtoull(argv[2], 0, 0), seed = strtoull(argv[4], 0, 0) * 2654435761u + 1;
    uint64_t rounds = strtoull(argv[3], 0, 0);
    truth = mmap(0, sizeof *truth, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t children[WORKERS];
    for (int i = 0; i < WORKERS; i++) start(i), children[i] = atomic_load(&truth->pid[i]);
    for (uint64_t round = 0; round < rounds; round++) {
        int who = (int)(draw() % WORKERS);
        uint64_t until = atomic_load(&truth->granted) + atomic_load(&truth->refused) + draw() % 64;
        while (atomic_load(&truth->granted) + atomic_load(&truth->refused) < until) sched_yield();
        kill(children[who], SIGKILL);
        if (waitpid(children[who], 0, 0) != children[who]) return 2;
        for (uint64_t word = atomic_load(&truth->held[who]); PAGES(word) &&
             !atomic_compare_exchange_weak(&truth->held[who], &word, ((word >> PAGE_BITS) + 1) << PAGE_BITS);) {}
        start(who), children[who] = atomic_load(&truth->pid[who]);
    }
    for (int i = 0; i < WORKERS; i++) kill(children[i], SIGKILL);
    for (int i = 0; i < WORKERS; i++) waitpid(children[i], 0, 0);
    struct kfd_available_memory available = {0, gpu, 0};
    avg_available_memory(3, KFD_AVAILABLE_MEMORY, &available, driver);
    printf("{\"rounds\": %llu, \"granted\": %llu, \"refused\": %llu, \"over\": %llu, \"most_bytes\": %llu, \"left_bytes\": %llu}\n",
           (unsigned long long)rounds, (unsigned long long)truth->granted, (unsigned long long)truth->refused,
           (unsigned long long)truth->over, (unsigned long long)truth->most, (unsigned long long)(quota - available.available));
    return 0;
}
