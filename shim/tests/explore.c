/* Every order in which the real ledger.c can run: all interleavings of a few processes, a death at each step.
 *
 *   explore QUOTA CRASHES JUMPS PROGRAM...     prints one line of JSON; exit status 1 and the steps that led there if a
 *                                              check failed
 *
 * What is compiled here is src/ledger.c and src/slot.h themselves; only what they stand on is exchanged: each atomic
 * access to a word of the ledger that decides something, each look at another process (kill, /proc/<pid>/stat) and each
 * reading of the clock first hands over to a scheduler. The processes are coroutines, so a state is a handful of bytes (the
 * ledger, the accounts, the used parts of the stacks), can be put back, and all of them are walked depth first; states
 * seen before are known by a 128-bit fingerprint. Nothing is sampled.
 *
 * A PROGRAM is "ask:letters", its process's slot is what it claims by itself:
 *   s  has its slot from before the first step, the first time it lives
 *   A  asks for `ask` MiB; where refused, it ends            W  gives them back
 *   P  promises itself `ask` MiB and redeems them; asks for them where the promise has run out
 *   D  takes apart the slots of the dead, as the daemon does: has no slot, asks for nothing
 *   d  may die at any step, and then starts again under the same pid         x  may exec at any step (pid and start stay)
 *   k  may die at any step, for good
 * CRASHES deaths or execs happen at most; JUMPS: times that all clocks go on by an hour, anywhere (time-outs, expiry).
 *
 * Checked in each state: bytes that the driver has given to the living <= QUOTA; none of them without a charge; no slot
 * of the living taken away; a promise kept as long as its time is not over. And of the whole: no state that cannot
 * go on, no cycle (so each run ends, whatever the scheduler does), nothing left charged or announced by the living at the end.
 *
 * Memory order: accesses are sequentially consistent, as they are in the source, but for stores with release order, which
 * stay in a buffer of one until the process writes again or the scheduler lets them out (what x86 may do; aarch64's
 * stlr/ldar do less). Not modelled: weaker reorderings, which no access here asks for; counters (peak, allocations, ...),
 * which decide nothing; slots beyond the processes' number, which must stay untouched (checked); a nap lasts until
 * somebody else has written, died or the clock has jumped (looking again at the same words tells the same). Where all have
 * their slots and nobody dies, a look at what nobody else changes is no step (writer_of()): three processes are walked by it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <amdvgpu/abi.h>

#if !defined(__x86_64__)
#error "the context switch below is for x86-64"
#endif

#define PROCS 3
#define SLOTS 6
#define STACK 4096
#define MIB (1ULL << 20)
#define HOUR_MS 3600000
#define FIRST_PID 100
#define NAMESPACE 4026531836u

/* ------------------------------------------------------------------------- what stands below ledger.c, exchanged */

static uint64_t explore_load(const uint64_t *at);
static void explore_store(uint64_t *at, uint64_t value, int order);
static int explore_swap(uint64_t *at, uint64_t *expected, uint64_t wanted);
enum change { ADD, SUBTRACT, OR, AND, EXCHANGE };
static uint64_t explore_change(uint64_t *at, uint64_t value, enum change);
static long explore_syscall(long number, long a);
static long explore_read_file(const char *path, char *text, size_t room);
static uint64_t explore_now_ms(void);

#include "../src/os.h"
#undef AVG_SYS
#define AVG_SYS(name, a, b, c, d) ((void)(b), (void)(c), (void)(d), explore_syscall(SYS_##name, (long)(a)))
#define avg_read_file explore_read_file
#define avg_now_ms explore_now_ms
#define __atomic_load_n(at, order) explore_load(at)
#define __atomic_store_n(at, value, order) explore_store((at), (value), (order))
#define __atomic_compare_exchange_n(at, expected, wanted, weak, order, failed) explore_swap((at), (expected), (wanted))
#define __atomic_fetch_add(at, value, order) explore_change((at), (value), ADD)
#define __atomic_fetch_sub(at, value, order) explore_change((at), (value), SUBTRACT)
#define __atomic_fetch_or(at, value, order) explore_change((at), (value), OR)
#define __atomic_fetch_and(at, value, order) explore_change((at), (value), AND)
#define __atomic_exchange_n(at, value, order) explore_change((at), (value), EXCHANGE)
#define WAIT_MS 500
#define AVG_SPINS 1 /* a look that finds nothing changed tells nothing new: nap at once, and look for the dead each time */
#define AVG_YIELDS 1
#define RECLAIM_EVERY 1
#ifndef LEDGER
#define LEDGER "../src/ledger.c"
#endif
#include LEDGER

