#include "memory.h"

#include <errno.h>

#include "os.h"

/* ROCr sets this much aside for scratch, once a process and GPU, if AVAILABLE_MEMORY just said that eight times as much
 * is free; and it aborts the process if that request is then refused. So a promise is kept for it between the two. */
#define RESERVE_BYTES (140ULL << 20)
#define RESERVE_FLOOR (8 * RESERVE_BYTES)
#define RESERVE_MS 1000   /* guessed: the request follows the question within microseconds */
#define RETRY_MS 1000     /* guessed: within this an equal request is the runtime's own second attempt */

static int fail(int error) {
    errno = error; /* only ENOMEM is ever told: the runtime's thunk loops for ever on EINTR and EAGAIN */
    return -1;
}

/* Not PUBLIC, not executable, large: of what runtimes were seen to ask for, only the scratch reserve looks like this. */
static int is_reserve(const struct kfd_alloc_memory *asked) {
    return !(asked->flags & (KFD_MEMORY_PUBLIC | KFD_MEMORY_EXECUTABLE)) && asked->bytes >= 16 << 20 &&
           asked->bytes <= RESERVE_BYTES;
}

/* ------------------------------------------------------------------------------------------------------- charging */

static int charge_foreign(struct avg_process *process, const struct kfd_alloc_memory *asked, struct avg_charge *charge) {
    if (process->barred) return -1;
    for (int i = 0; i < AVG_FOREIGN_GPUS; i++) {
        if (!process->foreign[i].gpu_id) process->foreign[i].gpu_id = asked->gpu_id;
        if (process->foreign[i].gpu_id != asked->gpu_id) continue;
        if (avg_sum(process->foreign[i].held, asked->bytes) > AVG_FOREIGN_BYTES) {
            avg_say(process, AVG_SAY_FOREIGN, "VRAM of a GPU that is in no slice of this process is refused", "");
            return -1;
        }
        process->foreign[i].held += asked->bytes;
        *charge = (struct avg_charge){.bytes = {asked->bytes}, .slice = {AVG_MAX_SLICES}, .gpu = {(uint8_t)i}};
        return 0;
    }
    return -1;
}

/* Charge the request to the first slice with room; where none has room for all of it but the first two have together,
 * to both. */
static enum avg_verdict admit(struct avg_process *process, const struct kfd_alloc_memory *asked, struct avg_cover *covers,
                              int count, struct avg_charge *charge) {
    const struct avg_identity *self = &process->self;
    struct avg_seen *seen = avg_seen_of(process, asked->gpu_id);
    enum avg_verdict verdict = AVG_OVER;
    for (int i = 0; i < count; i++) {
        *charge = (struct avg_charge){.bytes = {asked->bytes}, .slice = {covers[i].slice}, .gpu = {covers[i].gpu}};
        if (is_reserve(asked) && !avg_redeem(covers[i].account, covers[i].gpu, asked->bytes)) {
            if (seen) seen->reserve_taken = 1;
            return AVG_ADMITTED;
        }
        enum avg_verdict one = avg_admit(covers[i].account, self, covers[i].gpu, asked->bytes, covers[i].quota);
        if (one == AVG_ADMITTED) return one;
        if (one == AVG_NO_SLOT) verdict = one;
    }
    for (int i = 0; i + 1 < count; i++) {
        struct avg_cover *a = &covers[i], *b = &covers[i + 1];
        if (!a->account->ledger || !b->account->ledger) continue;
        uint64_t first = avg_less(a->quota, avg_taken(a->account, a->gpu)) & ~4095ULL;
        if (!first || first >= asked->bytes) continue;
        if (avg_admit(a->account, self, a->gpu, first, a->quota) != AVG_ADMITTED) continue;
        if (avg_admit(b->account, self, b->gpu, asked->bytes - first, b->quota) == AVG_ADMITTED) {
            *charge = (struct avg_charge){.bytes = {first, asked->bytes - first}, .slice = {a->slice, b->slice}, .gpu = {a->gpu, b->gpu}};
            return AVG_ADMITTED;
        }
        avg_withdraw(a->account, a->gpu, first, 0);
    }
    return verdict;
}

