/* Where a GEM handle belongs, and when its memory is gone.
 *
 * A handle counts within one opening of a render node (the kernel's drm_file), which dup and fork share and the last close
 * ends. To follow that by interposing open, dup and close would cost every program, and miss what raw system calls,
 * descriptors sent over sockets and closing on exec do. Instead the kernel is asked for the opening's own number,
 * `drm-client-id` in /proc/self/fdinfo (Linux 5.19): once when VRAM is charged, once when a handle is closed that has a
 * charge (that reading walks the file's buffers, so never for others'). Before 5.19 the descriptor's number stands for it.
 *
 * A file that is closed with handles in it gives its memory back without telling us. We find that out before we refuse
 * for lack of room and before we say what is free: the descriptors that are open now are looked at once. Until then the
 * charge stands: errs towards the quota. Kept files (an epoll set as a weak reference, a dup) were refused: a descriptor
 * of ours in a foreign process is closed by programs that tidy up, and another file then has its number.
 *
 * Imports (PRIME) are never charged: whoever made the memory is. So what is exported and then closed stays alive without
 * a charge: a written gap, as for /dev/kfd. */
#include "drm.h"

#include <errno.h>
#include <sys/sysmacros.h>

#include "next.h"
#include "os.h"

#ifndef AVG_FDINFO /* a test puts its own there */
#define AVG_FDINFO "/proc/self/fdinfo/"
#endif
#define DRM_MAJOR 226
#define FIRST_RENDER_MINOR 128

enum { NOBODYS = 1, FOREIGN }; /* verdicts on a minor that no slice covers, in place of a gpu_id (never that small) */

/* --------------------------------------------------------------------------------------------------- which GPU it is */

/* Minor of the DRM node that `fd` is open on, or -1. */
static int minor_of(int fd) {
    static int (*next_fstat)(int, struct stat *);
    struct stat status = {0};
    if (AVG_SYS(fstat, fd, &status, 0, 0)) return -1;
    if (S_ISREG(status.st_mode)) { /* amdgpu's request on a plain file: an emulator's node, which it calls a device */
        if (!next_fstat) next_fstat = (int (*)(int, struct stat *))avg_next("fstat");
        int error = errno;
        if (!next_fstat || next_fstat(fd, &status)) status.st_mode = 0;
        errno = error;
    }
    return S_ISCHR(status.st_mode) && major(status.st_rdev) == DRM_MAJOR ? (int)minor(status.st_rdev) : -1;
}

/* Where /sys/dev/char/226:<minor>/<name> leads, as text; 0 where that cannot be read. */
static int link_of(int minor, const char *name, char *text, size_t room) {
    char path[64], *end = path + sizeof path - 1, *at = avg_put(path, end, "/sys/dev/char/226:");
    avg_put(avg_put(avg_put_number(at, end, (uint64_t)minor), end, "/"), end, name);
    long length = AVG_SYS(readlinkat, AT_FDCWD, path, text, room - 1);
    if (length <= 0) return 0;
    text[length] = 0;
    return 1;
}

/* gpu_id that node `minor` belongs to; FOREIGN where it is an amdgpu that no slice covers, NOBODYS where the gate has
 * nothing to say. Looked up once a minor. */
static uint32_t gpu_of_minor(struct avg_process *process, int minor) {
    char wanted[128], found[128];
    if (minor < 0 || !process->slice_count) return NOBODYS;
    struct avg_node *known = &process->node[minor % AVG_NODES];
    if (known->minor == minor + 1) return known->gpu_id;
    uint32_t gpu_id = 0;
    int unknown = 0, card = minor < FIRST_RENDER_MINOR && link_of(minor, "device", wanted, sizeof wanted);
    for (int i = 0; i < process->slice_count && !gpu_id; i++) {
        const struct avg_account *account = &process->slice[i];
        for (uint32_t gpu = 0; gpu < account->gpu_count && !gpu_id; gpu++) {
            const struct avg_policy_gpu *entry = &account->policy->gpu[gpu];
            if (!entry->render_minor) unknown = 1; /* an older daemon's policy does not tell */
            else if ((int)entry->render_minor == minor) gpu_id = entry->kfd_gpu_id;
            else if (card && link_of((int)entry->render_minor, "device", found, sizeof found) && avg_equal(wanted, found))
                gpu_id = entry->kfd_gpu_id; /* the primary node of the same GPU */
        }
    }
    if (!gpu_id) {
        /* Refused is only what is known for certain to be an AMD GPU outside the slice: another driver's render node
         * (a desktop's own) is no concern of ours. */
        const char *name = link_of(minor, "device/driver", found, sizeof found) ? found : "";
        for (const char *at = name; *at; at++)
            if (*at == '/') name = at + 1;
        gpu_id = !unknown && avg_equal(name, "amdgpu") ? FOREIGN : NOBODYS;
    }
    *known = (struct avg_node){minor + 1, gpu_id};
    return gpu_id;
}