/* ------------------------------------------------------------------------------------------------------- the world */

enum status { RUNNING, NAPPING, ENDED, DEAD };
enum outcome { NOTHING, WON, REFUSED, BUSY };

struct proc {
    enum status status;
    uint32_t life;              /* how often this pid has started anew: its start time */
    uint32_t image;             /* how often it has been exec'ed: its cookie */
    uint32_t stirred;           /* something has changed since the last nap */
    enum outcome outcome;
    uint32_t broken;            /* a promise was not kept */
    uint64_t real;              /* bytes that the driver has given */
    uint64_t *sp;
    uint64_t *buffered;         /* a release store that others do not see yet */
    uint64_t buffered_value;
    struct avg_identity self;
    struct avg_account account;
};

static struct world {
    struct proc proc[PROCS];
    uint64_t now_ms;
    uint32_t crashes, jumps;    /* that are left */
} world;
static char stack[PROCS][STACK] __attribute__((aligned(16)));
static struct avg_ledger *ledger;
static struct avg_policy policy;
static struct { uint64_t ask; const char *letters; } plan[PROCS];
static int settling, procs, slots, running = -1; /* slots: one for each process, and one for each that starts again beside its past */
static int steady, promising; /* nobody dies or claims a slot; somebody promises: see writer_of() */
static uint64_t quota;
static uint64_t *scheduler_sp;
static const char *fault; /* what is wrong with this state */

void explore_switch(uint64_t **save, uint64_t *sp);
__asm__(".text\nexplore_switch:\n"
        "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
        "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
        "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");

/* Hand over to the scheduler: what follows is the next step of this process. */
static void step(void) {
    if (settling) return;
    explore_switch(&world.proc[running].sp, scheduler_sp);
}

static void stir(int but) {
    for (int i = 0; i < procs; i++)
        if (i != but) world.proc[i].stirred = 1;
}

/* Whether `at` is a word that decides: others of the ledger are counters. */
static int decides(const uint64_t *at) {
    size_t offset = (size_t)((const char *)at - (const char *)ledger), slot, place;
    if (offset >= avg_ledger_bytes(1)) return 0;
    if (offset < AVG_LEDGER_HEAD_BYTES) return offset == offsetof(struct avg_ledger, occupied);
    slot = (offset - AVG_LEDGER_HEAD_BYTES) / avg_slot_bytes(1), place = (offset - AVG_LEDGER_HEAD_BYTES) % avg_slot_bytes(1);
    if (slot >= (size_t)slots) return 0;
    if (place < AVG_SLOT_HEAD_BYTES) return place < offsetof(struct avg_slot, notes);
    return place - AVG_SLOT_HEAD_BYTES < offsetof(struct avg_cell, peak);
}

/* Who may change a word: in general anybody. Where all have their slots from the start and nobody dies (`steady`), nobody
 * changes heads and map of the slots, and only its owner a slot's cell, but for a promise that is over. write_word() holds
 * them to it. Then a look at what nobody else changes is no step: when it is made does not matter. */
