/* What the gate knows in this process: its slices, its charges by handle, its queues. One owner of all of it.
 *
 * Everything lies in pages that the kernel empties in a forked child (MADV_WIPEONFORK), the lock included: a lock held
 * by another thread at the moment of fork is free in the child, its tables are empty and its slot is not the parent's.
 * No handler has to run for that, so a raw clone is as good as fork. Where the kernel cannot (before 4.14) the pid is
 * compared instead. A vfork child shares its parent's memory and must not use the GPU; nothing is done about it. */
#ifndef AMDVGPU_PROCESS_H
#define AMDVGPU_PROCESS_H

#include "ledger.h"
#include "mask.h"

#define AVG_MAX_SLICES 16     /* policies that one process obeys; more of them: VRAM is refused */
#define AVG_MAX_QUEUES 1024   /* the driver's own limit per process */
#define AVG_SEEN_GPUS 64      /* GPUs of which something is remembered */
#define AVG_FOREIGN_GPUS 64   /* GPUs outside every policy on which a runtime's start is let through */
#define AVG_FILES 64          /* openings of render nodes that hold VRAM at one time; in the next one it is refused */
#define AVG_NODES 64          /* DRM nodes remembered, by minor; a collision is looked up again */
#define AVG_FOREIGN_MINOR 0xd0000000u /* with a minor: stands for the gpu_id of a GPU known by its DRM node only */

/* What the runtime's own start takes on every GPU it can open, whether or not the program means to use it: a block for
 * its own small needs. Measured with HIP 5.2.3 over the simulated KFD: one block of 2 MiB a GPU; four times that
 * is allowed. */
#define AVG_FOREIGN_BYTES (8ULL << 20)

struct avg_charge { /* one handle; at most two slices share an allocation */
    uint64_t handle;
    uint32_t file;              /* 0: a handle of /dev/kfd; else of a render node: its place in `file`, from 1 */
    uint64_t bytes[2];          /* [0] 0: the entry is empty */
    uint8_t slice[2], gpu[2];   /* slice AVG_MAX_SLICES: a foreign GPU, gpu its index there */
};

struct avg_queue {
    uint32_t gpu_id;            /* 0: no queue of ours has this id */
    uint32_t has_mask;
    struct avg_mask mask;       /* what the driver was last given */
};

enum avg_level { AVG_LOG_OFF, AVG_LOG_ERROR, AVG_LOG_WARN, AVG_LOG_INFO, AVG_LOG_DEBUG };

struct avg_process {
    uintptr_t lock;             /* 0 free, else a mark of the thread that holds it */
    int ready;                  /* the rest is filled in */
    uint32_t pid;               /* only where the kernel does not wipe */
    int barred;                 /* a slice that cannot be read, or a malformed limit: no VRAM where no policy is whole */
    int limit_bad;              /* AMDVGPU_VRAM or AMDVGPU_CUS is malformed: no VRAM at all */
    int alone;                  /* no daemon: the one slice is what the environment says */
    int postponed;              /* loading found only limits of the environment, which is for later (standalone.c) */
    uint32_t priority_limit;    /* AMD_TASK_PRIORITY, as a ceiling */
    enum avg_level log_level;   /* AMDVGPU_LOG */
    const char *log_file;       /* AMDVGPU_LOG_FILE; NULL: standard error */
    uint64_t vram_limit;        /* AMDVGPU_VRAM, per GPU; UINT64_MAX: not given */
    int cus_given;
    struct avg_mask cus;        /* AMDVGPU_CUS */
    struct avg_identity self;
    int slice_count;
    struct avg_account slice[AVG_MAX_SLICES];
    struct avg_charge *charges; /* open addressing; charge_room is a power of two */
    uint64_t charge_room, charge_count;
    struct avg_queue *queues;   /* by queue id */
    struct { uint32_t gpu_id; uint64_t held; } foreign[AVG_FOREIGN_GPUS];
    struct avg_seen { uint32_t gpu_id; int reserve_taken; uint64_t shown_total; uint32_t node_cus; } seen[AVG_SEEN_GPUS];
    struct avg_file { uint64_t opening; int minor; uint32_t charges; } file[AVG_FILES]; /* no charges: free */
    uint32_t file_charges;      /* their sum: read without the lock by who only wants to know whether there are any */
    struct avg_node { int minor; uint32_t gpu_id; } node[AVG_NODES];                   /* minor + 1 */
    uint64_t refused_bytes;     /* the last refusal: the runtime trims and asks for the same again, which counts once */
    uint64_t refused_ms;
    uint32_t refused_gpu_id;
    uint32_t said;              /* messages given (or kept back), one bit each: each is said once */
    int quiet;                  /* loading in a program that may never touch a GPU: nothing is said */
};

