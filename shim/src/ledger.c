/* The slots as the only truth: admission without a lock and without a stored total.
 *
 * A total kept beside the slots would have to be right after a SIGKILL at any instruction; a sum over the slots is right
 * as soon as the dead slot is zero. A lock in shared memory would have to survive the death of its holder, in two libcs
 * and three ways of loading. So there is neither.
 *
 * Admission of n bytes, quota Q:
 *
 *   look       used + n > Q over all slots: refuse. Nothing was announced, so a greedy neighbour disturbs nobody.
 *   announce   own pending = n
 *   look again everything (used, pending and promises of all slots) <= Q: own used += n, pending = 0. Admitted.
 *              used + n > Q: withdraw, refuse.
 *              else there are contenders, and each fits alone:
 *                somebody with a lower slot is pending: withdraw, wait until it has decided, start over
 *                only higher ones: stay announced and look again; they withdraw when they see us, or have been admitted
 *
 * Never over Q: announcements and looks are sequentially consistent, so of two contenders at least one sees the other's
 * bytes, in `pending` or in `used`: bytes appear in `used` before they leave `pending`, and a reader reads `used` last.
 * Of two of which one fits exactly one wins: only the higher withdraws, and the lowest is refused on `used` alone.
 * Both are checked on this very code, over all interleavings with a death at every step (tests/explore.c).
 *
 * A process that dies announced keeps the lower ones waiting until somebody finds it dead, and one that is stopped there
 * (SIGSTOP) until the wait is over: half a second, then a refusal. */
#include "ledger.h"

#include <elf.h>
#include <errno.h>
#include <sched.h>

#include "os.h"

#ifndef AVG_SPINS        /* tests/explore.c and fuzz.c have their own: they wait for a change, or hardly */
#define WAIT_MS 500      /* guessed: long against a time slice on a busy machine, short against a person's patience */
#define AVG_SPINS 32     /* looks with a pause of instructions between them, then */
#define AVG_YIELDS 64    /* up to so many in all with the processor given away, then naps */
#define RECLAIM_EVERY 64 /* naps between two looks for dead contenders */
#endif

/* ------------------------------------------------------------------------------------------------------- identity */

/* Start time and liveness from /proc/<pid>/stat ("self" for pid 0): 1 alive, 0 gone, -1 cannot tell. */
static int read_stat(uint32_t pid, uint64_t *start_ticks) {
    char path[32], text[1024], *at = avg_put(path, path + sizeof path - 1, "/proc/");
    at = pid ? avg_put_number(at, path + sizeof path - 1, pid) : avg_put(at, path + sizeof path - 1, "self");
    avg_put(at, path + sizeof path - 1, "/stat");
    long length = avg_read_file(path, text, sizeof text);
    if (length <= 0) return -1;
    const char *field = text + length;
    while (field > text && *field != ')') field--; /* the name may hold anything, brackets too */
    if (*field != ')' || field[1] != ' ') return -1;
    char state = field[2];
    uint64_t threads = 0;
    field += 2;
    for (int number = 3; number < 22; number++) {
        if (number == 20) threads = avg_number(&field);
        while (*field && *field != ' ') field++;
        if (!*field) return -1;
        field++;
    }
    *start_ticks = avg_number(&field);
    /* A zombie has given its memory back. A leader may be one while its threads live on, which num_threads tells. */
    return !((state == 'Z' || state == 'X') && threads <= 1);
}