enum writer { ANYBODY, OWNER, NOBODY };
static enum writer writer_of(const uint64_t *at, uint32_t *slot) {
    size_t offset = (size_t)((const char *)at - (const char *)ledger), bytes = avg_slot_bytes(1);
    size_t place = (offset - AVG_LEDGER_HEAD_BYTES) % bytes;
    if (!steady) return ANYBODY;
    if (offset < AVG_LEDGER_HEAD_BYTES || place < AVG_SLOT_HEAD_BYTES) return NOBODY;
    if (place - AVG_SLOT_HEAD_BYTES == offsetof(struct avg_cell, earmark)) return promising ? ANYBODY : NOBODY;
    *slot = (uint32_t)((offset - AVG_LEDGER_HEAD_BYTES) / bytes);
    return OWNER;
}

static int stands(const uint64_t *at) {
    uint32_t slot = SLOTS;
    enum writer writer = writer_of(at, &slot);
    return writer == NOBODY || (writer == OWNER && slot == world.proc[running].account.slot);
}

static void must_be_ours(const uint64_t *at) {
    if ((const char *)at >= (const char *)ledger + AVG_LEDGER_HEAD_BYTES + (size_t)slots * avg_slot_bytes(1) &&
        (const char *)at < (const char *)ledger + avg_ledger_bytes(1))
        fault = "a slot was written that nobody can need";
}

static void let_out(struct proc *proc) {
    if (!proc->buffered) return;
    if (*proc->buffered != proc->buffered_value) stir((int)(proc - world.proc));
    *proc->buffered = proc->buffered_value;
    proc->buffered = NULL;
    proc->buffered_value = 0;
}

static uint64_t explore_load(const uint64_t *at) {
    if (decides(at) && !stands(at)) step();
    return world.proc[running].buffered == at ? world.proc[running].buffered_value : *at;
}

static void write_word(uint64_t *at, uint64_t value) {
    must_be_ours(at);
    if (decides(at) && *at != value) {
        stir(running);
        /* What it does to others' slots before a nap changes what it will see itself. */
        const char *own = (const char *)avg_slot_at(ledger, 1, world.proc[running].account.slot);
        if ((const char *)at < own || (const char *)at >= own + avg_slot_bytes(1)) world.proc[running].stirred = 1;
        uint32_t slot = SLOTS;
        enum writer writer = writer_of(at, &slot);
        if (writer == NOBODY || (writer == OWNER && slot != world.proc[running].account.slot)) fault = "a word was written that was taken to stand";
    }
    *at = value;
}

static void explore_store(uint64_t *at, uint64_t value, int order) {
    if (!decides(at)) {
        write_word(at, value);
        return;
    }
    step();
    let_out(&world.proc[running]);
    if (order == __ATOMIC_SEQ_CST) write_word(at, value);
    else world.proc[running].buffered = at, world.proc[running].buffered_value = value;
    if (order == __ATOMIC_RELAXED) fault = "a relaxed store to a word that decides";
}

static int explore_swap(uint64_t *at, uint64_t *expected, uint64_t wanted) {
    if (decides(at)) {
        step();
        let_out(&world.proc[running]);
    }
    if (*at != *expected) {
        *expected = *at;
        return 0;
    }
    write_word(at, wanted);
    return 1;
}

static uint64_t explore_change(uint64_t *at, uint64_t value, enum change change) {
    if (decides(at)) {
        step();
        let_out(&world.proc[running]);
    }
    uint64_t before = *at;
    write_word(at, change == ADD ? before + value : change == SUBTRACT ? before - value : change == OR ? before | value :
                   change == AND ? before & value : value);
    return before;
}

static struct proc *proc_of(uint32_t pid) {
    return pid >= FIRST_PID && pid < FIRST_PID + (uint32_t)procs ? &world.proc[pid - FIRST_PID] : NULL;
}

static long explore_syscall(long number, long a) {
    struct proc *of;
    switch (number) {
    case SYS_kill:
        if (!steady) step();
        of = proc_of((uint32_t)a);
        return of && of->status != DEAD ? 0 : -ESRCH;
    case SYS_nanosleep:
        world.proc[running].status = NAPPING;
        step();
        world.proc[running].stirred = 0;
        return 0;
    default:
        fault = "a system call that the explorer does not know";
        return -ENOSYS;
    }
}