/* The process's state, loaded on first use, with the lock held; NULL where the lock cannot be had within seconds (a
 * thread died in it) or this thread holds it (a signal handler asks for memory in the middle of such a request): the
 * caller refuses what takes memory and lets the rest pass. Loading reads the policies. */
struct avg_process *avg_process_enter(int quiet); /* quiet: whatever loading has to complain of is not said */
void avg_process_leave(struct avg_process *process);

/* Forget everything, so that the next entry loads anew (and says what was not said). Only before the first charge. */
void avg_process_start_over(struct avg_process *process);

/* Whether there may be slices here at all: one system call, for a constructor that runs in every program. */
int avg_process_has_slices(void);

/* One cell that covers `gpu_id`, and what the slice allows there. */
struct avg_cover {
    struct avg_account *account;
    uint8_t slice, gpu;
    const struct avg_policy_gpu *entry;
    uint64_t quota;             /* after AMDVGPU_VRAM; the sum over all covers of a GPU never exceeds that */
};

/* The covers of `gpu_id` in policy order, at most `room`; their number. */
int avg_covers(struct avg_process *process, uint32_t gpu_id, struct avg_cover *covers, int room);

/* What all slices of this GPU together allow a queue. 1: masked, rule is filled in. 0: no mask. -1: the mask cannot be
 * had (being rewritten for too long): the queue must not run. */
int avg_mask_rule_of(struct avg_process *process, uint32_t gpu_id, struct avg_mask_rule *rule);

/* What is remembered of `gpu_id`; NULL where there is no more room (then nothing is remembered, which costs accuracy
 * of what is shown, not of what is held). */
struct avg_seen *avg_seen_of(struct avg_process *process, uint32_t gpu_id);

/* The table of charges, by file and handle. */
int avg_charge_put(struct avg_process *process, const struct avg_charge *charge); /* not 0: no room */
int avg_charge_take(struct avg_process *process, uint32_t file, uint64_t handle, struct avg_charge *charge); /* 1: removed */
int avg_charge_has(struct avg_process *process, uint32_t file, uint64_t handle);
void avg_charge_undo(struct avg_process *process, const struct avg_charge *charge, int freed);
void avg_charge_drop_file(struct avg_process *process, uint32_t file); /* undo all of one file's, as freed */

/* One charge more (1) or less (-1) in a file. */
static inline void avg_file_count(struct avg_process *process, uint32_t file, int by) {
    process->file[file - 1].charges += (uint32_t)by;
    __atomic_store_n(&process->file_charges, process->file_charges + (uint32_t)by, __ATOMIC_RELAXED);
}

/* Whether any render node holds charges; without the lock. */
int avg_process_has_files(void);

/* Give back what lay in render nodes that are closed (drm.c). */
void avg_forget_closed_files(struct avg_process *process);

/* open(2) as the program would have it, an emulator's paths included; -1 where that fails. Leaves errno alone. */
int avg_open_as_program(const char *path, int flags);
typedef int avg_open_function(const char *, int, ...);
extern avg_open_function *avg_program_open; /* the program's, where our own libc is not the program's (audit.c) */

struct avg_entry { uint64_t inode; int64_t offset; uint16_t bytes; uint8_t type; char name[]; }; /* of getdents64 */

/* One line, once per process and kind, unless AMDVGPU_LOG is off. */
enum avg_message {
    AVG_SAY_POLICY, AVG_SAY_LEDGER, AVG_SAY_LIMIT, AVG_SAY_SLOTS, AVG_SAY_FOREIGN, AVG_SAY_MASK_REFUSED, AVG_SAY_MASK_STALE, AVG_SAY_CUS,
    AVG_SAY_TABLE, AVG_SAY_USER_QUEUE, AVG_SAY_DOOR,
};
void avg_say(struct avg_process *process, enum avg_message kind, const char *first, const char *second);

/* Whether events of `level` are wanted: to be asked before anything is put together for avg_tell. */
static inline int avg_wants(const struct avg_process *process, enum avg_level level) {
    return __builtin_expect(process->log_level >= level, 0);
}

/* One event: "<what> gpu=<gpu_id> <name>=<value> ...", values by name until a name is NULL. */
struct avg_pair { const char *name; uint64_t value; int hex; };
void avg_tell(struct avg_process *process, enum avg_level level, const char *what, const struct avg_pair *pairs);

#endif