void avg_identify(struct avg_identity *self) {
    char link[64], auxiliary[1024];
    self->pid = avg_pid();
    self->ns = 1;
    long length = AVG_SYS(readlinkat, AT_FDCWD, "/proc/self/ns/pid", link, sizeof link - 1);
    if (length > 0) {
        link[length] = 0;
        const char *digits = link;
        while (*digits && *digits != '[') digits++;
        if (*digits) digits++;
        uint64_t inode = avg_number(&digits);
        if (inode > 1 && inode <= UINT32_MAX) self->ns = (uint32_t)inode;
    }
    if (read_stat(0, &self->start_ticks) < 0 || self->start_ticks < 2) self->start_ticks = 1;
    /* AT_RANDOM by /proc/self/auxv, because getauxval (GLIBC_2.16) is above our floor. Unreadable: the cookie is 0 and
     * an image after exec takes its own past for its own present: errs towards keeping the charge. */
    self->cookie[0] = self->cookie[1] = 0;
    self->secure = 1; /* until the kernel says otherwise */
    int fd = AVG_SYS(openat, AT_FDCWD, "/proc/self/auxv", O_RDONLY | O_CLOEXEC, 0);
    if (fd < 0) return;
    length = AVG_SYS(read, fd, auxiliary, sizeof auxiliary, 0);
    avg_close(fd);
    for (long at = 0; at + (long)sizeof(Elf64_auxv_t) <= length; at += sizeof(Elf64_auxv_t)) {
        const Elf64_auxv_t *entry = (const Elf64_auxv_t *)(auxiliary + at);
        if (entry->a_type == AT_SECURE) self->secure = entry->a_un.a_val != 0;
        if (entry->a_type == AT_RANDOM && entry->a_un.a_val) {
            const unsigned char *random = (const unsigned char *)entry->a_un.a_val;
            for (int i = 0; i < 16; i++) self->cookie[i / 8] |= (uint64_t)random[i] << i % 8 * 8;
        }
    }
}

/* Whether the owner of a slot is certainly dead. Of another pid namespace we know nothing: the daemon does. */
static int gone(const struct avg_slot *slot, uint64_t owner, const struct avg_identity *self) {
    uint32_t pid = avg_owner_pid(owner);
    uint64_t noted = AVG_LOAD(&slot->start_ticks), start = 0;
    if (avg_owner_ns(owner) != self->ns || self->ns <= 1) return 0;
    if (AVG_SYS(kill, pid, 0, 0, 0) == -ESRCH) return 1;
    int state = read_stat(pid, &start);
    if (state < 0) return AVG_SYS(kill, pid, 0, 0, 0) == -ESRCH; /* /proc hides it, or it ended while we looked */
    if (state == 0) return 1;
    return noted > 1 && !(owner & AVG_OWNER_RECLAIM) && noted != start;
}

int avg_lives(uint64_t owner, uint64_t start_ticks, const struct avg_identity *self) {
    struct avg_slot like = {.start_ticks = start_ticks};
    return avg_owner_pid(owner) && !gone(&like, owner, self);
}

/* Clear the slots of the dead; whether any bytes came back. */
static int reclaim(struct avg_account *account, const struct avg_identity *self) {
    uint64_t given = 0;
    for (uint32_t i = 0; i < AVG_SLOTS; i++) {
        struct avg_slot *slot = avg_slot_at(account->ledger, account->gpu_count, i);
        uint64_t owner = AVG_LOAD(&slot->owner);
        if (!avg_owner_pid(owner) || (account->owner && i == account->slot) || !gone(slot, owner, self)) continue;
        given = avg_sum(given, avg_slot_reclaim(account->ledger, account->gpu_count, i, owner, self->ns, self->pid));
    }
    return given != 0;
}

void avg_bury(struct avg_account *account, const struct avg_identity *self) {
    if (account->ledger) reclaim(account, self);
}

/* ----------------------------------------------------------------------------------------------------------- slots */

static struct avg_cell *own_cell(const struct avg_account *account, uint32_t gpu) {
    return avg_cell_at(avg_slot_at(account->ledger, account->gpu_count, account->slot), gpu);
}

static int still_ours(const struct avg_account *account) {
    return account->owner && AVG_LOAD(&avg_slot_at(account->ledger, account->gpu_count, account->slot)->owner) == account->owner;
}

static void move_in(struct avg_account *account, const struct avg_identity *self, uint32_t index, uint64_t owner) {
    struct avg_slot *slot = avg_slot_at(account->ledger, account->gpu_count, index);
    __atomic_fetch_or(&account->ledger->occupied[index / 64], 1ULL << index % 64, __ATOMIC_SEQ_CST);
    AVG_STORE(&slot->cookie[0], self->cookie[0]);
    AVG_STORE(&slot->cookie[1], self->cookie[1]);
    AVG_STORE(&slot->start_ticks, self->start_ticks);
    account->slot = index;
    account->owner = owner;
    /* Lost slot (the daemon mended a damaged ledger): what we hold is charged again, whatever the quota says. */
    for (uint32_t gpu = 0; gpu < account->gpu_count; gpu++) AVG_STORE(&own_cell(account, gpu)->used, account->held[gpu]);
}