static long explore_read_file(const char *path, char *text, size_t room) {
    const char *digits = path + sizeof "/proc/" - 1;
    if (!steady) step();
    struct proc *of = proc_of((uint32_t)avg_number(&digits));
    if (!of || of->status == DEAD) return -ENOENT;
    int length = snprintf(text, room, "%d (p) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 %u 0 0", FIRST_PID, 1000 + of->life);
    return length;
}

static uint64_t explore_now_ms(void) {
    if (!steady || world.jumps) step();
    return world.now_ms;
}

/* ----------------------------------------------------------------------------------------------------- the programs */

static void ask(struct proc *proc, uint64_t bytes) {
    enum avg_verdict verdict = avg_admit(&proc->account, &proc->self, 0, bytes, quota);
    proc->outcome = verdict == AVG_ADMITTED ? WON : verdict == AVG_BUSY ? BUSY : REFUSED;
    if (verdict == AVG_NO_SLOT) fault = "there is no slot";
    if (verdict != AVG_ADMITTED) return;
    step(); /* the driver is somewhere between here and there */
    proc->real += bytes;
}

static void run(void) {
    struct proc *proc = &world.proc[running];
    uint64_t bytes = plan[running].ask;
    if (!proc->account.owner && *plan[running].letters != 'D') avg_forget_past_image(&proc->account, &proc->self); /* process.c does it when it loads */
    for (const char *letter = plan[running].letters; *letter; letter++) switch (*letter) {
        case 'A':
            ask(proc, bytes);
            if (proc->outcome != WON) goto end;
            break;
        case 'P': {
            uint64_t at = world.now_ms;
            if (avg_promise(&proc->account, &proc->self, 0, bytes, quota, 1000)) {
                proc->outcome = REFUSED;
                goto end;
            }
            if (!avg_redeem(&proc->account, 0, bytes)) {
                proc->outcome = WON;
                step();
                proc->real += bytes;
                break;
            }
            if (world.now_ms == at) proc->broken = 1;
            ask(proc, bytes);
            if (proc->outcome != WON) goto end;
            break;
        }
        case 'W':
            step();
            proc->real -= bytes;
            avg_withdraw(&proc->account, 0, bytes, 1);
            break;
        case 'D':
            reclaim(&proc->account, &proc->self);
            break;
        }
end:
    if (proc->buffered) step();
    proc->status = ENDED;
    step();
    abort();
}

static void start(int index) {
    struct proc *proc = &world.proc[index];
    uint32_t life = proc->life, image = proc->image;
    *proc = (struct proc){.life = life, .image = image, .stirred = 1};
    proc->self = (struct avg_identity){.pid = FIRST_PID + (uint32_t)index, .ns = NAMESPACE, .start_ticks = 1000 + life,
                                       .cookie = {1 + image, 77}};
    proc->account = (struct avg_account){.policy = &policy, .ledger = ledger, .gpu_count = 1};
    memset(stack[index], 0, STACK);
    uint64_t *sp = (uint64_t *)(stack[index] + STACK) - 2;
    *sp = (uint64_t)(uintptr_t)run; /* returned to; the stack is then as after a call */
    proc->sp = sp - 6;
}

static void resume(int index) {
    running = index;
    if (world.proc[index].status == NAPPING) world.proc[index].status = RUNNING;
    explore_switch(&scheduler_sp, world.proc[index].sp);
    running = -1;
    /* What lies below the stack is leftovers of calls: two states that differ in them only are one. */
    char *low = (char *)world.proc[index].sp;
    if (low - stack[index] < 512) fault = "the stacks here are too small";
    memset(stack[index], 0, (size_t)(low - stack[index]));
}

/* ------------------------------------------------------------------------------------------------------- snapshots */

#define SLOT_WORDS 7 /* owner, start, cookie, cookie; used, pending, earmark */
struct kept {
    struct world world;
    uint64_t occupied, word[SLOTS][SLOT_WORDS];
    size_t used[PROCS];
    char stacks[];
};
static union { struct kept kept; char room[sizeof(struct kept) + PROCS * STACK]; } scratch;

