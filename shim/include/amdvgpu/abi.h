/* The layout of a slice's two files, shared by the daemon (Python, through cffi) and the gate (libamdvgpu.so).
 *
 *   policy   what the slice may do. Written by the daemon only, mapped read-only by the gate. A guest cannot change it:
 *            it is mounted read-only and belongs to root.
 *   ledger   what the slice has taken: one slot a process. Written by the gate in every process of the slice, so by the
 *            guest: for the daemon each value in it is untrusted input.
 *
 * Rules
 *  - Version. AVG_VERSION is bumped when a reader of the old version would misunderstand a file of the new one. Giving
 *    meaning to a reserved field whose zero means "as before" is no reason. A gate that finds a newer version refuses VRAM.
 *  - Append only: no field moves, changes its width or its writer. Reserved bytes are zero.
 *  - Widths are fixed, all numbers are in the machine's own byte order, every 8-byte field is 8-byte aligned. Fields
 *    marked "live" change while guests run, by one aligned 8-byte store each; a reader loads them whole.
 *  - Writers are named per field: D the daemon, G the gate of the process that owns the slot, R whoever reclaims the
 *    slot of a dead process (another gate of the same pid namespace, or the daemon).
 *
 * The text between the two "cffi" lines is also read by shim/abi_build.py: plain declarations and literal numbers only.
 */
#ifndef AMDVGPU_ABI_H
#define AMDVGPU_ABI_H

#include <stddef.h>
#include <stdint.h>

/* cffi: begin */
#define AVG_VERSION 1
#define AVG_MAX_GPUS 16         /* core.model.MAX_GPUS_PER_SLICE */
#define AVG_SLOTS 128           /* processes of one slice that hold VRAM at one time; the next one is refused VRAM */
#define AVG_MASK_WORDS 16       /* 1024 bits: what the driver takes at most */
#define AVG_NAME_BYTES 64       /* slice name and its closing zero */
#define AVG_POLICY_BYTES 4096
#define AVG_LEDGER_HEAD_BYTES 2048
#define AVG_SLOT_HEAD_BYTES 64
#define AVG_CELL_BYTES 64

#define AVG_POLICY_MAGIC 0x31594c4f50475641ULL /* "AVGPOLY1" in little-endian memory */
#define AVG_LEDGER_MAGIC 0x314744454c475641ULL /* "AVGLEDG1" */

/* avg_policy_gpu.flags */
#define AVG_GPU_MASKED 1        /* cu_mask is to be set on every compute queue; without it the whole Partition is granted */
#define AVG_GPU_WGP 2           /* gfx10 and later: mask bits come in pairs that must not be split */
#define AVG_GPU_OVERSUBSCRIBE 4 /* where the driver has no VRAM left, host memory (GTT) serves instead; the quota holds */
#define AVG_GPU_UNMASKED_OK 8   /* a queue whose mask the driver refuses may live (7.2.4 aborts where it is destroyed) */

#define AVG_PRIORITY_NONE 15    /* the highest queue priority the driver knows: as a ceiling, none */

/* avg_slot.owner, from the highest bit: pid namespace inode (32), generation (9), being reclaimed (1), pid (22; Linux
 * has no higher pids). pid 0: the slot is free. The generation counts claims, so that a reclaimer that slept since it
 * found the owner dead cannot take the slot from its next owner, even one with the same pid. */
#define AVG_OWNER_PID_MASK 0x3fffffULL
#define AVG_OWNER_RECLAIM 0x400000ULL
#define AVG_OWNER_GEN_SHIFT 23
#define AVG_OWNER_GEN_MASK 0x1ffULL
#define AVG_OWNER_NS_SHIFT 32

/* avg_cell.earmark: end of the promise in ms of CLOCK_MONOTONIC (40 bits), then MiB promised (24 bits) */
#define AVG_EARMARK_MIB_MASK 0xffffffULL
#define AVG_EARMARK_MS_SHIFT 24

/* One GPU of a policy. Writer: D. */
struct avg_policy_gpu {
    uint32_t kfd_gpu_id;        /* as the KFD numbers it in this boot; never 0 below gpu_count */
    uint32_t kfd_node;          /* its node under topology/nodes */
    uint64_t vram_bytes;        /* live: the quota */
    uint64_t physical_bytes;    /* VRAM of the Partition; total shown = min(vram_bytes, physical_bytes) */
    uint32_t cu_count;          /* active CUs of the KFD node that cu_mask was made for; on another count it is not sent */
    uint16_t xcc_count;         /* mask bits are dealt out over XCCs: bit b lands on XCC b mod xcc_count */
    uint16_t flags;             /* AVG_GPU_* */
    uint32_t priority;          /* ceiling of queue priorities, 0 to 15 */
    uint32_t render_minor;      /* of its render node, 128 and up; 0: not told, and so requests on render nodes pass */
    uint64_t reserved1;
    uint64_t cu_mask[AVG_MASK_WORDS]; /* bit b of the mask is bit b%64 of word b/64; zero beyond cu_count */
    uint64_t reserved2[8];
};

