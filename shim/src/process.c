#include "process.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/statfs.h>

#include "environ.h"
#include "next.h"
#include "os.h"
#include "standalone.h"
#include "text.h"

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

#define SLICES_ROOT "/run/amdvgpu" /* where a container finds its slices */
#if defined(__x86_64__)
#define PAGE 4096
#else
#define PAGE 65536                 /* the largest page size there is on aarch64 */
#endif
#define LOCK_NAPS 100000           /* of 50 us: five seconds */

static union {
    struct avg_process process;
    char pages[(sizeof(struct avg_process) + PAGE - 1) / PAGE * PAGE];
} kept __attribute__((aligned(PAGE)));
static int wiped_on_fork; /* 0 not asked yet, 1 yes (children inherit the advice), -1 the kernel cannot */

/* ------------------------------------------------------------------------------------------------------- messages */

#define LOG_MOST (1 << 20) /* bytes of a log file before it becomes <name>.1, and of that one too */

static const char *const level_names[] = {"off", "error", "warn", "info", "debug"};

/* A line, with its newline, to where lines go. The file is opened for each: nothing of ours stays open in the program. */
static void put_line(const struct avg_process *process, const char *line, size_t length) {
    struct stat status = {0};
    int fd = 2;
    if (process->log_file) {
        fd = (int)AVG_SYS(openat, AT_FDCWD, process->log_file, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
        if (fd >= 0 && !AVG_SYS(fstat, fd, &status, 0, 0) && S_ISREG(status.st_mode) && status.st_size >= LOG_MOST) {
            char old[512], *end = old + sizeof old - 1;
            avg_put(avg_put(old, end, process->log_file), end, ".1");
            avg_close(fd);
            avg_syscall(SYS_renameat2, AT_FDCWD, (long)process->log_file, AT_FDCWD, (long)old, 0, 0);
            fd = (int)AVG_SYS(openat, AT_FDCWD, process->log_file, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
        }
        if (fd < 0) return; /* a log that cannot be written stops nobody */
    }
    AVG_SYS(write, fd, line, length, 0);
    if (fd != 2) avg_close(fd);
}

void avg_say(struct avg_process *process, enum avg_message kind, const char *first, const char *second) {
    char line[512], *end = line + sizeof line - 2;
    if (process->said & 1u << kind) return;
    process->said |= 1u << kind;
    if (process->quiet || process->log_level == AVG_LOG_OFF) return;
    char *at = avg_put(line, end, "amdvgpu: ");
    at = avg_put(at, end, first);
    at = avg_put(at, end, second);
    *at++ = '\n';
    put_line(process, line, (size_t)(at - line));
}

void avg_tell(struct avg_process *process, enum avg_level level, const char *what, const struct avg_pair *pairs) {
    char line[512], *end = line + sizeof line - 2;
    if (process->quiet) return;
    char *at = avg_put_number(avg_put(line, end, "amdvgpu["), end, avg_pid());
    at = avg_put(avg_put(avg_put(avg_put(at, end, "] "), end, level_names[level]), end, ": "), end, what);
    for (; pairs->name; pairs++) {
        at = avg_put(avg_put(avg_put(at, end, " "), end, pairs->name), end, "=");
        at = pairs->hex ? avg_put_hex(at, end, pairs->value) : avg_put_number(at, end, pairs->value);
    }
    *at++ = '\n';
    put_line(process, line, (size_t)(at - line));
}

static int identified(struct avg_process *process);

static void read_log_settings(struct avg_process *process) {
    const char *text = avg_env("AMDVGPU_LOG"), *file = avg_env("AMDVGPU_LOG_FILE");
    process->log_level = AVG_LOG_WARN; /* also where the text is no level: what goes wrong is to be seen */
    for (int level = 0; text && level <= AVG_LOG_DEBUG; level++)
        if (avg_equal(text, level_names[level])) process->log_level = (enum avg_level)level;
    /* A privileged program must not write where its caller says. */
    if (file && *file == '/' && avg_length(file) < 500 && identified(process) && !process->self.secure) process->log_file = file;
}

/* ------------------------------------------------------------------------------------------------------- the slices */

/* The fields of a policy that must hold before anything in it is looked at; what is wrong, or NULL. */
static const char *policy_fault(const struct avg_policy *policy) {
    if (AVG_LOAD(&policy->magic) != AVG_POLICY_MAGIC) return ": the policy file is none";
    if (policy->version > AVG_VERSION) return ": the policy file is newer than this library understands: upgrade the library";
    if (policy->version != AVG_VERSION || policy->bytes != AVG_POLICY_BYTES) return ": the policy file has a foreign layout";
    if (policy->gpu_count < 1 || policy->gpu_count > AVG_MAX_GPUS) return ": the policy file names an impossible number of GPUs";
    return NULL;
}

static const char *ledger_fault(const struct avg_ledger *ledger, const struct avg_policy *policy) {
    if (ledger->magic != AVG_LEDGER_MAGIC || ledger->version != AVG_VERSION) return ": the ledger is none of this version";
    if (ledger->slot_count != AVG_SLOTS || ledger->gpu_count != policy->gpu_count ||
        ledger->slot_bytes != avg_slot_bytes(policy->gpu_count) || ledger->slice_key != policy->slice_key)
        return ": the ledger does not belong to the policy";
    return NULL;
}

/* Map `name` under `directory`; NULL with `fault` set. A file that is not regular, or shorter than `bytes`, is refused
 * before it is touched: a mapping of it would end in SIGBUS. */
static void *map_file(const char *directory, const char *name, size_t bytes, int writable, const char **fault) {
    char path[512], *end = path + sizeof path - 1, *at = avg_put(path, end, directory);
    struct stat status = {0};
    at = avg_put(at, end, "/");
    avg_put(at, end, name);
    int fd = avg_open(AT_FDCWD, path, writable ? O_RDWR : O_RDONLY);
    if (fd < 0) {
        *fault = fd == -ENOENT ? ": a file of the slice is missing" :
                 fd == -EACCES || fd == -EPERM || fd == -EROFS ? ": no permission to use a file of the slice" :
                 ": a file of the slice cannot be opened";
        return NULL;
    }
    void *mapped = NULL;
    if (AVG_SYS(fstat, fd, &status, 0, 0) || !S_ISREG(status.st_mode)) *fault = ": a file of the slice is not a regular file";
    else if ((uint64_t)status.st_size < bytes) *fault = ": a file of the slice is too short";
    else {
        mapped = avg_map(bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd);
        if (!mapped) *fault = ": a file of the slice cannot be mapped";
    }
    avg_close(fd);
    return mapped;
}

/* Fail closed: a slice that is there but cannot be used bars VRAM (of its own GPUs where the policy names them). */
static void add_slice(struct avg_process *process, const char *directory) {
    const char *fault = NULL;
    if (process->slice_count == AVG_MAX_SLICES) {
        process->barred = 1;
        avg_say(process, AVG_SAY_POLICY, directory, ": more slices than one process can have, VRAM is refused");
        return;
    }
    struct avg_policy *policy = map_file(directory, "policy", AVG_POLICY_BYTES, 0, &fault);
    if (policy) fault = policy_fault(policy);
    if (fault) {
        char text[256], *end = text + sizeof text - 1;
        avg_put(avg_put(text, end, fault), end, "; VRAM is refused");
        avg_say(process, AVG_SAY_POLICY, directory, text);
        process->barred = 1;
        return;
    }
    struct avg_account *account = &process->slice[process->slice_count++];
    account->policy = policy;
    account->gpu_count = policy->gpu_count;
    account->ledger = map_file(directory, "ledger", avg_ledger_bytes(policy->gpu_count), 1, &fault);
    if (account->ledger) fault = ledger_fault(account->ledger, policy);
    if (fault) {
        char text[256], *end = text + sizeof text - 1;
        avg_put(avg_put(text, end, fault), end, "; VRAM of this slice is refused");
        avg_say(process, AVG_SAY_LEDGER, directory, text);
        account->ledger = NULL;
    }
}

/* Whether the directory is mounted so that nobody here can change it. One that is not was left behind, or made by
 * somebody in the container to look like a slice with a better quota. */
static int is_delivered(int root, const char *name) {
    struct statfs status = {0};
    int fd = avg_open(root, name, O_RDONLY | O_DIRECTORY);
    if (fd < 0) return fd != -ENOTDIR && fd != -ENOENT && fd != -ELOOP; /* not for us to see: it is said by who looks into it */
    int fixed = !AVG_SYS(fstatfs, fd, &status, 0, 0) && status.f_flags & 1 /* ST_RDONLY */;
    avg_close(fd);
    return fixed;
}

/* The directories under SLICES_ROOT, in the kernel's order; whether there were any. */
static int add_mounted(struct avg_process *process) {
    char buffer[2048] __attribute__((aligned(8))), path[320];
    int found = 0, root = AVG_SYS(openat, AT_FDCWD, SLICES_ROOT, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    if (root < 0) {
        if (root == -ENOENT || root == -ENOTDIR) return 0;
        avg_say(process, AVG_SAY_POLICY, SLICES_ROOT, ": cannot be read, VRAM is refused");
        process->barred = 1;
        return 1;
    }
    for (;;) {
        long length = AVG_SYS(getdents64, root, buffer, sizeof buffer, 0);
        if (length <= 0) break;
        for (long at = 0; at < length;) {
            struct avg_entry *entry = (void *)(buffer + at);
            at += entry->bytes;
            if (entry->name[0] == '.' || !is_delivered(root, entry->name)) continue;
            char *end = path + sizeof path - 1, *put = avg_put(path, end, SLICES_ROOT "/");
            avg_put(put, end, entry->name);
            found = 1;
            add_slice(process, path);
        }
    }
    avg_close(root);
    return found;
}

/* AMDVGPU_SLICE_DIR (several: by colons) counts only where nothing is mounted: or else it could add to what is. */
static void add_named(struct avg_process *process, const char *list) {
    while (*list) {
        char path[512];
        size_t length = 0;
        while (list[length] && list[length] != ':') length++;
        if (length >= sizeof path) {
            process->barred = 1;
            avg_say(process, AVG_SAY_POLICY, "AMDVGPU_SLICE_DIR", ": a path in it is too long, VRAM is refused");
        } else if (length) {
            for (size_t i = 0; i < length; i++) path[i] = list[i];
            path[length] = 0;
            add_slice(process, path);
        }
        list += length;
        if (*list == ':') list++;
    }
}

static int identified(struct avg_process *process) {
    if (!process->self.pid) avg_identify(&process->self);
    return 1;
}

static void load(struct avg_process *process) {
    const char *text;
    read_log_settings(process);
    process->vram_limit = UINT64_MAX;
    process->priority_limit = AVG_PRIORITY_NONE;
    int mounted = add_mounted(process);
    const char *named = mounted ? NULL : avg_env("AMDVGPU_SLICE_DIR"), *granted = avg_env("AMDVGPU_SLICE");
    const char *disable = avg_env("AMDVGPU_DISABLE");
    int free = !mounted && !named && !granted && !(disable && avg_equal(disable, "1")) && avg_stands_alone();
    if (mounted || named || granted || free) identified(process);
    /* A privileged program must not open for writing what its caller names. It is not the GPU's user. */
    if (named && !process->self.secure) add_named(process, named);
    if (granted && !process->slice_count && !process->barred && !process->self.secure) {
        process->barred = 1; /* its mount failed, or somebody has moved it away */
        avg_say(process, AVG_SAY_POLICY, "AMDVGPU_SLICE names a slice, but none is mounted here: VRAM is refused: ", granted);
    }
    if ((process->slice_count || process->barred) && !process->self.secure) {
        if ((text = avg_env("AMDVGPU_VRAM")) && !(process->vram_limit = avg_vram_limit_of(text))) {
            process->limit_bad = 1;
            avg_say(process, AVG_SAY_LIMIT, "AMDVGPU_VRAM is no size; VRAM is refused: ", text);
        }
        if ((text = avg_env("AMDVGPU_CUS")) && !(process->cus_given = avg_parse_cus(text, &process->cus))) {
            process->limit_bad = 1;
            avg_say(process, AVG_SAY_LIMIT, "AMDVGPU_CUS is no list of CUs as in 0-37,40; VRAM is refused: ", text);
        }
    } else if (free && !process->self.secure) {
        if (process->quiet) process->postponed = 1;
        else avg_stand_alone(process);
    }
    /* 0 is the highest; whatever else is said is less. It lowers what the slice has, and never raises it. */
    if ((text = avg_env("AMD_TASK_PRIORITY")) && !process->self.secure && !avg_equal(text, "0")) process->priority_limit = 3;
    /* exec gave back what the last image held; its charge must not wait for the next allocation of ours. */
    for (int i = 0; i < process->slice_count; i++) avg_forget_past_image(&process->slice[i], &process->self);
    process->ready = 1;
}

/* ------------------------------------------------------------------------------------------------------- the lock */

int avg_process_has_slices(void) {
    /* By openat, which every dynamic program has just used: a stranger's sandbox may kill it for a rarer call. */
    int root = AVG_SYS(openat, AT_FDCWD, SLICES_ROOT, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    if (root >= 0) avg_close(root);
    return root >= 0 || avg_env("AMDVGPU_SLICE_DIR");
}

struct avg_process *avg_process_enter(int quiet) {
    struct avg_process *process = &kept.process;
    if (__builtin_expect(wiped_on_fork != 1, 0)) {
        if (!wiped_on_fork)
            wiped_on_fork = AVG_SYS(madvise, &kept, sizeof kept, MADV_WIPEONFORK, 0) ? -1 : 1;
        if (wiped_on_fork < 0) {
            uint32_t pid = avg_pid();
            if (process->pid && process->pid != pid)
                for (size_t i = 0; i < sizeof *process; i++) ((volatile char *)process)[i] = 0;
            process->pid = pid;
        }
    }
    uintptr_t me = avg_thread(), holder = 0;
    for (int naps = 0; !__atomic_compare_exchange_n(&process->lock, &holder, me, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED); naps++, holder = 0) {
        if (holder == me) return NULL; /* we interrupted ourselves: whoever holds it waits for us to return */
        for (int spin = 0; spin < 100 && __atomic_load_n(&process->lock, __ATOMIC_RELAXED); spin++) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
        if (naps < 50) {
            if (naps > 10) AVG_SYS(sched_yield, 0, 0, 0, 0);
            continue;
        }
        if (naps > LOCK_NAPS) return NULL;
        struct timespec moment = {0, 50000};
        AVG_SYS(nanosleep, &moment, 0, 0, 0);
    }
    if (__builtin_expect(!process->ready, 0)) {
        process->quiet = quiet;
        load(process);
    }
    return process;
}

void avg_process_start_over(struct avg_process *process) {
    for (int i = 0; i < process->slice_count; i++) {
        AVG_SYS(munmap, process->slice[i].policy, AVG_POLICY_BYTES, 0, 0);
        if (process->slice[i].ledger) AVG_SYS(munmap, process->slice[i].ledger, avg_ledger_bytes(process->slice[i].gpu_count), 0, 0);
    }
    uintptr_t lock = process->lock;
    for (size_t i = 0; i < sizeof *process; i++) ((volatile char *)process)[i] = 0;
    process->lock = lock;
}

void avg_process_leave(struct avg_process *process) { __atomic_store_n(&process->lock, 0, __ATOMIC_RELEASE); }

/* ------------------------------------------------------------------------------------------------------- covers */

int avg_covers(struct avg_process *process, uint32_t gpu_id, struct avg_cover *covers, int room) {
    int count = 0;
    uint64_t left = process->vram_limit;
    for (int i = 0; i < process->slice_count && count < room; i++) {
        struct avg_account *account = &process->slice[i];
        for (uint32_t gpu = 0; gpu < account->gpu_count && count < room; gpu++) {
            const struct avg_policy_gpu *entry = &account->policy->gpu[gpu];
            if (entry->kfd_gpu_id != gpu_id) continue;
            uint64_t quota = avg_min(AVG_LOAD(&entry->vram_bytes), left);
            if (left != UINT64_MAX) left -= quota;
            covers[count++] = (struct avg_cover){account, (uint8_t)i, (uint8_t)gpu, entry, quota};
        }
    }
    return count;
}

struct avg_seen *avg_seen_of(struct avg_process *process, uint32_t gpu_id) {
    for (int i = 0; i < AVG_SEEN_GPUS; i++) {
        if (!process->seen[i].gpu_id) process->seen[i].gpu_id = gpu_id;
        if (process->seen[i].gpu_id == gpu_id) return &process->seen[i];
    }
    return NULL;
}

/* Copy the words of `entry` that a mask is made of, whole: between two even and equal readings of the sequence. */
static int read_entry(const struct avg_policy *policy, const struct avg_policy_gpu *entry, struct avg_policy_gpu *copy) {
    for (int tries = 0; tries < 1000; tries++) {
        uint64_t before = AVG_LOAD(&policy->sequence);
        const uint64_t *from = (const uint64_t *)entry;
        for (size_t i = 0; i < sizeof *entry / 8; i++) ((uint64_t *)copy)[i] = __atomic_load_n(&from[i], __ATOMIC_ACQUIRE);
        if (!(before & 1) && AVG_LOAD(&policy->sequence) == before) return 0;
        struct timespec moment = {0, 50000};
        AVG_SYS(nanosleep, &moment, 0, 0, 0);
    }
    return -1;
}

int avg_mask_rule_of(struct avg_process *process, uint32_t gpu_id, struct avg_mask_rule *rule) {
    struct avg_cover covers[AVG_MAX_SLICES];
    int count = avg_covers(process, gpu_id, covers, AVG_MAX_SLICES), masked = count > 0;
    *rule = (struct avg_mask_rule){0};
    for (int i = 0; i < count; i++) {
        struct avg_policy_gpu entry;
        if (read_entry(covers[i].account->policy, covers[i].entry, &entry)) return -1;
        rule->cu_count = entry.cu_count;
        rule->xcc_count = entry.xcc_count;
        rule->wgp = (entry.flags & AVG_GPU_WGP) != 0;
        if (!(entry.flags & AVG_GPU_MASKED)) masked = 0; /* one slice has the whole Partition: so has their union */
        for (int word = 0; word < AVG_MASK_WORDS; word++) rule->mask.word[word] |= entry.cu_mask[word];
    }
    if (count && process->cus_given) {
        if (!masked)
            for (uint32_t bit = 0; bit < rule->cu_count && bit < AVG_MASK_WORDS * 64; bit++) rule->mask.word[bit / 64] |= 1ULL << bit % 64;
        if (process->alone && !avg_mask_narrows(rule, &process->cus)) { /* there is no slice's mask to fall back on */
            avg_say(process, AVG_SAY_CUS, "AMDVGPU_CUS leaves an XCC without a CU or splits a WGP: queues are refused", "");
            return -1;
        }
        rule->mask = avg_mask_narrow(rule, &process->cus);
        masked = 1;
    }
    return masked;
}

/* ------------------------------------------------------------------------------------------------------- charges */

static uint64_t place_of(uint32_t file, uint64_t handle, uint64_t room) {
    return ((handle ^ (uint64_t)file << 40) * 0x9e3779b97f4a7c15ULL >> 20) & (room - 1);
}

static void insert(struct avg_charge *charges, uint64_t room, const struct avg_charge *charge) {
    uint64_t at = place_of(charge->file, charge->handle, room);
    while (charges[at].bytes[0]) at = (at + 1) & (room - 1);
    charges[at] = *charge;
}

/* Its place in the table, or the empty one where the search ends. */
static uint64_t find(const struct avg_process *process, uint32_t file, uint64_t handle) {
    uint64_t room = process->charge_room, at = place_of(file, handle, room);
    while (process->charges[at].bytes[0] && (process->charges[at].handle != handle || process->charges[at].file != file))
        at = (at + 1) & (room - 1);
    return at;
}

int avg_charge_put(struct avg_process *process, const struct avg_charge *charge) {
    struct avg_charge stale;
    /* The driver gives out a handle that we hold a charge for: its memory went by a door we do not watch. */
    if (avg_charge_take(process, charge->file, charge->handle, &stale)) {
        avg_charge_undo(process, &stale, 1);
        if (stale.file) avg_file_count(process, stale.file, -1);
    }
    if (process->charge_count * 2 >= process->charge_room) {
        uint64_t room = process->charge_room ? process->charge_room * 2 : 4096;
        struct avg_charge *larger = avg_map(room * sizeof *larger, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
        if (!larger) return -1;
        for (uint64_t i = 0; i < process->charge_room; i++)
            if (process->charges[i].bytes[0]) insert(larger, room, &process->charges[i]);
        if (process->charges) AVG_SYS(munmap, process->charges, process->charge_room * sizeof *larger, 0, 0);
        process->charges = larger;
        process->charge_room = room;
    }
    insert(process->charges, process->charge_room, charge);
    process->charge_count++;
    return 0;
}

int avg_charge_has(struct avg_process *process, uint32_t file, uint64_t handle) {
    return process->charge_room && process->charges[find(process, file, handle)].bytes[0] != 0;
}

int avg_charge_take(struct avg_process *process, uint32_t file, uint64_t handle, struct avg_charge *charge) {
    uint64_t room = process->charge_room;
    if (!room) return 0;
    uint64_t at = find(process, file, handle);
    if (!process->charges[at].bytes[0]) return 0;
    *charge = process->charges[at];
    /* Close the gap: an entry further on moves here unless its own place lies behind the gap. */
    for (uint64_t next = (at + 1) & (room - 1); process->charges[next].bytes[0]; next = (next + 1) & (room - 1)) {
        uint64_t place = place_of(process->charges[next].file, process->charges[next].handle, room);
        if (((next - place) & (room - 1)) < ((next - at) & (room - 1))) continue;
        process->charges[at] = process->charges[next];
        at = next;
    }
    process->charges[at].bytes[0] = 0;
    process->charge_count--;
    return 1;
}

void avg_charge_undo(struct avg_process *process, const struct avg_charge *charge, int freed) {
    for (int i = 0; i < 2; i++) {
        if (!charge->bytes[i]) continue;
        if (charge->slice[i] == AVG_MAX_SLICES) process->foreign[charge->gpu[i]].held -= charge->bytes[i];
        else avg_withdraw(&process->slice[charge->slice[i]], charge->gpu[i], charge->bytes[i], freed);
    }
}

void avg_charge_drop_file(struct avg_process *process, uint32_t file) {
    struct avg_charge charge;
    for (uint64_t at = 0; at < process->charge_room;) { /* what is moved into a gap stands at the same place again */
        if (!process->charges[at].bytes[0] || process->charges[at].file != file) at++;
        else if (avg_charge_take(process, file, process->charges[at].handle, &charge)) {
            avg_charge_undo(process, &charge, 1);
            avg_file_count(process, file, -1);
        }
    }
}

int avg_process_has_files(void) { return __atomic_load_n(&kept.process.file_charges, __ATOMIC_RELAXED) != 0; }

avg_open_function *avg_program_open;

int avg_open_as_program(const char *path, int flags) {
    int error = errno;
    if (!avg_program_open) avg_program_open = (avg_open_function *)avg_next("open");
    int fd = avg_program_open ? avg_program_open(path, flags | O_CLOEXEC) : (int)AVG_SYS(openat, AT_FDCWD, path, flags | O_CLOEXEC, 0);
    errno = error;
    return fd < 0 ? -1 : fd;
}