static uint64_t *slot_word(int slot, int word) {
    struct avg_slot *at = avg_slot_at(ledger, 1, (uint32_t)slot);
    return word < 4 ? (uint64_t *)at + word : (uint64_t *)avg_cell_at(at, 0) + (word - 4);
}

static size_t keep(struct kept *kept) {
    char *at = kept->stacks;
    memset(kept, 0, sizeof *kept);
    kept->world = world;
    kept->occupied = ledger->occupied[0];
    for (int i = 0; i < slots; i++)
        for (int word = 0; word < SLOT_WORDS; word++) kept->word[i][word] = *slot_word(i, word);
    for (int i = 0; i < procs; i++) {
        int alive = world.proc[i].status == RUNNING || world.proc[i].status == NAPPING;
        kept->used[i] = alive ? (size_t)(stack[i] + STACK - (char *)world.proc[i].sp) : 0;
        memcpy(at, stack[i] + STACK - kept->used[i], kept->used[i]);
        at += kept->used[i];
    }
    return (size_t)(at - (char *)kept);
}

static void put_back(const struct kept *kept) {
    const char *at = kept->stacks;
    world = kept->world;
    memset(ledger->past, 0, sizeof *ledger->past); /* the counters are no part of a state: one value for all */
    memset(avg_slot_at(ledger, 1, 0), 0, (size_t)slots * avg_slot_bytes(1));
    ledger->occupied[0] = kept->occupied;
    for (int i = 0; i < slots; i++)
        for (int word = 0; word < SLOT_WORDS; word++) *slot_word(i, word) = kept->word[i][word];
    for (int i = 0; i < procs; i++) {
        memset(stack[i], 0, STACK - kept->used[i]);
        memcpy(stack[i] + STACK - kept->used[i], at, kept->used[i]);
        at += kept->used[i];
    }
}

struct print { uint64_t a, b; };
static struct print print_of(const struct kept *kept, size_t bytes) {
    const unsigned char *at = (const unsigned char *)kept;
    uint64_t a = 0x9e3779b97f4a7c15ULL, b = 0xc2b2ae3d27d4eb4fULL, word;
    for (size_t i = 0; i < bytes; i += 8) {
        memcpy(&word, at + i, 8);
        unsigned __int128 p = (unsigned __int128)(a ^ word) * 0xd6e8feb86659fd93ULL;
        a = (uint64_t)p ^ (uint64_t)(p >> 64);
        p = (unsigned __int128)(b + word) * 0xa0761d6478bd642fULL;
        b = (uint64_t)p ^ (uint64_t)(p >> 64) ^ b >> 29;
    }
    return (struct print){a | 1, b};
}

static struct seen { struct print print; int on_path; } *table;
static uint64_t room = 1 << 16, states;

static struct seen *find(struct print print) {
    uint64_t at = print.b & (room - 1);
    while (table[at].print.a && (table[at].print.a != print.a || table[at].print.b != print.b)) at = (at + 1) & (room - 1);
    return &table[at];
}

static void grow(void) {
    struct seen *old = table;
    uint64_t before = room;
    room *= 2;
    table = calloc(room, sizeof *table);
    if (!table) fprintf(stderr, "explore: out of memory\n"), exit(2);
    for (uint64_t i = 0; i < before; i++)
        if (old[i].print.a) *find(old[i].print) = old[i];
    free(old);
}

/* ---------------------------------------------------------------------------------------------------------- checks */

static int may(int index, char letter) { return strchr(plan[index].letters, letter) != NULL; }

static void check(void) {
    uint64_t out = 0;
    for (int i = 0; i < procs; i++) {
        struct proc *proc = &world.proc[i];
        out += proc->real;
        if (proc->status == DEAD) continue;
        if (proc->broken) fault = "a promise was not kept though its time was not over";
        if (!proc->account.owner) {
            if (proc->real) fault = "memory is out without a slot";
            continue;
        }
        struct avg_slot *slot = avg_slot_at(ledger, 1, proc->account.slot);
        if (slot->owner != proc->account.owner) fault = "the slot of a living process was taken away";
        else if (avg_cell_at(slot, 0)->used < proc->real) fault = "memory is out without a charge";
        else if (proc->real && !(ledger->occupied[0] >> proc->account.slot & 1)) fault = "memory is out in a slot that sums pass over";
    }
    if (out > quota) fault = "over the quota";
}