/* The policy file. Writer: D. */
struct avg_policy {
    uint64_t magic;             /* AVG_POLICY_MAGIC; stored last when the file is made */
    uint32_t version;           /* AVG_VERSION of the writer */
    uint32_t bytes;             /* AVG_POLICY_BYTES of the writer: a shorter file is damaged */
    uint32_t gpu_count;         /* 1 to AVG_MAX_GPUS; cell i of a ledger slot belongs to gpu[i]. Never changes in place */
    uint32_t flags;             /* none defined */
    uint64_t sequence;          /* live: odd while fields other than vram_bytes are being rewritten */
    uint64_t slice_key;         /* random, the same in the ledger: the two files belong together */
    uint64_t cu_mask_env_hash;  /* avg_text_hash of the HSA_CU_MASK the daemon wrote for this slice; 0: none written */
    uint64_t visible_env_hash;  /* the same of ROCR_VISIBLE_DEVICES */
    uint64_t reserved0;
    char name[AVG_NAME_BYTES];  /* the slice's name, for messages */
    uint64_t reserved1[16];
    struct avg_policy_gpu gpu[AVG_MAX_GPUS];
};

/* What one process has of one GPU: one cache line, so that processes do not fight over lines.
 * The order of writes is a promise to readers (shim/src/ledger.c argues it): bytes appear in `used` before they leave
 * `pending` or `earmark`, and readers read `used` last, so a sum errs high and never low. */
struct avg_cell {
    uint64_t used;              /* G R: bytes charged */
    uint64_t pending;           /* G R: bytes announced, not yet admitted */
    uint64_t earmark;           /* G R: bytes promised for a moment to a request that must not fail, and until when */
    uint64_t peak;              /* G: highest total of the slice that this process saw at an admission */
    uint64_t allocations;       /* G: charges made */
    uint64_t frees;             /* G: charges withdrawn after a successful FREE */
    uint64_t denials;           /* G: requests refused over quota; the runtime's own second attempt counts once */
    uint64_t denied_bytes;      /* G: their sum */
};

/* One process. gpu_count cells follow, so a slot is AVG_SLOT_HEAD_BYTES + gpu_count * AVG_CELL_BYTES long. */
struct avg_slot {
    uint64_t owner;             /* G R: AVG_OWNER_*; the only word by which a slot changes hands (compare and swap) */
    uint64_t start_ticks;       /* G: field 22 of /proc/<pid>/stat; 0 until written, 1 where /proc cannot be read */
    uint64_t cookie[2];         /* G: AT_RANDOM's 16 bytes: exec keeps pid and start time but not these */
    uint64_t notes;             /* G: AVG_NOTE_*, what the daemon should show */
    uint64_t reserved[3];
};

/* avg_slot.notes */
#define AVG_NOTE_MASK_REFUSED 1   /* the driver refused the slice's CU mask on a queue */
#define AVG_NOTE_MASK_STALE 2     /* the mask was made for another CU count (partition mode changed) and was not sent */
#define AVG_NOTE_GTT 4            /* host memory served in place of VRAM */

/* What dead processes left behind in the counters, per GPU, so that totals never run backwards. */
struct avg_past {
    uint64_t peak;              /* R */
    uint64_t allocations;       /* R */
    uint64_t frees;             /* R */
    uint64_t denials;           /* R */
    uint64_t denied_bytes;      /* R */
    uint64_t reclaimed_bytes;   /* R: charges of dead processes given back to the slice */
    uint64_t kfd_gpu_id;        /* G: without a daemon, whose cells these are; 0 where the policy tells */
    uint64_t reserved;
};

/* The head of the ledger file; AVG_SLOTS slots follow at AVG_LEDGER_HEAD_BYTES. */
struct avg_ledger {
    uint64_t magic;             /* D: AVG_LEDGER_MAGIC */
    uint32_t version;           /* D */
    uint32_t slot_count;        /* D: AVG_SLOTS */
    uint32_t slot_bytes;        /* D: AVG_SLOT_HEAD_BYTES + gpu_count * AVG_CELL_BYTES */
    uint32_t gpu_count;         /* D: as in the policy */
    uint64_t slice_key;         /* D: as in the policy */
    uint64_t occupied[2];       /* G R: bit i%64 of word i/64: slot i may hold bytes. Set after a claim and before the first
                                 * byte, cleared by whoever reclaims, before the slot is free: so both under ownership
                                 * of the slot. A sum looks at these slots only */
    uint64_t first_owner;       /* G: without a daemon, pid namespace and pid of the process that the limit started with */
    uint64_t first_start;       /* G: and its start time */
    uint64_t reserved[24];
    struct avg_past past[AVG_MAX_GPUS];
    uint64_t reserved1[96];
};
/* cffi: end */

