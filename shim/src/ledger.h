/* The slots of one slice's ledger: claim one, charge it, give back. The contract; ledger.c has the argument. */
#ifndef AMDVGPU_LEDGER_H
#define AMDVGPU_LEDGER_H

#include "slot.h"

/* Who this process is, in the words of a slot. */
struct avg_identity {
    uint32_t pid, ns;       /* ns 1: our /proc does not tell */
    uint64_t start_ticks;   /* 1: our /proc does not tell */
    uint64_t cookie[2];
    int secure;             /* a set-uid or otherwise privileged program: the environment is somebody else's word */
};

/* Fill `identity` in. Called once per process image; makes system calls. */
void avg_identify(struct avg_identity *identity);

/* One slice as this process sees it. The calls below must not run at the same time in two threads of a process. */
struct avg_account {
    const struct avg_policy *policy;        /* mapped read-only */
    struct avg_ledger *ledger;              /* mapped shared; NULL: unusable, and so no VRAM */
    uint32_t gpu_count;
    uint32_t slot;                          /* ours, where `owner` is not 0 */
    uint64_t owner;                         /* the word by which the slot is ours */
    uint64_t held[AVG_MAX_GPUS];            /* what we charged: restored if the slot is lost */
    uint64_t last_total[AVG_MAX_GPUS];      /* the slice's total when we last looked: a guess of what it is now */
};

/* Have a slot, clearing those of the dead when a new one is taken. Not 0: there is none. The calls below do it themselves
 * where they need one. */
int avg_settle(struct avg_account *account, const struct avg_identity *self);

/* Clear the slots of the dead, having one or not: for who only looks. */
void avg_bury(struct avg_account *account, const struct avg_identity *self);

/* Whether the process that `owner` (namespace and pid) and its start time name may still be there. */
int avg_lives(uint64_t owner, uint64_t start_ticks, const struct avg_identity *self);

enum avg_verdict { AVG_ADMITTED, AVG_OVER, AVG_NO_SLOT, AVG_BUSY };

/* Charge `bytes` of GPU `gpu` (its index in the policy) against `quota`. Whatever else happens, the sum of all charges of
 * the slice stays within the quota it was admitted by. Waits half a second at most, for a neighbour that is between
 * announcing and deciding; nearly always it does not wait at all. */
enum avg_verdict avg_admit(struct avg_account *account, const struct avg_identity *self, uint32_t gpu, uint64_t bytes,
                           uint64_t quota);

/* Take a charge back. `freed`: the driver gave the memory back (and did not merely refuse it). */
void avg_withdraw(struct avg_account *account, uint32_t gpu, uint64_t bytes, int freed);

/* Bytes of the slice that are taken or promised to others, pending requests included. Errs high for a moment, never low. */
uint64_t avg_taken(const struct avg_account *account, uint32_t gpu);

/* Set `bytes` aside for a request of ours that must not fail, for `ms`. Replaces an earlier promise on this GPU.
 * Not 0 where the quota has no room for it: then nothing was promised. */
int avg_promise(struct avg_account *account, const struct avg_identity *self, uint32_t gpu, uint64_t bytes,
                uint64_t quota, uint64_t ms);

/* Charge `bytes` to what avg_promise set aside. Not 0 where there is no such promise any more. */
int avg_redeem(struct avg_account *account, uint32_t gpu, uint64_t bytes);

/* Count a refusal that is told to the caller. */
void avg_deny(struct avg_account *account, const struct avg_identity *self, uint32_t gpu, uint64_t bytes);

/* Set bits of AVG_NOTE_* in our slot. */
void avg_note(struct avg_account *account, const struct avg_identity *self, uint64_t notes);

/* Give back what an earlier image of this very process (before exec) left charged. */
void avg_forget_past_image(struct avg_account *account, const struct avg_identity *self);

#endif
