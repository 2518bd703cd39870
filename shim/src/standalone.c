/* All processes of a tree must share one ledger, and only the environment is sure to reach them: it is also what brings
 * the library and the limit. So the ledger's path is appended to the limit itself: AMDVGPU_VRAM=4GiB becomes, in the first
 * process that sees it, AMDVGPU_VRAM=4GiB@/run/user/1000/amdvgpu/<random>, by exchanging one pointer of the list (before
 * libc is ready there is no room to add a name; environ.c). Refused: a descriptor that is inherited (Python's
 * subprocess, daemons and shells close what they do not know), a file named by session or process group (setsid leaves
 * the tree by it), looking for a parent that has one (an orphan's is process 1).
 *
 * The file lies in a directory of the user's that nobody else can write. It outlives the tree; the next tree to start
 * removes those in which nobody lives. A tree whose first process has ended and in which nobody holds VRAM at that moment
 * loses its file by it, and whoever of it asks next makes it again under the same name. */
#include "standalone.h"

#include <errno.h>
#include <sys/mman.h>

#include "environ.h"
#include "os.h"
#include "text.h"

#define PATH_ROOM 256
#define SWEEP_MOST 64 /* leftover ledgers looked at when a tree starts */

struct limit { /* where a VRAM limit may stand */
    const char *name;
    int binary; /* K, M, G are powers of 1024 and the number is whole, as those who introduced the name read it */
};
static const struct limit limits[] = {
    {"AMDVGPU_VRAM", 0}, {"FH_MEMORY_LIMIT", 0}, {"HIP_DEVICE_MEMORY_LIMIT", 1}, {"HIP_DEVICE_MEMORY_LIMIT_0", 1},
    {"HIP_DEVICE_MEMORY_LIMIT_1", 1}, {"HIP_DEVICE_MEMORY_LIMIT_2", 1}, {"HIP_DEVICE_MEMORY_LIMIT_3", 1},
    {"HIP_DEVICE_MEMORY_LIMIT_4", 1}, {"HIP_DEVICE_MEMORY_LIMIT_5", 1}, {"HIP_DEVICE_MEMORY_LIMIT_6", 1},
    {"HIP_DEVICE_MEMORY_LIMIT_7", 1}, {"HIP_DEVICE_MEMORY_LIMIT_8", 1}, {"HIP_DEVICE_MEMORY_LIMIT_9", 1},
    {"HIP_DEVICE_MEMORY_LIMIT_10", 1}, {"HIP_DEVICE_MEMORY_LIMIT_11", 1}, {"HIP_DEVICE_MEMORY_LIMIT_12", 1},
    {"HIP_DEVICE_MEMORY_LIMIT_13", 1}, {"HIP_DEVICE_MEMORY_LIMIT_14", 1}, {"HIP_DEVICE_MEMORY_LIMIT_15", 1},
};
enum { LIMITS = sizeof limits / sizeof *limits, FIRST_INDEXED = 3 };

static const char *cus_text(void) {
    const char *text = avg_env("AMDVGPU_CUS");
    return text ? text : avg_env("FH_CU_RANGE");
}

static const char *after_at(const char *text) {
    while (*text && *text != '@') text++;
    return *text ? text + 1 : NULL;
}

/* Path of the ledger as some limit names it, or NULL. */
static const char *named_ledger(void) {
    for (int i = 0; i < LIMITS; i++) {
        const char *text = avg_env(limits[i].name), *path = text ? after_at(text) : NULL;
        if (path) return path;
    }
    return NULL;
}

static int has_vram_limit(void) {
    for (int i = 0; i < LIMITS; i++)
        if (avg_env(limits[i].name)) return 1;
    return 0;
}

int avg_stands_alone(void) { return has_vram_limit() || cus_text(); }

/* Bytes that limit `index` says; 0 where it is no size. */
static uint64_t bytes_of(int index, const char *text) {
    char alone[64];
    size_t length = 0;
    while (text[length] && text[length] != '@') {
        if (length == sizeof alone - 1) return 0;
        alone[length] = text[length];
        length++;
    }
    alone[length] = 0;
    return limits[index].binary ? avg_parse_binary_size(alone) : avg_parse_size(alone);
}

uint64_t avg_vram_limit_of(const char *text) { return bytes_of(0, text); }

/* ------------------------------------------------------------------------------------------------------- the ledger */

