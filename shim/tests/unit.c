/* The gate's own code under the sanitizers: random requests, true and false, against slices that are whole or damaged.
 *
 *   AMDVGPU_SLICE_DIR=... unit SEED STEPS [tame]   prints "ok"; anything else is a finding
 *
 * The preloaded library cannot be built with them (they bring malloc and threads into the loader), so the same sources
 * are linked into a program here, with a driver that answers at random.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../src/drm.h"
#include "../src/environ.h"
#include "../src/queue.h"
#include "../src/text.h"

static __thread uint64_t seed;
static uint64_t draw(void) {
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return seed;
}

static const char *node; /* a file with the number of a render node */
static uint64_t handles;
static int tame; /* no pointers to nowhere: qemu's user mode lacks the system call that survives them */
static int driver(int fd, unsigned long request, void *argument) {
    (void)fd;
    if (draw() % 16 == 0) {
        errno = draw() % 2 ? EINVAL : ENOMEM;
        return -1;
    }
    if (_IOC_TYPE(request) == 'd') {
        if (_IOC_NR(request) == _IOC_NR(DRM_GEM_CREATE)) *(uint32_t *)argument = (uint32_t)(draw() % 64);
        return 0;
    }
    if (_IOC_NR(request) == _IOC_NR(KFD_ALLOC_MEMORY)) ((struct kfd_alloc_memory *)argument)->handle = __atomic_add_fetch(&handles, 1, __ATOMIC_RELAXED);
    if (_IOC_NR(request) == _IOC_NR(KFD_CREATE_QUEUE)) ((struct kfd_create_queue *)argument)->queue_id = (uint32_t)(draw() % 1100);
    if (_IOC_NR(request) == _IOC_NR(KFD_AVAILABLE_MEMORY)) ((struct kfd_available_memory *)argument)->available = draw();
    return 0;
}

static void step(uint64_t *mine, int room) {
    static const uint32_t gpus[] = {1000, 1001, 7, 0, 0xffffffff};
    uint32_t gpu = gpus[draw() % 5], words[64];
    uint64_t bytes = draw() >> draw() % 64;
    int place = (int)(draw() % (uint64_t)room);
    switch (draw() % 12) {
    case 8: {
        struct drm_gem_create g = {.bytes = bytes, .domains = draw() % 8};
        avg_gem_create((int)(draw() % 80), DRM_GEM_CREATE, &g, driver);
        break;
    }
    case 9: {
        struct drm_gem_close g = {(uint32_t)(draw() % 64), 0};
        avg_gem_close((int)(draw() % 80), DRM_GEM_CLOSE, &g, driver);
        break;
    }
    case 10: {
        uint64_t told[12];
        struct drm_info i = {(uintptr_t)told, (uint32_t)(draw() % (sizeof told + 1)), (uint32_t)(draw() % 32), {0}};
        avg_drm_info((int)(draw() % 80), DRM_INFO, &i, driver);
        struct drm_user_queue q[8] = {{(uint32_t)(draw() % 3), 0, (uint32_t)(draw() % 3)}};
        avg_user_queue((int)(draw() % 80), DRM_USER_QUEUE, q, driver);
        break;
    }
    case 11: {
        /* A third of the descriptors lead to the slice's render nodes, where there are any; they come and go. */
        int fd = 3 + (int)(draw() % 77);
        if (draw() % 4 && node) {
            int opened = open(node, O_PATH | O_CLOEXEC);
            if (opened >= 0 && opened != fd) dup2(opened, fd), close(opened);
        } else close(fd);
        break;
    }
    case 0:
    case 1: {
        struct kfd_alloc_memory a = {.bytes = bytes, .gpu_id = gpu, .flags = (uint32_t)draw() | (draw() % 4 != 0)};
        if (!avg_alloc_memory(3, KFD_ALLOC_MEMORY, &a, driver)) mine[place] = a.handle;
        break;
    }
    case 2: {
        struct kfd_free_memory f = {draw() % 4 ? mine[place] : draw()};
        avg_free_memory(3, KFD_FREE_MEMORY, &f, driver);
        break;
    }
    case 3: {
        struct kfd_available_memory a = {0, gpu, 0};
        avg_available_memory(3, KFD_AVAILABLE_MEMORY, &a, driver);
        break;
    }
    case 4: {
        struct kfd_create_queue q = {.gpu_id = gpu, .type = (uint32_t)(draw() % 5), .priority = (uint32_t)draw()};
        avg_create_queue(3, KFD_CREATE_QUEUE, &q, driver);
        break;
    }
    case 5: {
        for (int i = 0; i < 64; i++) words[i] = (uint32_t)(draw() & draw());
        struct kfd_set_cu_mask m = {(uint32_t)(draw() % 1100), (uint32_t)(draw() % 65) * 32, draw() % 8 || tame ? (uintptr_t)words : draw()};
        avg_set_cu_mask(3, KFD_SET_CU_MASK, &m, driver);
        break;
    }
    case 6: {
        struct kfd_update_queue u = {.queue_id = (uint32_t)(draw() % 1100), .priority = (uint32_t)draw()};
        avg_update_queue(3, KFD_UPDATE_QUEUE, &u, driver);
        break;
    }
    default: {
        struct kfd_destroy_queue d = {(uint32_t)(draw() % 1100), 0};
        avg_destroy_queue(3, KFD_DESTROY_QUEUE, &d, driver);
        avg_total_of_node((uint32_t)(draw() % 4), bytes);
    }
    }
}

static uint64_t first_seed, steps;
static void *work(void *index) {
    uint64_t mine[256] = {0};
    seed = first_seed * 2654435761u + (uintptr_t)index * 40503 + 1;
    for (uint64_t i = 0; i < steps; i++) step(mine, 256);
    char text[24];
    struct avg_mask mask;
    for (uint64_t i = 0; i < steps; i++) {
        size_t length = draw() % sizeof text;
        for (size_t at = 0; at < length; at++) text[at] = "0123456789.-,kKmMgGtTiIbB \t\xff"[draw() % 28];
        text[length] = 0;
        avg_parse_size(text);
        avg_parse_cus(text, &mask);
    }
    return NULL;
}

int main(int argc, char **argv) {
    node = argc > 3 ? argv[3] : NULL;
    first_seed = strtoull(argv[1], 0, 0), steps = strtoull(argv[2], 0, 0), tame = argc > 3;
    avg_repair_environment(argc, argv, argv + argc + 1);
    pthread_t threads[3];
    pid_t child = fork(); /* two processes of three threads */
    for (uintptr_t i = 0; i < 3; i++) pthread_create(&threads[i], 0, work, (void *)(i + (child ? 0 : 10)));
    for (int i = 0; i < 3; i++) pthread_join(threads[i], 0);
    int status = 0;
    if (child) waitpid(child, &status, 0), printf("%s\n", status ? "the child failed" : "ok");
    return status != 0;
}