/* Whether slot `index` is this process's: by an image before exec (its bytes went with that image), or by another copy
 * of this library in the same image, which cannot be (gate.c keeps a second copy passive) unless the cookie is unknown. */
static int is_own_past(const struct avg_slot *slot, uint64_t owner, const struct avg_identity *self) {
    uint64_t noted = AVG_LOAD(&slot->start_ticks);
    /* Without a known namespace the same pid may be a stranger's. */
    if (avg_owner_pid(owner) != self->pid || avg_owner_ns(owner) != self->ns || self->ns <= 1) return 0;
    /* We take nothing apart at this moment: who did so under our pid died over it, and nobody else would call it dead. */
    if (owner & AVG_OWNER_RECLAIM) return 1;
    if (noted != self->start_ticks && noted != 0) return 0;
    return AVG_LOAD(&slot->cookie[0]) != self->cookie[0] || AVG_LOAD(&slot->cookie[1]) != self->cookie[1];
}

void avg_forget_past_image(struct avg_account *account, const struct avg_identity *self) {
    if (!account->ledger) return;
    for (uint32_t i = 0; i < AVG_SLOTS; i++) {
        struct avg_slot *slot = avg_slot_at(account->ledger, account->gpu_count, i);
        uint64_t owner = AVG_LOAD(&slot->owner);
        if (avg_owner_pid(owner) == self->pid && is_own_past(slot, owner, self))
            avg_slot_reclaim(account->ledger, account->gpu_count, i, owner, self->ns, self->pid);
    }
}

static int claim(struct avg_account *account, const struct avg_identity *self) {
    if (still_ours(account)) return 1;
    account->owner = 0;
    avg_forget_past_image(account, self);
    reclaim(account, self); /* a new process starts from what the living hold, and low slots keep the sums short */
    for (int pass = 0; pass < 2; pass++) {
        for (uint32_t i = 0; i < AVG_SLOTS; i++) {
            struct avg_slot *slot = avg_slot_at(account->ledger, account->gpu_count, i);
            uint64_t free = AVG_LOAD(&slot->owner), mine = avg_owner_after(free, self->ns, self->pid, 0);
            if (avg_owner_pid(free) || !avg_owner_swap(slot, free, mine)) continue;
            move_in(account, self, i, mine);
            return 1;
        }
        reclaim(account, self);
    }
    return 0;
}

/* ------------------------------------------------------------------------------------------------------- admission */

struct sums {
    uint64_t used;      /* charged, and promised to others */
    uint64_t pending;   /* announced, ours included */
    int lower;          /* a slot below ours has announced something */
};

/* What an earmark is worth at this moment. The clock is read only where there is one: it is a system call. One that is
 * over is taken away by whoever sees it (its owner may be dead, and would make every sum slow). */
