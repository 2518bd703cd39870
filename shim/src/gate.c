/* The entry points: what the dynamic linker binds the program's calls to.
 *
 * libamdvgpu.so stands between a program and two functions of libc, `ioctl` and `fopen`. Every way of taking VRAM that
 * ROCm has, in every version, passes through the first as a request on /dev/kfd; the second is how it learns the size of
 * a GPU. See shim/README.md for what follows from that and for what does not pass here.
 *
 * Rules of a guest in a foreign process, kept throughout: no malloc, no stdio but the two calls below on the caller's
 * own file, no thread-local storage, no dlsym; nothing is waited for without a bound; errno is the caller's; works
 * before any constructor has run; nothing is opened or said in a process that asks the KFD for nothing. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>

#include "drm.h"
#include "environ.h"
#include "gate.h"
#include "memory.h"
#include "next.h"
#include "os.h"
#include "queue.h"

#include "../front/front.h"

#define EXPORTED __attribute__((visibility("default")))

/* Two copies of this library in one process (a copied file, in the preload file and in LD_PRELOAD) would charge twice.
 * Both export this name; the dynamic linker binds the reference below to the first one in search order, while the alias
 * is each copy's own: where they differ, this copy is not the first, and passes everything on. */
EXPORTED char avg_first_copy;
extern char avg_this_copy __attribute__((alias("avg_first_copy"), visibility("hidden")));

static int is_passive(void) {
    char *first = &avg_first_copy, *ours = &avg_this_copy;
    __asm__("" : "+r"(first), "+r"(ours)); /* or the compiler knows better */
    return first != ours;
}

/* ---------------------------------------------------------------------------------------------------------- ioctl */

typedef int ioctl_function(int, unsigned long, ...);
static ioctl_function *next_ioctl;

/* The next definition, because another interposer (an emulator, a tracer) may stand behind us. Before everything is
 * loaded, and where there is none, the kernel itself. */
static int pass(int fd, unsigned long request, void *argument) {
    ioctl_function *next = __atomic_load_n(&next_ioctl, __ATOMIC_ACQUIRE);
    if (__builtin_expect(!next, 0)) {
        next = (ioctl_function *)avg_next("ioctl");
        if (!next) {
            long result = AVG_SYS(ioctl, fd, request, argument, 0);
            if (result < 0) {
                errno = (int)-result;
                return -1;
            }
            return (int)result;
        }
        __atomic_store_n(&next_ioctl, next, __ATOMIC_RELEASE);
    }
    return next(fd, request, argument);
}

/* Requests of a render node. */
static int on_drm(int fd, unsigned long request, void *argument, avg_request *next) {
    switch (_IOC_NR(request)) {
    case _IOC_NR(DRM_GEM_CLOSE):
        if (kfd_is(request, DRM_GEM_CLOSE)) return avg_gem_close(fd, request, argument, next);
        break;
    case _IOC_NR(DRM_GEM_CREATE):
        if (kfd_is(request, DRM_GEM_CREATE)) return avg_gem_create(fd, request, argument, next);
        break;
    case _IOC_NR(DRM_INFO):
        if (kfd_is(request, DRM_INFO)) return avg_drm_info(fd, request, argument, next);
        break;
    case _IOC_NR(DRM_USER_QUEUE):
        if (kfd_is(request, DRM_USER_QUEUE)) return avg_user_queue(fd, request, argument, next);
        break;
    }
    return next(fd, request, argument);
}

int avg_request_of_interest(unsigned long request, const void *argument) {
    if (__builtin_expect((_IOC_TYPE(request) != 'K' && _IOC_TYPE(request) != 'd') || !argument || !_IOC_DIR(request), 1))
        return request == KFD_CREATE_PROCESS;
    return 1;
}

int avg_gate(int fd, unsigned long request, void *argument, avg_request *next) {
    if (_IOC_TYPE(request) == 'd') return on_drm(fd, request, argument, next);
    if (request == KFD_CREATE_PROCESS) return avg_other_door(fd, request, argument, next);
    switch (_IOC_NR(request)) {
    case _IOC_NR(KFD_ALLOC_MEMORY):
        if (kfd_is(request, KFD_ALLOC_MEMORY)) {
            int result = avg_alloc_memory(fd, request, argument, next);
            avg_front_tell(argument, result);
            return result;
        }
        break;
    case _IOC_NR(KFD_FREE_MEMORY):
        if (kfd_is(request, KFD_FREE_MEMORY)) return avg_free_memory(fd, request, argument, next);
        break;
    case _IOC_NR(KFD_AVAILABLE_MEMORY):
        if (kfd_is(request, KFD_AVAILABLE_MEMORY)) return avg_available_memory(fd, request, argument, next);
        break;
    case _IOC_NR(KFD_CREATE_QUEUE):
        if (kfd_is(request, KFD_CREATE_QUEUE)) return avg_create_queue(fd, request, argument, next);
        break;
    case _IOC_NR(KFD_UPDATE_QUEUE):
        if (kfd_is(request, KFD_UPDATE_QUEUE)) return avg_update_queue(fd, request, argument, next);
        break;
    case _IOC_NR(KFD_DESTROY_QUEUE):
        if (kfd_is(request, KFD_DESTROY_QUEUE)) return avg_destroy_queue(fd, request, argument, next);
        break;
    case _IOC_NR(KFD_SET_CU_MASK):
        if (kfd_is(request, KFD_SET_CU_MASK)) return avg_set_cu_mask(fd, request, argument, next);
        break;
    case _IOC_NR(KFD_CRIU):
        if (kfd_is(request, KFD_CRIU) && ((struct kfd_criu *)argument)->op == KFD_CRIU_RESTORE)
            return avg_other_door(fd, request, argument, next);
        break;
    }
    return next(fd, request, argument);
}

