/* libstubkfd.so: a KFD that answers at once, for tests of the gate. Loaded behind it: LD_PRELOAD="libamdvgpu.so libstubkfd.so".
 *
 *   STUB_LOG=<file>          one line a request: its name and fields, and the errno answered (0: done)
 *   STUB_REFUSE=<name>:<errno>[:<after>][,...]   answer so, after that many good ones
 *   STUB_VRAM_FULL=1         every request for VRAM is answered ENOMEM, host memory is given
 *   STUB_AVAILABLE=<bytes>   what AVAILABLE_MEMORY says (default 64 GiB)
 *   STUB_HELD=<file>         shared truth: 64-bit words, [0] quota, [1] most bytes ever out at one time, [2] over-commits,
 *                            [3] bytes out. Counts each ALLOC and FREE exactly, with its own arithmetic.
 *   Render nodes: GEM_CREATE counts handles from 1 in each descriptor; INFO says 16 GiB, 12 GiB used, 256 MiB visible.
 *   STUB_ROOT=<dir>          /sys/... is opened below it
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../src/drm.h"

static int log_fd = -1, started, quick, vram_full;
static _Atomic uint64_t *held, *sizes;
static _Atomic uint64_t handles = 1;
static _Atomic uint32_t queues = 1;
static const char *refuse, *root;
static uint64_t available = 64ULL << 30;
#define SIZES (1 << 20)

static void start(void) {
    const char *text;
    started = 1;
    if ((text = getenv("STUB_LOG"))) log_fd = open(text, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if ((text = getenv("STUB_AVAILABLE"))) available = strtoull(text, 0, 0);
    if ((text = getenv("STUB_HELD"))) {
        int fd = open(text, O_RDWR | O_CLOEXEC);
        if (fd >= 0) held = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (fd >= 0) sizes = mmap(0, SIZES * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    vram_full = getenv("STUB_VRAM_FULL") != NULL;
    refuse = getenv("STUB_REFUSE");
    root = getenv("STUB_ROOT");
    quick = log_fd < 0 && !refuse;
}

static int refused(const char *name) {
    static int counts[64];
    const char *at = refuse;
    for (int i = 0; at && *at && i < 64; i++, at = strchr(at, ',') ? strchr(at, ',') + 1 : 0) {
        size_t length = strcspn(at, ":");
        if (strncmp(at, name, length) || name[length]) continue;
        int error = atoi(at + length + 1), after = 0;
        const char *second = strchr(at + length + 1, ':'), *comma = strchr(at, ',');
        if (second && (!comma || second < comma)) after = atoi(second + 1);
        if (counts[i]++ >= after) return error;
    }
    return 0;
}

static int answer(const char *name, const char *format, ...) {
    char line[512];
    int error = refused(name);
    if (log_fd >= 0) {
        int length = snprintf(line, sizeof line, "%s ", name);
        va_list list;
        va_start(list, format);
        length += vsnprintf(line + length, sizeof line - length, format, list);
        va_end(list);
        length += snprintf(line + length, sizeof line - length, " -> %d\n", error);
        if (write(log_fd, line, length) < 0) abort();
    }
    if (!error) return 0;
    errno = error;
    return -1;
}

static int kfd(unsigned long request, void *argument) {
    switch (_IOC_NR(request)) {
    case _IOC_NR(KFD_ALLOC_MEMORY): {
        struct kfd_alloc_memory *asked = argument;
        if (!quick && answer("ALLOC", "gpu=%u bytes=%llu flags=%x", asked->gpu_id, (unsigned long long)asked->bytes, asked->flags)) return -1;
        if (vram_full && asked->flags & KFD_MEMORY_VRAM) {
            errno = ENOMEM;
            return -1;
        }
        asked->handle = atomic_fetch_add(&handles, 1);
        asked->mmap_offset = 4096;
        if (held && asked->flags & KFD_MEMORY_VRAM) {
            uint64_t out = atomic_fetch_add(&held[3], asked->bytes) + asked->bytes, most = held[1];
            if (out > held[0]) atomic_fetch_add(&held[2], 1);
            while (most < out && !atomic_compare_exchange_weak(&held[1], &most, out)) {}
            sizes[asked->handle % SIZES] = asked->bytes;
        }
        return 0;
    }
    case _IOC_NR(KFD_FREE_MEMORY): {
        struct kfd_free_memory *asked = argument;
        if (!quick && answer("FREE", "handle=%llu", (unsigned long long)asked->handle)) return -1;
        if (held) atomic_fetch_sub(&held[3], atomic_exchange(&sizes[asked->handle % SIZES], 0));
        return 0;
    }
    case _IOC_NR(KFD_AVAILABLE_MEMORY): {
        struct kfd_available_memory *asked = argument;
        if (!quick && answer("AVAILABLE", "gpu=%u", asked->gpu_id)) return -1;
        asked->available = available;
        return 0;
    }
    case _IOC_NR(KFD_CREATE_QUEUE): {
        struct kfd_create_queue *asked = argument;
        if (!quick && answer("CREATE_QUEUE", "gpu=%u type=%u priority=%u", asked->gpu_id, asked->type, asked->priority)) return -1;
        asked->queue_id = atomic_fetch_add(&queues, 1);
        return 0;
    }
    case _IOC_NR(KFD_DESTROY_QUEUE):
        return quick ? 0 : answer("DESTROY_QUEUE", "queue=%u", ((struct kfd_destroy_queue *)argument)->queue_id);
    case _IOC_NR(KFD_UPDATE_QUEUE): {
        struct kfd_update_queue *asked = argument;
        return quick ? 0 : answer("UPDATE_QUEUE", "queue=%u priority=%u percentage=%u", asked->queue_id, asked->priority, asked->percentage);
    }
    case _IOC_NR(KFD_SET_CU_MASK): {
        struct kfd_set_cu_mask *asked = argument;
        char hex[300] = "";
        const uint32_t *word = (const uint32_t *)(uintptr_t)asked->mask_pointer;
        for (uint32_t i = asked->bits / 32; i-- > 0 && strlen(hex) < 280;) sprintf(hex + strlen(hex), "%08x", word ? word[i] : 0);
        return quick ? 0 : answer("SET_CU_MASK", "queue=%u bits=%u mask=%s", asked->queue_id, asked->bits, hex);
    }
    }
    return answer("OTHER", "number=%lu", (unsigned long)_IOC_NR(request));
}

static int drm(int fd, unsigned long request, void *argument) {
    static uint32_t handles_of[1024];
    uint64_t whole = 16ULL << 30, used = 12ULL << 30, seen = 256ULL << 20;
    switch (_IOC_NR(request)) {
    case _IOC_NR(DRM_GEM_CREATE): {
        struct drm_gem_create *asked = argument;
        if (answer("GEM_CREATE", "fd=%d bytes=%llu domains=%llx", fd, (unsigned long long)asked->bytes, (unsigned long long)asked->domains)) return -1;
        *(uint32_t *)asked = ++handles_of[fd % 1024];
        return 0;
    }
    case _IOC_NR(DRM_GEM_CLOSE):
        return answer("GEM_CLOSE", "fd=%d handle=%u", fd, ((struct drm_gem_close *)argument)->handle);
    case _IOC_NR(DRM_INFO): {
        struct drm_info *asked = argument;
        uint64_t *words = (uint64_t *)(uintptr_t)asked->pointer;
        uint64_t memory[12] = {whole, whole, used, whole / 4 * 3, seen, seen, seen / 2, seen, whole, whole, 0, whole};
        if (asked->query == 0x10) words[0] = used;
        else if (asked->query == 0x17) words[0] = seen / 2;
        else if (asked->query == 0x14) words[0] = whole, words[1] = seen, words[2] = whole;
        else if (asked->query == 0x19) memcpy(words, memory, sizeof memory);
        else words[0] = 7;
        return 0;
    }
    }
    return answer("OTHER_DRM", "number=%lu", (unsigned long)_IOC_NR(request));
}

int ioctl(int fd, unsigned long request, ...) {
    va_list list;
    va_start(list, request);
    void *argument = va_arg(list, void *);
    va_end(list);
    if (!started) start();
    if (_IOC_TYPE(request) == 'K' && (_IOC_DIR(request) || request == KFD_CREATE_PROCESS)) return kfd(request, argument);
    if (_IOC_TYPE(request) == 'd') return drm(fd, request, argument);
    return syscall(SYS_ioctl, fd, request, argument);
}

static const char *moved(const char *path, char *buffer, size_t room) {
    if (!started) start();
    if (!root || !path || strncmp(path, "/sys/", 5)) return path;
    snprintf(buffer, room, "%s%s", root, path);
    return buffer;
}

int open(const char *path, int flags, ...) {
    char buffer[4096];
    va_list list;
    va_start(list, flags);
    int mode = va_arg(list, int);
    va_end(list);
    if (!started && !strncmp(path, "/sys/", 5)) start();
    return syscall(SYS_openat, AT_FDCWD, started ? moved(path, buffer, sizeof buffer) : path, flags, mode);
}

FILE *fopen(const char *path, const char *mode) {
    static FILE *(*next)(const char *, const char *);
    char buffer[4096];
    if (!next) next = (FILE * (*)(const char *, const char *)) dlsym(RTLD_NEXT, "fopen");
    return next(moved(path, buffer, sizeof buffer), mode);
}