/* ------------------------------------------------------------------------------------------------ which opening it is */

/* The kernel's number for the opening behind `fd`; where it does not tell, one made of the descriptor, with the high
 * bit. */
static uint64_t opening_of(int fd) {
    char path[64], text[1024], *end = path + sizeof path - 1;
    avg_put_number(avg_put(path, end, AVG_FDINFO), end, (uint64_t)fd);
    if (avg_read_file(path, text, sizeof text) > 0)
        for (const char *line = text; *line;) {
            if (avg_starts(line, "drm-client-id:")) {
                line += sizeof "drm-client-id:" - 1;
                while (*line == ' ' || *line == '\t') line++;
                return avg_number(&line) & ~(1ULL << 63);
            }
            while (*line && *line != '\n') line++;
            if (*line) line++;
        }
    return 1ULL << 63 | (uint32_t)fd;
}

/* Index of the opening in the table, from 1; 0 where it is not there (and, with `make`, has no room). */
static uint32_t file_of(struct avg_process *process, uint64_t opening, int minor, int make) {
    uint32_t free = 0;
    for (uint32_t i = 0; i < AVG_FILES; i++) {
        struct avg_file *file = &process->file[i];
        if (file->charges && file->opening == opening) return i + 1;
        if (!file->charges && !free) free = i + 1;
    }
    if (make && free) process->file[free - 1] = (struct avg_file){opening, minor, 0};
    return make ? free : 0;
}