static void check_end(void) {
    for (int i = 0; i < procs; i++) {
        struct proc *proc = &world.proc[i];
        if (proc->status == DEAD || !proc->account.owner) continue;
        struct avg_cell *cell = avg_cell_at(avg_slot_at(ledger, 1, proc->account.slot), 0);
        if (cell->used != proc->real) fault = "what is charged at the end is not what is held";
        if (cell->pending) fault = "something is announced by a process that has ended";
        if (cell->earmark && !may(i, 'P')) fault = "something is promised to a process that asked for no promise";
    }
    for (int slot = 0; slot < slots; slot++) {
        uint64_t owner = *slot_word(slot, 0);
        struct proc *proc = proc_of(avg_owner_pid(owner));
        if (proc && proc->status == ENDED && owner & AVG_OWNER_RECLAIM) fault = "a slot is left in the hands of a past life";
        if (avg_owner_pid(owner)) continue;
        for (int word = 1; word < SLOT_WORDS; word++)
            if (*slot_word(slot, word)) fault = "a free slot is not empty";
    }
}

/* ----------------------------------------------------------------------------------------------------- depth first */

enum kind { STEP, DIE, RESTART, EXEC, LET_OUT, JUMP };
static const char *const kind_names[] = {"step", "dies", "starts again", "execs", "store seen", "an hour passes"};
struct frame { struct kept *kept; struct print print; int next; };

/* Do action `number` of this state; 0: there is no such action (any more), -1: not possible here. */
static int act(int number, enum kind *kind, int *who) {
    if (number == procs * 5) {
        *kind = JUMP, *who = 0;
        if (!world.jumps) return -1;
        world.jumps--, world.now_ms += HOUR_MS;
        stir(-1);
        return 1;
    }
    if (number > procs * 5) return 0;
    *who = number / 5, *kind = (enum kind)(number % 5);
    struct proc *proc = &world.proc[*who];
    int alive = proc->status == RUNNING || proc->status == NAPPING;
    switch (*kind) {
    case STEP:
        if (!alive || (proc->status == NAPPING && !proc->stirred)) return -1;
        resume(*who);
        return 1;
    case LET_OUT:
        if (!proc->buffered) return -1;
        let_out(proc);
        return 1;
    case DIE:
        if (!alive || !world.crashes || !(may(*who, 'd') || may(*who, 'k'))) return -1;
        world.crashes--;
        let_out(proc); /* what has left the instruction stream arrives */
        stir(*who);
        uint32_t life = proc->life, image = proc->image;
        *proc = (struct proc){.status = DEAD, .life = life, .image = image};
        return 1;
    case RESTART:
        if (proc->status != DEAD || !may(*who, 'd')) return -1;
        proc->life++, proc->image++;
        stir(*who);
        start(*who);
        return 1;
    case EXEC:
        if (!alive || !world.crashes || !may(*who, 'x')) return -1;
        world.crashes--, proc->image++;
        let_out(proc);
        stir(*who);
        start(*who);
        return 1;
    default:
        return -1;
    }
}