static void tell(struct avg_process *process, enum avg_level level, const char *what, uint32_t gpu_id, uint64_t bytes, const struct avg_cover *cover) {
    const struct avg_account *account = cover->account;
    struct avg_pair pairs[] = {
        {"gpu", gpu_id, 0}, {"bytes", bytes, 0}, {"used", account->ledger ? avg_taken(account, cover->gpu) : 0, 0},
        {"quota", cover->quota, 0}, {"slot", account->slot, 0}, {0},
    };
    avg_tell(process, level, what, pairs);
}

static int charge_slices(struct avg_process *process, const struct kfd_alloc_memory *asked, struct avg_cover *covers,
                         int count, struct avg_charge *charge) {
    const struct avg_identity *self = &process->self;
    enum avg_verdict verdict = admit(process, asked, covers, count, charge);
    if (verdict != AVG_ADMITTED && process->file_charges) {
        avg_forget_closed_files(process);
        verdict = admit(process, asked, covers, count, charge);
    }
    if (verdict == AVG_ADMITTED) return 0;
    if (verdict == AVG_NO_SLOT && covers[0].account->ledger)
        avg_say(process, AVG_SAY_SLOTS, covers[0].account->policy->name, ": no free slot in the ledger (128 processes), VRAM is refused");
    uint64_t now = avg_now_ms();
    int retry = process->refused_gpu_id == asked->gpu_id && process->refused_bytes == asked->bytes && now - process->refused_ms < RETRY_MS;
    if (!retry) avg_deny(covers[0].account, self, covers[0].gpu, asked->bytes);
    if (!retry && avg_wants(process, AVG_LOG_INFO)) tell(process, AVG_LOG_INFO, "VRAM refused", asked->gpu_id, asked->bytes, covers);
    process->refused_gpu_id = retry ? 0 : asked->gpu_id; /* a third attempt is the program's again */
    process->refused_bytes = asked->bytes;
    process->refused_ms = now;
    return -1;
}

int avg_charge_request(struct avg_process *process, const struct kfd_alloc_memory *asked, struct avg_charge *charge) {
    struct avg_cover covers[AVG_MAX_SLICES];
    int count = avg_covers(process, asked->gpu_id, covers, AVG_MAX_SLICES);
    if (process->limit_bad) return -1;
    return count ? charge_slices(process, asked, covers, count, charge) : charge_foreign(process, asked, charge);
}

/* Whether host memory may serve where the GPU has none left. Never for what is small and hot or checked by the driver
 * (scratch, queue memory, code): those are not PUBLIC, or small. */
static int may_be_host_memory(const struct kfd_alloc_memory *asked, const struct avg_cover *covers, int count) {
    if (!(asked->flags & KFD_MEMORY_PUBLIC) || asked->bytes < 2 << 20) return 0;
    for (int i = 0; i < count; i++)
        if (covers[i].entry->flags & AVG_GPU_OVERSUBSCRIBE) return 1;
    return 0;
}

