/* One slot of a ledger: where it lies, whose it is, and how the slot of a dead process is taken apart.
 *
 * Shared by the gate (src/ledger.c) and the daemon (amdvgpud._abi), because both reclaim and the protocol must be one.
 * Sizes come from the policy's gpu_count, never from the ledger's own header, which the guest can write.
 *
 * How a slot changes hands. `owner` is the only word that decides, and it changes by compare-and-swap only:
 *
 *   free (pid 0, generation g)
 *     --claim-->    {ns, g+1, pid}            start_ticks is 0 until the claimer has written it
 *     --reclaim-->  {ns', g+2, RECLAIM, pid'}  of the reclaimer: it alone clears the cells
 *     --release-->  free (pid 0, generation g+2)
 *
 * Two reclaimers cannot both win, so a slow one never clears what a new owner has charged; the generation keeps the
 * swap of one that fell asleep from fitting a later owner with the same pid. A claimer or reclaimer that dies half-way
 * leaves a slot whose owner is dead, to be reclaimed again: clearing is idempotent. While start_ticks cannot be believed
 * (0, or RECLAIM set) only the absence of the pid counts as death: errs towards keeping the charge. */
#ifndef AMDVGPU_SLOT_H
#define AMDVGPU_SLOT_H

#include <amdvgpu/abi.h>

#define AVG_LOAD(at) __atomic_load_n((at), __ATOMIC_SEQ_CST)
#define AVG_STORE(at, value) __atomic_store_n((at), (value), __ATOMIC_SEQ_CST)

static inline struct avg_slot *avg_slot_at(struct avg_ledger *ledger, uint32_t gpu_count, uint32_t index) {
    return (struct avg_slot *)((char *)ledger + AVG_LEDGER_HEAD_BYTES + index * avg_slot_bytes(gpu_count));
}

static inline struct avg_cell *avg_cell_at(struct avg_slot *slot, uint32_t gpu) {
    return (struct avg_cell *)((char *)slot + AVG_SLOT_HEAD_BYTES) + gpu;
}

static inline uint32_t avg_owner_pid(uint64_t owner) { return owner & AVG_OWNER_PID_MASK; }
static inline uint32_t avg_owner_ns(uint64_t owner) { return owner >> AVG_OWNER_NS_SHIFT; }

/* The word that follows `before` when process `pid` of namespace `ns` takes the slot (both 0: sets it free). */
static inline uint64_t avg_owner_after(uint64_t before, uint32_t ns, uint32_t pid, uint64_t reclaim) {
    uint64_t generation = (before >> AVG_OWNER_GEN_SHIFT) & AVG_OWNER_GEN_MASK;
    if (pid) generation = (generation + 1) & AVG_OWNER_GEN_MASK;
    return (uint64_t)ns << AVG_OWNER_NS_SHIFT | generation << AVG_OWNER_GEN_SHIFT | reclaim | (pid & AVG_OWNER_PID_MASK);
}

static inline int avg_owner_swap(struct avg_slot *slot, uint64_t expected, uint64_t wanted) {
    return __atomic_compare_exchange_n(&slot->owner, &expected, wanted, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

/* Fold a cell's counters into the ledger's past and set it to zero. The cell's owner must be the caller, or dead and the
 * slot the caller's. The counters are for people: a crash in here can count an event twice or not at all, never bytes. */
static inline uint64_t avg_cell_clear(struct avg_cell *cell, struct avg_past *past) {
    uint64_t bytes = AVG_LOAD(&cell->used), peak = AVG_LOAD(&cell->peak), seen = AVG_LOAD(&past->peak);
    while (seen < peak && !__atomic_compare_exchange_n(&past->peak, &seen, peak, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
    __atomic_fetch_add(&past->allocations, __atomic_exchange_n(&cell->allocations, 0, __ATOMIC_SEQ_CST), __ATOMIC_RELAXED);
    __atomic_fetch_add(&past->frees, __atomic_exchange_n(&cell->frees, 0, __ATOMIC_SEQ_CST), __ATOMIC_RELAXED);
    __atomic_fetch_add(&past->denials, __atomic_exchange_n(&cell->denials, 0, __ATOMIC_SEQ_CST), __ATOMIC_RELAXED);
    __atomic_fetch_add(&past->denied_bytes, __atomic_exchange_n(&cell->denied_bytes, 0, __ATOMIC_SEQ_CST), __ATOMIC_RELAXED);
    __atomic_fetch_add(&past->reclaimed_bytes, bytes, __ATOMIC_RELAXED);
    AVG_STORE(&cell->peak, 0);
    AVG_STORE(&cell->earmark, 0);
    AVG_STORE(&cell->pending, 0);
    AVG_STORE(&cell->used, 0);
    return bytes;
}

/* Take the slot of a dead process apart, for process `pid` of namespace `ns`. `dead` is the owner word that was judged.
 * Returns the bytes given back; 0 also where somebody else was quicker. */
static inline uint64_t avg_slot_reclaim(struct avg_ledger *ledger, uint32_t gpu_count, uint32_t index, uint64_t dead,
                                        uint32_t ns, uint32_t pid) {
    struct avg_slot *slot = avg_slot_at(ledger, gpu_count, index);
    uint64_t mine = avg_owner_after(dead, ns, pid, AVG_OWNER_RECLAIM), bytes = 0;
    if (!avg_owner_swap(slot, dead, mine)) return 0;
    for (uint32_t gpu = 0; gpu < gpu_count; gpu++) bytes += avg_cell_clear(avg_cell_at(slot, gpu), &ledger->past[gpu]);
    AVG_STORE(&slot->notes, 0);
    AVG_STORE(&slot->cookie[0], 0);
    AVG_STORE(&slot->cookie[1], 0);
    AVG_STORE(&slot->start_ticks, 0);
    __atomic_fetch_and(&ledger->occupied[index / 64], ~(1ULL << index % 64), __ATOMIC_SEQ_CST);
    avg_owner_swap(slot, mine, avg_owner_after(mine, 0, 0, 0));
    return bytes;
}

#endif