int main(int argc, char **argv) {
    static char outcomes[4096];
    if (argc < 5 || argc - 4 > PROCS) return fprintf(stderr, "explore: see the head of its source\n"), 2;
    quota = strtoull(argv[1], 0, 0) * MIB;
    world.crashes = (uint32_t)atoi(argv[2]), world.jumps = (uint32_t)atoi(argv[3]), world.now_ms = 1000;
    procs = argc - 4, slots = procs + (int)world.crashes;
    if (slots > SLOTS) return 2;
    ledger = calloc(1, avg_ledger_bytes(1));
    table = calloc(room, sizeof *table);
    for (int i = 0; i < procs; i++) {
        char *colon = strchr(argv[4 + i], ':');
        if (!colon) return 2;
        plan[i].ask = strtoull(argv[4 + i], 0, 0) * MIB, plan[i].letters = colon + 1;
    }
    /* Each program runs up to its first access: from there on steps count. */
    for (int i = 0; i < procs; i++) start(i);
    settling = 1;
    for (running = 0; running < procs; running++)
        if (may(running, 's') && avg_settle(&world.proc[running].account, &world.proc[running].self)) return 2;
    settling = 0, running = -1;
    steady = !world.crashes;
    for (int i = 0; i < procs; i++) {
        if (!may(i, 's')) steady = 0;
        if (may(i, 'P')) promising = 1;
    }
    uint64_t transitions = 0, ends = 0, deepest = 0;
    size_t depth = 0, path_room = 1 << 16;
    struct frame *path = calloc(path_room, sizeof *path);
    int entering = 1;
    for (;;) {
        if (entering) {
            size_t bytes = keep(&scratch.kept);
            struct print print = print_of(&scratch.kept, bytes);
            struct seen *seen = find(print);
            if (seen->print.a && seen->on_path) fault = "a cycle: this can go on for ever";
            if (!seen->print.a) {
                check();
                seen->print = print, seen->on_path = 1;
                if (depth == path_room) fault = "deeper than any run should be";
                else path[depth++] = (struct frame){memcpy(malloc(bytes), &scratch.kept, bytes), print, 0};
                if (depth > deepest) deepest = depth;
                if (++states * 2 > room) grow();
            }
            entering = 0;
        }
        if (fault) break;
        if (!depth) break;
        struct frame *top = &path[depth - 1];
        put_back(top->kept);
        enum kind kind;
        int who, done = -1, number = top->next;
        while (done < 0) done = act(number++, &kind, &who);
        if (done) {
            top->next = number;
            transitions++;
            entering = 1;
            continue;
        }
        if (top->next == 0) { /* nothing was possible here */
            char text[64] = "";
            ends++;
            for (int i = 0; i < procs; i++) {
                if (world.proc[i].status != ENDED && world.proc[i].status != DEAD) fault = "stuck: nobody can go on";
                if (*plan[i].letters != 'D') sprintf(text + strlen(text), "%s%s", *text ? " " : "",
                    world.proc[i].status == DEAD ? "dead" : (const char *[]){"nothing", "won", "refused", "busy"}[world.proc[i].outcome]);
            }
            if (!fault) check_end();
            if (fault) break;
            char quoted[80];
            snprintf(quoted, sizeof quoted, "\"%s\"", text);
            if (!strstr(outcomes, quoted)) sprintf(outcomes + strlen(outcomes), "%s%s", *outcomes ? ", " : "", quoted);
        }
        find(top->print)->on_path = 0;
        free(top->kept);
        depth--;
    }
    printf("{\"states\": %llu, \"transitions\": %llu, \"ends\": %llu, \"longest\": %llu, \"outcomes\": [%s], \"fault\": \"%s\"}\n",
           (unsigned long long)states, (unsigned long long)transitions, (unsigned long long)ends, (unsigned long long)deepest,
           outcomes, fault ? fault : "");
    if (!fault) return 0;
    for (size_t i = 0; i < depth; i++) {
        int number = path[i].next - 1;
        put_back(path[i].kept);
        if (number < 0) break;
        fprintf(stderr, "%zu: %d %s  |", i, number / 5, kind_names[number == procs * 5 ? (int)JUMP : number % 5]);
        for (int slot = 0; slot < slots; slot++)
            fprintf(stderr, " [%llx used %llu pending %llu mark %llx]", (unsigned long long)*slot_word(slot, 0),
                    (unsigned long long)(*slot_word(slot, 4) / MIB), (unsigned long long)(*slot_word(slot, 5) / MIB),
                    (unsigned long long)*slot_word(slot, 6));
        fprintf(stderr, "\n");
    }
    return 1;
}