/* Give back what lay in files that are closed. Called with nothing to lose: before a refusal, or to tell what is free. */
void avg_forget_closed_files(struct avg_process *process) {
    char buffer[2048] __attribute__((aligned(8)));
    char open_now[AVG_FILES] = {0};
    if (!process->file_charges) return;
    int directory = (int)AVG_SYS(openat, AT_FDCWD, "/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    if (directory < 0) return; /* no /proc: the charges stand until the process ends */
    for (;;) {
        long length = AVG_SYS(getdents64, directory, buffer, sizeof buffer, 0);
        if (length < 0) return avg_close(directory);
        if (!length) break;
        for (long at = 0; at < length;) {
            struct avg_entry *entry = (void *)(buffer + at);
            const char *digits = entry->name;
            at += entry->bytes;
            if (*digits < '0' || *digits > '9') continue;
            int fd = (int)avg_number(&digits), minor = minor_of(fd);
            if (minor < 0) continue;
            uint32_t file = file_of(process, opening_of(fd), minor, 0);
            if (file && process->file[file - 1].minor == minor) open_now[file - 1] = 1;
        }
    }
    avg_close(directory);
    for (uint32_t i = 0; i < AVG_FILES; i++)
        if (process->file[i].charges && !open_now[i]) avg_charge_drop_file(process, i + 1);
}

/* --------------------------------------------------------------------------------------------------------- requests */

enum course { PASS, REFUSE, HOST_MEMORY, CHARGED };

/* What is to be done with a request for VRAM; CHARGED fills `charge` in, which counts as one of its file's already. */
static enum course course_of(struct avg_process *process, int fd, const struct drm_gem_create *asked, struct avg_charge *charge) {
    if (!process->slice_count && !process->barred) return PASS;
    int minor = minor_of(fd);
    if (minor < 0) return PASS;
    if (!process->slice_count) return REFUSE; /* there is a slice, but nothing is known of it: as on /dev/kfd */
    uint32_t gpu_id = gpu_of_minor(process, minor);
    if (gpu_id == NOBODYS) return PASS;
    uint64_t opening = opening_of(fd);
    uint32_t file = file_of(process, opening, minor, 1);
    if (!file) { /* of so many files some may be closed */
        avg_forget_closed_files(process);
        file = file_of(process, opening, minor, 1);
    }
    struct kfd_alloc_memory like = {
        .bytes = avg_sum(asked->bytes, 4095) & ~4095ULL, /* the driver gives out whole pages */
        .gpu_id = gpu_id == FOREIGN ? AVG_FOREIGN_MINOR | (uint32_t)minor : gpu_id,
        .flags = KFD_MEMORY_PUBLIC,
    };
    if (!file || avg_charge_request(process, &like, charge))
        return asked->domains & DRM_DOMAIN_GTT ? HOST_MEMORY : REFUSE; /* the caller takes either, and so would the driver */
    charge->file = file;
    avg_file_count(process, file, 1);
    return CHARGED;
}

int avg_gem_create(int fd, unsigned long request, struct drm_gem_create *asked, avg_request *next) {
    struct drm_gem_create copy = *asked;
    struct avg_charge charge;
    if (!(copy.domains & DRM_DOMAIN_VRAM) || copy.domains & ~DRM_DOMAINS || !copy.bytes) return next(fd, request, asked);
    struct avg_process *process = avg_process_enter(0);
    enum course course = process ? course_of(process, fd, &copy, &charge) : REFUSE;
    if (process) avg_process_leave(process);
    if (course == PASS) return next(fd, request, asked);
    if (course == REFUSE) {
        errno = ENOMEM;
        return -1;
    }
    if (course == HOST_MEMORY) {
        asked->domains = copy.domains & ~DRM_DOMAIN_VRAM;
        int result = next(fd, request, asked);
        asked->domains = copy.domains; /* the caller's structure is the caller's */
        return result;
    }
    int result = next(fd, request, asked), error = errno, lost = 0;
    charge.handle = *(const uint32_t *)asked;
    if ((process = avg_process_enter(0))) { /* else the charge stays until the process ends */
        lost = !result && avg_charge_put(process, &charge);
        if (result || lost) {
            avg_charge_undo(process, &charge, 0);
            avg_file_count(process, charge.file, -1);
        }
        avg_process_leave(process);
    }
    if (lost) { /* memory that could not be given back to the quota when it is closed: better none */
        struct drm_gem_close back = {(uint32_t)charge.handle, 0};
        next(fd, DRM_GEM_CLOSE, &back);
        result = -1;
        error = ENOMEM;
    }
    errno = error;
    return result;
}

int avg_gem_close(int fd, unsigned long request, struct drm_gem_close *asked, avg_request *next) {
    struct avg_charge charge;
    uint32_t handle = asked->handle;
    if (!avg_process_has_files()) return next(fd, request, asked); /* ROCm closes handles, and never has any that count */
    struct avg_process *process = avg_process_enter(0);
    if (!process) return next(fd, request, asked);
    int found = 0, known = 0;
    /* Only a handle number that has a charge in some file is worth asking the kernel which file this is. */
    for (uint32_t i = 0; i < AVG_FILES && !known; i++) known = process->file[i].charges && avg_charge_has(process, i + 1, handle);
    if (known) {
        int minor = minor_of(fd);
        uint32_t file = minor < 0 ? 0 : file_of(process, opening_of(fd), minor, 0);
        found = file && avg_charge_take(process, file, handle, &charge); /* before: the handle may be given out again at once */
    }
    avg_process_leave(process);
    int result = next(fd, request, asked), error = errno;
    if (!found) return result;
    if ((process = avg_process_enter(0))) {
        if (result) avg_charge_put(process, &charge); /* still there */
        else {
            avg_charge_undo(process, &charge, 1);
            avg_file_count(process, charge.file, -1);
        }
        avg_process_leave(process);
    }
    errno = error;
    return result;
}

/* A queue that DRM makes has no mask, and none can be set on it: refused for compute where the slice has one. Graphics
 * queues pass: a slice is about compute, and a desktop must go on drawing. */
int avg_user_queue(int fd, unsigned long request, struct drm_user_queue *asked, avg_request *next) {
    struct avg_mask_rule rule;
    if (asked->op != 1 || asked->ip_type != 1) return next(fd, request, asked); /* create, on a compute engine */
    struct avg_process *process = avg_process_enter(0);
    int refused = !process;
    if (process && process->slice_count) {
        uint32_t gpu_id = gpu_of_minor(process, minor_of(fd));
        refused = gpu_id != NOBODYS && (gpu_id == FOREIGN || avg_mask_rule_of(process, gpu_id, &rule));
        if (refused) avg_say(process, AVG_SAY_USER_QUEUE, "a compute queue of DRM cannot be held to the slice's CUs and is refused", "");
    }
    if (process) avg_process_leave(process);
    if (!refused) return next(fd, request, asked);
    errno = ENOMEM;
    return -1;
}

/* -------------------------------------------------------------------------------------------------------- reporting */

static void lower(uint64_t *at, uint64_t value) {
    if (*at > value) *at = value;
}

int avg_drm_info(int fd, unsigned long request, struct drm_info *asked, avg_request *next) {
    enum { VRAM_USAGE = 0x10, VRAM_GTT = 0x14, VIS_VRAM_USAGE = 0x17, MEMORY = 0x19 };
    uint32_t query = asked->query, words = asked->bytes / 8;
    uint64_t *told = (uint64_t *)(uintptr_t)asked->pointer;
    int result = next(fd, request, asked), error = errno;
    if (result || (query != VRAM_USAGE && query != VRAM_GTT && query != VIS_VRAM_USAGE && query != MEMORY)) return result;
    struct avg_shown shown;
    struct avg_process *process = avg_process_enter(0);
    if (!process) return result;
    uint32_t gpu_id = process->slice_count ? gpu_of_minor(process, minor_of(fd)) : NOBODYS;
    if (gpu_id > FOREIGN && !avg_shown_of(process, gpu_id, &shown)) {
        /* Of the answer only what the caller has room for was written. Total before visible, in each pair. */
        if (query == VRAM_USAGE && words >= 1) told[0] = shown.used;
        if (query == VIS_VRAM_USAGE && words >= 1) lower(&told[0], shown.used);
        if (query == VRAM_GTT) {
            if (words >= 1) told[0] = shown.total;
            if (words >= 2) lower(&told[1], shown.total);
        }
        if (query == MEMORY) /* total, usable, used, largest allocation: of all VRAM, then of what the CPU sees */
            for (uint32_t i = 0; i < 8 && i < words; i++) {
                uint64_t value = i % 4 == 2 ? shown.used : i % 4 == 3 ? shown.total / 4 * 3 : shown.total;
                if (i < 4) told[i] = value;
                else lower(&told[i], value);
            }
    }
    avg_process_leave(process);
    errno = error;
    return result;
}

/* ".../device/mem_info_vram_total", and what follows "mem_info_" in it; NULL for any other path. */
static const char *memory_file(const char *path, size_t *directory) {
    static const char *const names[] = {"vram_total", "vram_used", "vis_vram_total", "vis_vram_used"};
    size_t length = path ? avg_length(path) : 0, at = length;
    if (length < sizeof "/sys/mem_info_vram_used" || path[length - 1] > 'z') return NULL;
    while (at && path[at - 1] != '/') at--;
    if (!avg_starts(path + at, "mem_info_v")) return NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (avg_equal(path + at + sizeof "mem_info_" - 1, names[i])) {
            *directory = at;
            return path + at + sizeof "mem_info_" - 1;
        }
    return NULL;
}

int avg_is_memory_file(const char *path) {
    size_t directory;
    return memory_file(path, &directory) != NULL;
}

/* The GPU is known by its render node, which lies below the same directory whichever way led there. By the program's own
 * `open`, as for every file of a topology that may be simulated. */
uint64_t avg_memory_file_value(const char *path, uint64_t value) {
    char node[512], *end = node + sizeof node - 1;
    size_t directory;
    struct avg_shown shown;
    const char *name = memory_file(path, &directory);
    struct avg_process *process = name && directory < sizeof node - 32 ? avg_process_enter(0) : NULL;
    if (!process) return value;
    for (size_t i = 0; i < directory; i++) node[i] = path[i];
    for (int i = 0; i < process->slice_count; i++) {
        const struct avg_account *account = &process->slice[i];
        for (uint32_t gpu = 0; gpu < account->gpu_count; gpu++) {
            const struct avg_policy_gpu *entry = &account->policy->gpu[gpu];
            if (!entry->render_minor) continue;
            avg_put_number(avg_put(node + directory, end, "drm/renderD"), end, entry->render_minor);
            int fd = avg_open_as_program(node, O_PATH | O_DIRECTORY);
            if (fd < 0) continue;
            avg_close(fd);
            if (!avg_shown_of(process, entry->kfd_gpu_id, &shown)) {
                uint64_t own = avg_equal(name, "vram_total") || avg_equal(name, "vis_vram_total") ? shown.total : shown.used;
                value = *name == 'v' && name[1] == 'i' ? avg_min(value, own) : own;
            }
            avg_process_leave(process);
            return value;
        }
    }
    avg_process_leave(process);
    return value;
}