/* The user's own directory for ledgers, made where it is not there, as a path; 0 where there is none to be trusted. */
static int own_directory(char *path, size_t room) {
    const char *runtime = avg_env("XDG_RUNTIME_DIR");
    for (int attempt = runtime && *runtime == '/' ? 0 : 1; attempt < 2; attempt++) {
        char *end = path + room - 1, *at = path;
        uint32_t user = (uint32_t)AVG_SYS(geteuid, 0, 0, 0, 0);
        struct stat status;
        if (attempt == 0) avg_put(avg_put(at, end, runtime), end, "/amdvgpu");
        else avg_put_number(avg_put(at, end, "/tmp/amdvgpu-"), end, user);
        AVG_SYS(mkdirat, AT_FDCWD, path, 0700, 0);
        int fd = avg_open(AT_FDCWD, path, O_RDONLY | O_DIRECTORY);
        if (fd < 0) continue;
        int ours = !AVG_SYS(fstat, fd, &status, 0, 0) && status.st_uid == user && !(status.st_mode & 022);
        avg_close(fd);
        if (ours) return 1;
    }
    return 0;
}

/* The ledger at `path`, mapped, made if need be; NULL where that cannot be or it is none. */
static struct avg_ledger *open_ledger(const char *path, int make) {
    size_t bytes = avg_ledger_bytes(AVG_MAX_GPUS);
    struct stat status = {0};
    int fd = avg_open(AT_FDCWD, path, O_RDWR), fresh = 0;
    if (fd == -ENOENT && make) {
        fd = (int)AVG_SYS(openat, AT_FDCWD, path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
        fresh = fd >= 0;
        if (fd == -EEXIST) fd = avg_open(AT_FDCWD, path, O_RDWR);
    }
    if (fd < 0) return NULL;
    if (fresh) AVG_SYS(ftruncate, fd, bytes, 0, 0);
    struct avg_ledger *ledger = NULL;
    /* Its maker may be between making and sizing it: a few looks. */
    for (int tries = 0; tries < 100; tries++) {
        if (AVG_SYS(fstat, fd, &status, 0, 0) || !S_ISREG(status.st_mode)) break;
        if ((uint64_t)status.st_size >= bytes) {
            ledger = avg_map(bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd);
            break;
        }
        struct timespec moment = {0, 1000000};
        AVG_SYS(nanosleep, &moment, 0, 0, 0);
    }
    avg_close(fd);
    if (!ledger) return NULL;
    /* The head is the same whoever writes it; the magic comes last. */
    if (!AVG_LOAD(&ledger->magic)) {
        ledger->version = AVG_VERSION;
        ledger->slot_count = AVG_SLOTS;
        ledger->slot_bytes = (uint32_t)avg_slot_bytes(AVG_MAX_GPUS);
        ledger->gpu_count = AVG_MAX_GPUS;
        AVG_STORE(&ledger->magic, AVG_LEDGER_MAGIC);
    }
    if (ledger->magic == AVG_LEDGER_MAGIC && ledger->version == AVG_VERSION && ledger->gpu_count == AVG_MAX_GPUS &&
        ledger->slot_count == AVG_SLOTS && ledger->slot_bytes == avg_slot_bytes(AVG_MAX_GPUS))
        return ledger;
    AVG_SYS(munmap, ledger, bytes, 0, 0);
    return NULL;
}

static void close_ledger(struct avg_ledger *ledger) { AVG_SYS(munmap, ledger, avg_ledger_bytes(AVG_MAX_GPUS), 0, 0); }

/* Remove the ledgers in which nobody lives any more: neither their tree's first process nor any holder of a slot. */
static void sweep(const char *directory, const struct avg_identity *self) {
    char buffer[2048] __attribute__((aligned(8))), path[PATH_ROOM];
    int root = avg_open(AT_FDCWD, directory, O_RDONLY | O_DIRECTORY), looked = 0;
    if (root < 0) return;
    for (long length; looked < SWEEP_MOST && (length = AVG_SYS(getdents64, root, buffer, sizeof buffer, 0)) > 0;)
        for (long at = 0; at < length && looked < SWEEP_MOST;) {
            struct avg_entry *entry = (void *)(buffer + at);
            at += entry->bytes;
            if (entry->name[0] == '.') continue;
            looked++;
            char *end = path + sizeof path - 1;
            avg_put(avg_put(avg_put(path, end, directory), end, "/"), end, entry->name);
            struct avg_ledger *ledger = open_ledger(path, 0);
            if (!ledger) continue;
            struct avg_account account = {.ledger = ledger, .gpu_count = AVG_MAX_GPUS};
            avg_bury(&account, self);
            int lived_in = avg_lives(ledger->first_owner, ledger->first_start, self);
            for (uint32_t i = 0; i < AVG_SLOTS; i++) lived_in |= avg_owner_pid(AVG_LOAD(&avg_slot_at(ledger, AVG_MAX_GPUS, i)->owner)) != 0;
            close_ledger(ledger);
            if (!lived_in) AVG_SYS(unlinkat, AT_FDCWD, path, 0, 0);
        }
    avg_close(root);
}

/* A new ledger for the tree that starts here; its path, or NULL. */
static const char *new_ledger(const struct avg_identity *self, char *path, size_t room) {
    static const char digits[] = "0123456789abcdef";
    if (!own_directory(path, room - 18)) return NULL;
    sweep(path, self);
    char *at = path + avg_length(path);
    *at++ = '/';
    for (int i = 0; i < 16; i++) *at++ = digits[self->cookie[0] >> i * 4 & 15];
    *at = 0;
    struct avg_ledger *ledger = open_ledger(path, 1);
    if (!ledger) return NULL;
    AVG_STORE(&ledger->first_start, self->start_ticks);
    AVG_STORE(&ledger->first_owner, (uint64_t)self->ns << AVG_OWNER_NS_SHIFT | self->pid);
    close_ledger(ledger);
    return path;
}

void avg_stand_alone_early(void) {
    static char marked[PATH_ROOM + 128];
    struct avg_identity self = {0};
    char made[PATH_ROOM];
    if (!has_vram_limit()) return;
    avg_identify(&self);
    if (self.secure) return;
    const char *path = named_ledger();
    if (path) {
        struct avg_ledger *ledger = open_ledger(path, 0);
        if (!ledger) return; /* nobody has charged anything yet, or it is said when VRAM is asked for */
        struct avg_account account = {.ledger = ledger, .gpu_count = AVG_MAX_GPUS};
        avg_forget_past_image(&account, &self);
        close_ledger(ledger);
        return;
    }
    path = new_ledger(&self, made, sizeof made);
    if (!path) return; /* said when VRAM is asked for */
    for (int i = 0; i < LIMITS; i++) {
        const char *text = avg_env(limits[i].name);
        if (!text) continue;
        if (avg_length(text) > 60) return; /* no limit anyway */
        char *end = marked + sizeof marked - 1, *at = avg_put(marked, end, limits[i].name);
        avg_put(avg_put(avg_put(avg_put(at, end, "="), end, text), end, "@"), end, path);
        avg_env_exchange(limits[i].name, marked);
        return;
    }
}

/* ------------------------------------------------------------------------------------------------------ the machine */

#define NODES "/sys/devices/virtual/kfd/kfd/topology/nodes/"

long avg_read_node(uint64_t node, const char *name, char *text, size_t room) {
    char path[128], *end = path + sizeof path - 1;
    avg_put(avg_put(avg_put_number(avg_put(path, end, NODES), end, node), end, "/"), end, name);
    int fd = avg_open_as_program(path, O_RDONLY);
    if (fd < 0) return -1;
    long length = AVG_SYS(read, fd, text, room - 1, 0);
    avg_close(fd);
    text[length > 0 ? length : 0] = 0;
    return length;
}

uint64_t avg_field(const char *text, const char *name) {
    size_t length = avg_length(name);
    for (const char *line = text; *line;) {
        if (avg_starts(line, name) && line[length] == ' ') {
            const char *digits = line + length + 1;
            return avg_number(&digits);
        }
        while (*line && *line != '\n') line++;
        if (*line) line++;
    }
    return 0;
}

/* Which cell of the ledger is GPU `gpu_id`'s: processes of one tree may see different sets of GPUs. */
static uint32_t cell_of(struct avg_ledger *ledger, uint32_t gpu_id) {
    for (uint32_t i = 0; i < AVG_MAX_GPUS; i++) {
        uint64_t free = 0;
        if (AVG_LOAD(&ledger->past[i].kfd_gpu_id) == gpu_id) return i;
        if (!AVG_LOAD(&ledger->past[i].kfd_gpu_id) &&
            (__atomic_compare_exchange_n(&ledger->past[i].kfd_gpu_id, &free, gpu_id, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST) ||
             free == gpu_id))
            return i;
    }
    return AVG_MAX_GPUS;
}

static void bar(struct avg_process *process, enum avg_message kind, const char *first, const char *second) {
    process->barred = process->limit_bad = 1;
    avg_say(process, kind, first, second);
}

void avg_stand_alone(struct avg_process *process) {
    uint64_t quota[LIMITS] = {0};
    const char *text;
    int vram_limited = 0;
    for (int i = 0; i < LIMITS; i++) {
        if (!(text = avg_env(limits[i].name))) continue;
        vram_limited = 1;
        if (!(quota[i] = bytes_of(i, text))) return bar(process, AVG_SAY_LIMIT, limits[i].name, " is no size; VRAM is refused");
        if (i == 0 || i == 1) break; /* ours before others' */
    }
    if ((text = cus_text()) && !(process->cus_given = avg_parse_cus(text, &process->cus)))
        return bar(process, AVG_SAY_LIMIT, "AMDVGPU_CUS (FH_CU_RANGE) is no list of CUs as in 0-37,40; VRAM is refused: ", text);
    const char *path = named_ledger();
    char made[PATH_ROOM];
    struct avg_ledger *ledger;
    if (!vram_limited) { /* CUs only: nothing to share */
        ledger = avg_map(avg_ledger_bytes(AVG_MAX_GPUS), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    } else {
        if (!path) path = new_ledger(&process->self, made, sizeof made); /* set after the start: this process's own */
        ledger = path ? open_ledger(path, 1) : NULL;
    }
    struct avg_policy *policy = avg_map(AVG_POLICY_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    if (!ledger || !policy)
        return bar(process, AVG_SAY_LEDGER, path ? path : "XDG_RUNTIME_DIR and /tmp", ": no ledger can be kept there, VRAM is refused");
    policy->magic = AVG_POLICY_MAGIC;
    policy->version = AVG_VERSION;
    policy->bytes = AVG_POLICY_BYTES;
    avg_put(policy->name, policy->name + sizeof policy->name - 1, "standalone");
    for (int i = 0; i < AVG_MAX_GPUS; i++) policy->gpu[i].kfd_node = UINT32_MAX;
    const char *asked = avg_env("HIP_OVERSUBSCRIBE");
    int oversubscribe = asked && (*asked == '1' || (*asked | 0x20) == 't' || (*asked | 0x20) == 'y');
    int found = 0;
    for (uint64_t node = 0; node < 256 && found < AVG_MAX_GPUS; node++) {
        char small[32], properties[4096];
        if (avg_read_node(node, "gpu_id", small, sizeof small) < 0) {
            if (node) break; /* nodes are numbered without gaps */
            continue;
        }
        const char *digits = small;
        uint32_t gpu_id = (uint32_t)avg_number(&digits), cell;
        if (!gpu_id || avg_read_node(node, "properties", properties, sizeof properties) <= 0) continue; /* a CPU, or not ours */
        if ((cell = cell_of(ledger, gpu_id)) == AVG_MAX_GPUS) continue;
        struct avg_policy_gpu *entry = &policy->gpu[cell];
        uint64_t per_cu = avg_field(properties, "simd_per_cu");
        entry->kfd_gpu_id = gpu_id;
        entry->kfd_node = (uint32_t)node;
        entry->cu_count = per_cu ? (uint32_t)(avg_field(properties, "simd_count") / per_cu) : 0;
        entry->xcc_count = (uint16_t)avg_field(properties, "num_xcc");
        entry->render_minor = (uint32_t)avg_field(properties, "drm_render_minor");
        entry->flags = (avg_field(properties, "gfx_target_version") >= 100000 ? AVG_GPU_WGP : 0) | (oversubscribe ? AVG_GPU_OVERSUBSCRIBE : 0);
        entry->priority = AVG_PRIORITY_NONE;
        char bank[1024];
        if (avg_read_node(node, "mem_banks/0/properties", bank, sizeof bank) > 0) entry->physical_bytes = avg_field(bank, "size_in_bytes");
        uint64_t of_all = quota[0] ? quota[0] : quota[1] ? quota[1] : quota[2];
        uint64_t own = !quota[0] && !quota[1] && FIRST_INDEXED + found < LIMITS ? quota[FIRST_INDEXED + found] : 0;
        entry->vram_bytes = own ? own : of_all ? of_all : UINT64_MAX >> 1;
        found++;
    }
    if (!found) return bar(process, AVG_SAY_POLICY, "limits are set, but no GPU is found in " NODES, ": VRAM is refused");
    policy->gpu_count = AVG_MAX_GPUS;
    process->alone = 1;
    process->slice[process->slice_count++] = (struct avg_account){.policy = policy, .ledger = ledger, .gpu_count = AVG_MAX_GPUS};
}