EXPORTED int ioctl(int fd, unsigned long request, ...) {
    va_list arguments;
    va_start(arguments, request);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    if (!avg_request_of_interest(request, argument) || is_passive()) return pass(fd, request, argument);
    return avg_gate(fd, request, argument, pass);
}

/* ---------------------------------------------------------------------------------------------------------- fopen */

/* `path` up to the number N of .../topology/nodes/N/mem_banks/0/properties, or -1. */
static long memory_bank_node(const char *path) {
    static const char tail[] = "/mem_banks/0/properties", nodes[] = "/topology/nodes/";
    size_t length = path ? avg_length(path) : 0;
    if (length < sizeof tail + sizeof nodes || !avg_equal(path + length - (sizeof tail - 1), tail)) return -1;
    const char *digits = path + length - (sizeof tail - 1);
    const char *end = digits;
    while (digits > path && digits[-1] >= '0' && digits[-1] <= '9') digits--;
    if (digits == end || (size_t)(digits - path) < sizeof nodes - 1 || !avg_starts(digits - (sizeof nodes - 1), nodes)) return -1;
    return (long)avg_number(&digits);
}

/* The file's text with the figures of the slice: of a memory bank's file the size, of a driver's memory file its one
 * number (`node` -1). The caller keeps its FILE; only what the descriptor under it leads to is exchanged, before anything
 * was read. Where that fails the file stays as it was: it shows, it does not limit. */
static void show_slice(FILE *file, const char *path, long node) {
    char text[4096], changed[4200], *end = changed + sizeof changed - 1, *at = changed;
    int fd = fileno(file);
    long length = AVG_SYS(pread64, fd, text, sizeof text - 1, 0);
    if (length <= 0) return;
    text[length] = 0;
    for (const char *line = text; *line;) {
        const char *stop = line, *digits = line;
        while (*stop && *stop != '\n') stop++;
        if (node < 0 && line == text) {
            uint64_t own = avg_number(&digits), shown = avg_memory_file_value(path, own);
            if (shown == own) return;
            at = avg_put_number(at, end, shown);
        } else if (node >= 0 && avg_starts(line, "size_in_bytes ")) {
            digits = line + sizeof "size_in_bytes " - 1;
            at = avg_put(at, end, "size_in_bytes ");
            at = avg_put_number(at, end, avg_total_of_node((uint32_t)node, avg_number(&digits)));
        } else
            while (line < stop && at < end) *at++ = *line++;
        if (*stop && at < end) *at++ = '\n';
        line = *stop ? stop + 1 : stop;
    }
    int memory = AVG_SYS(memfd_create, "amdvgpu-memory-bank", 1 /* MFD_CLOEXEC */, 0, 0);
    if (memory < 0) return;
    if (AVG_SYS(write, memory, changed, at - changed, 0) == at - changed && !AVG_SYS(lseek, memory, 0, 0, 0))
        AVG_SYS(dup3, memory, fd, AVG_SYS(fcntl, fd, F_GETFD, 0, 0) & FD_CLOEXEC ? O_CLOEXEC : 0, 0);
    avg_close(memory);
}

void avg_opened(FILE *file, const char *path) {
    long node = memory_bank_node(path);
    if (node < 0 && !avg_is_memory_file(path)) return;
    int error = errno;
    show_slice(file, path, node);
    errno = error;
}

typedef FILE *fopen_function(const char *, const char *);

static FILE *open_with(fopen_function **next, const char *name, const char *path, const char *mode) {
    fopen_function *found = __atomic_load_n(next, __ATOMIC_ACQUIRE);
    if (__builtin_expect(!found, 0)) {
        found = (fopen_function *)avg_next(name);
        if (!found) {
            errno = ENOSYS; /* nobody behind us has it: then nobody can have called it by way of libc */
            return NULL;
        }
        __atomic_store_n(next, found, __ATOMIC_RELEASE);
    }
    /* A runtime of HIP that is being loaded has a library open a file before anybody can have called it. */
    if (!is_passive()) avg_front_look();
    FILE *file = found(path, mode);
    if (file && !is_passive()) avg_opened(file, path);
    return file;
}

EXPORTED FILE *fopen(const char *path, const char *mode) {
    static fopen_function *next;
    return open_with(&next, "fopen", path, mode);
}

EXPORTED FILE *fopen64(const char *path, const char *mode) {
    static fopen_function *next;
    return open_with(&next, "fopen64", path, mode);
}

/* ---------------------------------------------------------------------------------------------------------- start */

__attribute__((constructor)) static void start(int argc, char **argv, char **envp) {
    if (is_passive()) return;
    avg_repair_environment(argc, argv, envp);
    avg_front_look();
}