int avg_alloc_memory(int fd, unsigned long request, struct kfd_alloc_memory *asked, avg_request *next) {
    if (!(asked->flags & KFD_MEMORY_VRAM) || !asked->bytes) return next(fd, request, asked);
    struct kfd_alloc_memory copy = *asked; /* what is charged is what was looked at */
    struct avg_cover covers[AVG_MAX_SLICES];
    struct avg_charge charge;
    struct avg_process *process = avg_process_enter(0);
    if (!process) return fail(ENOMEM);
    if (!process->slice_count && !process->barred) { /* no slice here: not ours to limit */
        avg_process_leave(process);
        return next(fd, request, asked);
    }
    int count = avg_covers(process, copy.gpu_id, covers, AVG_MAX_SLICES);
    int refused = avg_charge_request(process, &copy, &charge);
    avg_process_leave(process);
    if (refused) return fail(ENOMEM);

    int result = next(fd, request, asked), error = errno;
    int host = result && error == ENOMEM && may_be_host_memory(&copy, covers, count);
    if (host) { /* the charge stands: the quota is one, whichever memory serves it */
        asked->flags = (copy.flags & ~KFD_MEMORY_VRAM) | KFD_MEMORY_GTT;
        result = next(fd, request, asked);
        asked->flags = copy.flags; /* the caller's structure is the caller's; the driver does not write them back */
    }
    charge.handle = asked->handle;
    process = avg_process_enter(0);
    if (process && !result && count && avg_wants(process, AVG_LOG_DEBUG))
        tell(process, AVG_LOG_DEBUG, host ? "host memory in place of VRAM" : "VRAM charged", copy.gpu_id, copy.bytes, covers);
    if (process && host && !result) avg_note(covers[0].account, &process->self, AVG_NOTE_GTT);
    if (result) {
        if (process) {
            avg_charge_undo(process, &charge, 0);
            avg_process_leave(process);
        } /* else the charge stays until the process ends: errs towards the quota */
        errno = error;
        return result;
    }
    int lost = process ? avg_charge_put(process, &charge) : -1;
    if (process) {
        if (lost) {
            avg_charge_undo(process, &charge, 0);
            avg_say(process, AVG_SAY_TABLE, "no memory for the table of allocations, VRAM is refused", "");
        }
        avg_process_leave(process);
    }
    if (lost) { /* memory that could not be given back to the quota when it is freed: better none */
        struct kfd_free_memory back = {charge.handle};
        next(fd, KFD_FREE_MEMORY, &back);
        return fail(ENOMEM);
    }
    errno = error;
    return 0;
}

int avg_free_memory(int fd, unsigned long request, struct kfd_free_memory *asked, avg_request *next) {
    struct avg_charge charge;
    /* The entry is taken out before the memory goes: afterwards another thread may be given the same handle. */
    uint64_t handle = asked->handle;
    struct avg_process *process = avg_process_enter(0);
    if (!process) return next(fd, request, asked);
    int found = avg_charge_take(process, 0, handle, &charge);
    avg_process_leave(process);
    int result = next(fd, request, asked), error = errno;
    if (!found) return result; /* imported, host memory, or our parent's */
    process = avg_process_enter(0);
    if (process) {
        if (result) avg_charge_put(process, &charge); /* still there */
        else {
            avg_charge_undo(process, &charge, 1);
            if (avg_wants(process, AVG_LOG_DEBUG)) {
                struct avg_pair pairs[] = {{"handle", handle, 0}, {"bytes", charge.bytes[0] + charge.bytes[1], 0}, {0}};
                avg_tell(process, AVG_LOG_DEBUG, "VRAM given back", pairs);
            }
        }
        avg_process_leave(process);
    }
    errno = error;
    return result;
}

/* Restoring a checkpoint makes buffers that no ALLOC asked for, and a second context of a process has handles that look
 * like the first's. Neither is anything a runtime does by itself. */
int avg_other_door(int fd, unsigned long request, void *argument, avg_request *next) {
    struct avg_process *process = avg_process_enter(0);
    int refused = !process || process->slice_count || process->barred;
    if (process && refused) avg_say(process, AVG_SAY_DOOR, "memory that cannot be counted (CRIU restore, a second KFD context) is refused in a slice", "");
    if (process) avg_process_leave(process);
    return refused ? fail(ENOMEM) : next(fd, request, argument);
}

/* ------------------------------------------------------------------------------------------------------- reporting */

static uint64_t total_of(const struct avg_cover *covers, int count, uint64_t physical) {
    uint64_t total = 0;
    int oversubscribed = 0;
    for (int i = 0; i < count; i++) {
        total = avg_sum(total, covers[i].quota);
        if (covers[i].entry->flags & AVG_GPU_OVERSUBSCRIBE) oversubscribed = 1;
    }
    return oversubscribed ? total : avg_min(total, physical);
}