/* FNV-1a, 64 bits, of `length` bytes; never 0, which stands for "no text". */
static inline uint64_t avg_text_hash(const char *text, size_t length) {
    uint64_t hash = 0xcbf29ce484222325ULL;
    for (size_t i = 0; i < length; i++) hash = (hash ^ (unsigned char)text[i]) * 0x100000001b3ULL;
    return hash ? hash : 1;
}

static inline size_t avg_slot_bytes(uint32_t gpu_count) {
    return AVG_SLOT_HEAD_BYTES + (size_t)gpu_count * AVG_CELL_BYTES;
}

static inline size_t avg_ledger_bytes(uint32_t gpu_count) {
    return AVG_LEDGER_HEAD_BYTES + AVG_SLOTS * avg_slot_bytes(gpu_count);
}

#define AVG_AT(type, field, offset) \
    _Static_assert(offsetof(struct type, field) == (offset), #type "." #field " has moved: the layout is append only")
#define AVG_SIZE(type, size) _Static_assert(sizeof(struct type) == (size), #type " has changed its size")

AVG_AT(avg_policy_gpu, kfd_gpu_id, 0);
AVG_AT(avg_policy_gpu, kfd_node, 4);
AVG_AT(avg_policy_gpu, vram_bytes, 8);
AVG_AT(avg_policy_gpu, physical_bytes, 16);
AVG_AT(avg_policy_gpu, cu_count, 24);
AVG_AT(avg_policy_gpu, xcc_count, 28);
AVG_AT(avg_policy_gpu, flags, 30);
AVG_AT(avg_policy_gpu, priority, 32);
AVG_AT(avg_policy_gpu, render_minor, 36);
AVG_AT(avg_policy_gpu, cu_mask, 48);
AVG_SIZE(avg_policy_gpu, 240);
AVG_AT(avg_policy, magic, 0);
AVG_AT(avg_policy, version, 8);
AVG_AT(avg_policy, bytes, 12);
AVG_AT(avg_policy, gpu_count, 16);
AVG_AT(avg_policy, flags, 20);
AVG_AT(avg_policy, sequence, 24);
AVG_AT(avg_policy, slice_key, 32);
AVG_AT(avg_policy, cu_mask_env_hash, 40);
AVG_AT(avg_policy, visible_env_hash, 48);
AVG_AT(avg_policy, name, 64);
AVG_AT(avg_policy, gpu, 256);
AVG_SIZE(avg_policy, AVG_POLICY_BYTES);
AVG_AT(avg_cell, used, 0);
AVG_AT(avg_cell, pending, 8);
AVG_AT(avg_cell, earmark, 16);
AVG_AT(avg_cell, peak, 24);
AVG_AT(avg_cell, allocations, 32);
AVG_AT(avg_cell, frees, 40);
AVG_AT(avg_cell, denials, 48);
AVG_AT(avg_cell, denied_bytes, 56);
AVG_SIZE(avg_cell, AVG_CELL_BYTES);
AVG_AT(avg_slot, owner, 0);
AVG_AT(avg_slot, start_ticks, 8);
AVG_AT(avg_slot, cookie, 16);
AVG_AT(avg_slot, notes, 32);
AVG_SIZE(avg_slot, AVG_SLOT_HEAD_BYTES);
AVG_AT(avg_past, reclaimed_bytes, 40);
AVG_AT(avg_past, kfd_gpu_id, 48);
AVG_SIZE(avg_past, 64);
AVG_AT(avg_ledger, magic, 0);
AVG_AT(avg_ledger, version, 8);
AVG_AT(avg_ledger, slot_count, 12);
AVG_AT(avg_ledger, slot_bytes, 16);
AVG_AT(avg_ledger, gpu_count, 20);
AVG_AT(avg_ledger, slice_key, 24);
AVG_AT(avg_ledger, occupied, 32);
AVG_AT(avg_ledger, first_owner, 48);
AVG_AT(avg_ledger, past, 256);
AVG_SIZE(avg_ledger, AVG_LEDGER_HEAD_BYTES);

#endif