static uint64_t promised(struct avg_cell *cell) {
    uint64_t earmark = AVG_LOAD(&cell->earmark);
    if (__builtin_expect(!earmark, 1)) return 0;
    if (earmark >> AVG_EARMARK_MS_SHIFT > avg_now_ms()) return (earmark & AVG_EARMARK_MIB_MASK) << 20;
    __atomic_compare_exchange_n(&cell->earmark, &earmark, 0, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return 0;
}

static struct sums look(const struct avg_account *account, uint32_t gpu) {
    unsigned __int128 used = 0, pending = 0; /* 128 values of 64 bits, any of which a guest may have made up */
    int lower = 0;
    char *first = (char *)avg_cell_at(avg_slot_at(account->ledger, account->gpu_count, 0), gpu);
    size_t stride = avg_slot_bytes(account->gpu_count);
    uint32_t own = account->owner ? account->slot : AVG_SLOTS;
    for (uint32_t word = 0; word < AVG_SLOTS / 64; word++) {
        for (uint64_t left = AVG_LOAD(&account->ledger->occupied[word]); left; left &= left - 1) {
            uint32_t i = word * 64 + (uint32_t)__builtin_ctzll(left);
            struct avg_cell *cell = (struct avg_cell *)(first + i * stride);
            uint64_t announced = AVG_LOAD(&cell->pending);
            if (__builtin_expect(announced != 0, 0)) {
                pending += announced;
                if (i < own) lower = 1;
            }
            if (__builtin_expect(AVG_LOAD(&cell->earmark) != 0, 0) && i != own) used += promised(cell);
            used += AVG_LOAD(&cell->used); /* last: see the head of this file */
        }
    }
    return (struct sums){used >> 64 ? UINT64_MAX : (uint64_t)used, pending >> 64 ? UINT64_MAX : (uint64_t)pending, lower};
}

int avg_settle(struct avg_account *account, const struct avg_identity *self) {
    return account->ledger && claim(account, self) ? 0 : -1;
}

uint64_t avg_taken(const struct avg_account *account, uint32_t gpu) {
    struct sums sums = look(account, gpu);
    return avg_sum(sums.used, sums.pending);
}

/* Spin, then give the processor away, then sleep: the one we wait for is a few instructions from deciding, unless it
 * was taken off the processor there. 0 when the time is up. */
static int nap(struct avg_account *account, const struct avg_identity *self, uint32_t *naps, uint64_t *deadline) {
    uint32_t count = ++*naps;
    if (count < AVG_SPINS) {
        for (volatile int i = 0; i < 16; i++) {}
        return 1;
    }
    if (count < AVG_YIELDS) {
        AVG_SYS(sched_yield, 0, 0, 0, 0);
        return 1;
    }
    uint64_t now = avg_now_ms();
    if (!*deadline) *deadline = now + WAIT_MS;
    if (now >= *deadline) return 0;
    if (count % RECLAIM_EVERY == 0) reclaim(account, self);
    struct timespec moment = {0, 50000};
    AVG_SYS(nanosleep, &moment, 0, 0, 0);
    return 1;
}

/* The protocol above. On success the bytes are in our `used`, or as a promise in our `earmark` where that is not 0. */
static enum avg_verdict admit(struct avg_account *account, const struct avg_identity *self, uint32_t gpu, uint64_t bytes,
                              uint64_t quota, uint64_t earmark) {
    struct avg_cell *cell = own_cell(account, gpu);
    uint32_t naps = 0, refusals = 0;
    uint64_t deadline = 0;
    if (bytes > quota) return AVG_OVER;
    /* Far from the quota by what we last saw: announce without a first look, which saves half of the sums. If that was
     * wrong we withdraw below, having made others wait a moment and nobody fail; and we know better the next time. */
    int guess = avg_sum(account->last_total[gpu], bytes) <= quota;
    for (;; guess = 0) {
        if (!guess && avg_sum(account->last_total[gpu] = look(account, gpu).used, bytes) > quota) {
            /* A sum read while one process frees and another takes can be too high: refuse only what two looks refuse,
             * the second after a look for the dead. */
            if (refusals++) return AVG_OVER;
            reclaim(account, self);
            continue;
        }
        AVG_STORE(&cell->pending, bytes);
        for (;;) {
            struct sums sums = look(account, gpu);
            account->last_total[gpu] = sums.used;
            if (avg_sum(sums.used, sums.pending) <= quota) {
                if (earmark) AVG_STORE(&cell->earmark, earmark);
                else __atomic_fetch_add(&cell->used, bytes, __ATOMIC_SEQ_CST);
                __atomic_store_n(&cell->pending, 0, __ATOMIC_RELEASE);
                uint64_t total = avg_sum(sums.used, bytes);
                if (!earmark && total > cell->peak) __atomic_store_n(&cell->peak, total, __ATOMIC_RELAXED);
                return AVG_ADMITTED;
            }
            if (avg_sum(sums.used, bytes) > quota || sums.lower) break;
            if (!nap(account, self, &naps, &deadline)) {
                AVG_STORE(&cell->pending, 0);
                return AVG_BUSY;
            }
        }
        AVG_STORE(&cell->pending, 0);
        while (look(account, gpu).lower)
            if (!nap(account, self, &naps, &deadline)) return AVG_BUSY;
    }
}

enum avg_verdict avg_admit(struct avg_account *account, const struct avg_identity *self, uint32_t gpu, uint64_t bytes,
                           uint64_t quota) {
    if (!account->ledger || !claim(account, self)) return AVG_NO_SLOT;
    enum avg_verdict verdict = admit(account, self, gpu, bytes, quota, 0);
    if (verdict == AVG_ADMITTED) {
        struct avg_cell *cell = own_cell(account, gpu);
        account->held[gpu] += bytes;
        __atomic_store_n(&cell->allocations, cell->allocations + 1, __ATOMIC_RELAXED);
    }
    return verdict;
}

void avg_withdraw(struct avg_account *account, uint32_t gpu, uint64_t bytes, int freed) {
    account->held[gpu] = avg_less(account->held[gpu], bytes);
    if (!account->ledger || !still_ours(account)) return; /* the slot and what was in it are somebody else's now */
    struct avg_cell *cell = own_cell(account, gpu);
    /* A guest may have written anything here; the subtraction must not wrap round to a huge charge. */
    uint64_t used = AVG_LOAD(&cell->used);
    while (!__atomic_compare_exchange_n(&cell->used, &used, avg_less(used, bytes), 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
    if (freed) __atomic_store_n(&cell->frees, cell->frees + 1, __ATOMIC_RELAXED);
    else __atomic_store_n(&cell->allocations, avg_less(cell->allocations, 1), __ATOMIC_RELAXED);
}

int avg_promise(struct avg_account *account, const struct avg_identity *self, uint32_t gpu, uint64_t bytes,
                uint64_t quota, uint64_t ms) {
    if (!account->ledger || !claim(account, self)) return -1;
    AVG_STORE(&own_cell(account, gpu)->earmark, 0);
    uint64_t mib = (bytes + (1 << 20) - 1) >> 20;
    uint64_t earmark = (avg_now_ms() + ms) << AVG_EARMARK_MS_SHIFT | (mib & AVG_EARMARK_MIB_MASK);
    return admit(account, self, gpu, mib << 20, quota, earmark) == AVG_ADMITTED ? 0 : -1;
}

/* The bytes go into `used` first, so that everybody counts them twice for a moment; then we look whether the promise
 * still stood. Whoever counts it as expired does so after its end, and so sees the bytes in `used`. */
int avg_redeem(struct avg_account *account, uint32_t gpu, uint64_t bytes) {
    if (!account->ledger || !still_ours(account)) return -1;
    struct avg_cell *cell = own_cell(account, gpu);
    if (promised(cell) < bytes) return -1;
    __atomic_fetch_add(&cell->used, bytes, __ATOMIC_SEQ_CST);
    int stood = promised(cell) >= bytes;
    if (!stood) __atomic_fetch_sub(&cell->used, bytes, __ATOMIC_SEQ_CST);
    AVG_STORE(&cell->earmark, 0);
    if (!stood) return -1;
    account->held[gpu] += bytes;
    __atomic_store_n(&cell->allocations, cell->allocations + 1, __ATOMIC_RELAXED);
    return 0;
}

void avg_deny(struct avg_account *account, const struct avg_identity *self, uint32_t gpu, uint64_t bytes) {
    if (!account->ledger || !claim(account, self)) return;
    struct avg_cell *cell = own_cell(account, gpu);
    __atomic_store_n(&cell->denials, cell->denials + 1, __ATOMIC_RELAXED);
    __atomic_store_n(&cell->denied_bytes, cell->denied_bytes + bytes, __ATOMIC_RELAXED);
}

void avg_note(struct avg_account *account, const struct avg_identity *self, uint64_t notes) {
    if (!account->ledger || !claim(account, self)) return;
    struct avg_slot *slot = avg_slot_at(account->ledger, account->gpu_count, account->slot);
    __atomic_fetch_or(&slot->notes, notes, __ATOMIC_RELAXED);
}