int avg_shown_of(struct avg_process *process, uint32_t gpu_id, struct avg_shown *shown) {
    struct avg_cover covers[AVG_MAX_SLICES];
    int count = avg_covers(process, gpu_id, covers, AVG_MAX_SLICES);
    if (!count) return -1;
    avg_forget_closed_files(process);
    struct avg_seen *seen = avg_seen_of(process, gpu_id);
    *shown = (struct avg_shown){total_of(covers, count, covers[0].entry->physical_bytes), 0};
    if (seen && seen->shown_total) shown->total = seen->shown_total; /* what the runtime of this process believes */
    for (int i = 0; i < count; i++) {
        if (!covers[i].account->ledger) continue;
        avg_bury(covers[i].account, &process->self);
        shown->used = avg_sum(shown->used, avg_taken(covers[i].account, covers[i].gpu));
    }
    shown->used = avg_min(shown->used, shown->total);
    return 0;
}

int avg_available_memory(int fd, unsigned long request, struct kfd_available_memory *asked, avg_request *next) {
    int result = next(fd, request, asked), error = errno;
    if (result) return result;
    uint32_t gpu_id = asked->gpu_id;
    struct avg_cover covers[AVG_MAX_SLICES];
    struct avg_process *process = avg_process_enter(0);
    if (!process) { /* nothing will be given either */
        asked->available = 0;
        return 0;
    }
    int count = avg_covers(process, gpu_id, covers, AVG_MAX_SLICES);
    if (count) {
        avg_forget_closed_files(process);
        uint64_t room = 0, driver = asked->available;
        int oversubscribed = 0;
        for (int i = 0; i < count; i++) {
            if (!avg_settle(covers[i].account, &process->self)) room = avg_sum(room, avg_less(covers[i].quota, avg_taken(covers[i].account, covers[i].gpu)));
            if (covers[i].entry->flags & AVG_GPU_OVERSUBSCRIBE) oversubscribed = 1;
        }
        uint64_t answer = oversubscribed ? room : avg_min(room, driver);
        struct avg_seen *seen = avg_seen_of(process, gpu_id);
        if (seen && seen->shown_total) answer = avg_min(answer, seen->shown_total);
        if (process->limit_bad) answer = 0;
        if (answer > RESERVE_FLOOR && !(seen && seen->reserve_taken)) {
            int kept = 0;
            for (int i = 0; i < count && !kept; i++)
                kept = !avg_promise(covers[i].account, &process->self, covers[i].gpu, RESERVE_BYTES, covers[i].quota, RESERVE_MS);
            if (!kept) answer = RESERVE_FLOOR; /* not enough for the runtime to want its reserve */
        }
        asked->available = answer;
    } else if (process->slice_count || process->barred) {
        asked->available = process->barred ? 0 : avg_min(asked->available, AVG_FOREIGN_BYTES);
    }
    avg_process_leave(process);
    errno = error;
    return 0;
}

uint64_t avg_total_of_node(uint32_t node, uint64_t physical) {
    struct avg_process *process = avg_process_enter(0);
    if (!process) return physical;
    uint64_t total = physical;
    for (int i = 0; i < process->slice_count; i++) {
        const struct avg_account *account = &process->slice[i];
        for (uint32_t gpu = 0; gpu < account->gpu_count; gpu++) {
            const struct avg_policy_gpu *entry = &account->policy->gpu[gpu];
            struct avg_cover covers[AVG_MAX_SLICES];
            if (entry->kfd_node != node) continue;
            /* Physical from the policy: the file may already be the overlay, which shows one slice's share. */
            int count = avg_covers(process, entry->kfd_gpu_id, covers, AVG_MAX_SLICES);
            total = total_of(covers, count, entry->physical_bytes);
            struct avg_seen *seen = avg_seen_of(process, entry->kfd_gpu_id);
            if (seen && !seen->shown_total) seen->shown_total = total;
            if (seen) total = seen->shown_total; /* the runtime asks twice and must be told the same */
            avg_process_leave(process);
            return total;
        }
    }
    avg_process_leave(process);
    return total;
}
