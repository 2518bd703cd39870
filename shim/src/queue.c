/* The mask is set by the gate itself, right after CREATE_QUEUE and before the caller has the queue's id: so it holds
 * whether or not anybody asks for one. Requests that follow can only narrow it.
 *
 * Each SET_CU_MASK that reaches a driver without MES takes every tenant's queues of the GPU off the hardware for a
 * moment, so the same mask is never sent twice. */
#include "queue.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/uio.h>

#include "os.h"

static struct avg_queue *queue_of(struct avg_process *process, uint32_t queue_id, int make) {
    if (queue_id >= AVG_MAX_QUEUES) return NULL;
    if (!process->queues) {
        if (!make) return NULL;
        process->queues = avg_map(AVG_MAX_QUEUES * sizeof *process->queues, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
        if (!process->queues) return NULL;
    }
    struct avg_queue *queue = &process->queues[queue_id];
    return make || queue->gpu_id ? queue : NULL;
}

static uint32_t priority_ceiling(struct avg_process *process, uint32_t gpu_id) {
    struct avg_cover covers[AVG_MAX_SLICES];
    int count = avg_covers(process, gpu_id, covers, AVG_MAX_SLICES);
    uint32_t ceiling = count ? 0 : AVG_PRIORITY_NONE;
    for (int i = 0; i < count; i++)
        if (covers[i].entry->priority > ceiling) ceiling = covers[i].entry->priority;
    return count && ceiling > process->priority_limit ? process->priority_limit : ceiling;
}

static void note(struct avg_process *process, uint32_t gpu_id, uint64_t notes) {
    struct avg_cover covers[AVG_MAX_SLICES];
    for (int i = 0, count = avg_covers(process, gpu_id, covers, AVG_MAX_SLICES); i < count; i++)
        avg_note(covers[i].account, &process->self, notes);
}

static int send_mask(int fd, uint32_t queue_id, const struct avg_mask_rule *rule, const struct avg_mask *mask, avg_request *next) {
    struct avg_mask words = *mask; /* little-endian: bit b of 64-bit words is bit b of the driver's 32-bit words */
    struct kfd_set_cu_mask set = {queue_id, avg_mask_bits(rule), (uint64_t)(uintptr_t)words.word};
    return next(fd, KFD_SET_CU_MASK, &set);
}

/* CUs of KFD node `node`, or 0 where that cannot be read. By the program's own `open`, so that a simulated topology is
 * seen as the runtime sees it. */
static uint32_t cus_of_node(uint32_t node) {
    char path[128], text[4096], *end = path + sizeof path - 1;
    char *at = avg_put(path, end, "/sys/devices/virtual/kfd/kfd/topology/nodes/");
    avg_put(avg_put_number(at, end, node), end, "/properties");
    int fd = avg_open_as_program(path, O_RDONLY);
    if (fd < 0) return 0;
    long length = AVG_SYS(read, fd, text, sizeof text - 1, 0);
    avg_close(fd);
    if (length <= 0) return 0;
    text[length] = 0;
    uint64_t simds = 0, per_cu = 0;
    for (const char *line = text; *line;) {
        const char *value = line;
        while (*value && *value != ' ' && *value != '\n') value++;
        if (*value == ' ') value++;
        if (avg_starts(line, "simd_count ")) simds = avg_number(&value);
        else if (avg_starts(line, "simd_per_cu ")) per_cu = avg_number(&value);
        while (*line && *line != '\n') line++;
        if (*line) line++;
    }
    return per_cu ? (uint32_t)(simds / per_cu) : 0;
}

/* Whether the slice's mask was made for what the node is now: bits of another partition mode mean other silicon, some of
 * them none at all. Looked up once a GPU. */
static int mask_fits(struct avg_process *process, uint32_t gpu_id, const struct avg_mask_rule *rule) {
    struct avg_cover cover;
    struct avg_seen *seen = avg_seen_of(process, gpu_id);
    if (!seen || !avg_covers(process, gpu_id, &cover, 1)) return 1;
    if (!seen->node_cus) {
        int error = errno;
        seen->node_cus = cus_of_node(cover.entry->kfd_node);
        errno = error;
        if (!seen->node_cus) seen->node_cus = rule->cu_count; /* hidden topology: the daemon's word stands */
    }
    return seen->node_cus == rule->cu_count;
}

int avg_create_queue(int fd, unsigned long request, struct kfd_create_queue *asked, avg_request *next) {
    if (!kfd_is_compute(asked->type)) return next(fd, request, asked);
    uint32_t gpu_id = asked->gpu_id, priority = asked->priority;
    struct avg_mask_rule rule;
    struct avg_process *process = avg_process_enter(0);
    if (!process) {
        errno = ENOMEM;
        return -1;
    }
    if (!process->slice_count) {
        avg_process_leave(process);
        return next(fd, request, asked);
    }
    uint32_t ceiling = priority_ceiling(process, gpu_id);
    int masked = avg_mask_rule_of(process, gpu_id, &rule);
    if (masked > 0 && !mask_fits(process, gpu_id, &rule)) {
        avg_say(process, AVG_SAY_MASK_STALE, "the slice's CUs were chosen for another partition mode of the GPU: queues are refused", "");
        note(process, gpu_id, AVG_NOTE_MASK_STALE);
        masked = -1;
    }
    avg_process_leave(process);
    if (masked < 0) { /* without its mask the queue would run on everybody's CUs */
        errno = ENOMEM;
        return -1;
    }

    if (priority > ceiling) asked->priority = ceiling;
    int result = next(fd, request, asked), error = errno;
    asked->priority = priority;
    if (result) {
        errno = error;
        return result;
    }
    uint32_t queue_id = asked->queue_id;
    int refused = masked && send_mask(fd, queue_id, &rule, &rule.mask, next);
    process = avg_process_enter(0);
    int live = process != NULL;
    if (process) {
        if (refused) {
            struct avg_cover cover;
            avg_say(process, AVG_SAY_MASK_REFUSED, "the driver refused the slice's CU mask on a queue", "");
            note(process, gpu_id, AVG_NOTE_MASK_REFUSED);
            live = avg_covers(process, gpu_id, &cover, 1) && cover.entry->flags & AVG_GPU_UNMASKED_OK;
        }
        struct avg_queue *queue = live ? queue_of(process, queue_id, 1) : NULL;
        if (avg_wants(process, AVG_LOG_INFO)) {
            uint64_t cus = 0;
            for (uint32_t bit = 0; masked && bit < AVG_MASK_WORDS * 64; bit++) cus += (uint64_t)avg_mask_bit(&rule.mask, bit);
            struct avg_pair pairs[] = {{"gpu", gpu_id, 0}, {"queue", queue_id, 0}, {"priority", avg_min(priority, ceiling), 0},
                                       {"cus", masked ? cus : 0, 0}, {"mask", masked ? rule.mask.word[0] : 0, 1}, {"refused", (uint64_t)refused & 1, 0}, {0}};
            avg_tell(process, AVG_LOG_INFO, masked ? "queue masked" : "queue without a mask", pairs);
        }
        if (queue) *queue = (struct avg_queue){gpu_id, masked && !refused, rule.mask};
        else live = 0; /* a queue we could not remember could be widened later */
        avg_process_leave(process);
    }
    if (!live) {
        struct kfd_destroy_queue destroy = {queue_id, 0};
        next(fd, KFD_DESTROY_QUEUE, &destroy);
        errno = ENOMEM;
        return -1;
    }
    errno = error;
    return 0;
}

int avg_update_queue(int fd, unsigned long request, struct kfd_update_queue *asked, avg_request *next) {
    uint32_t priority = asked->priority;
    struct avg_process *process = avg_process_enter(0);
    struct avg_queue *queue = process ? queue_of(process, asked->queue_id, 0) : NULL;
    uint32_t ceiling = queue ? priority_ceiling(process, queue->gpu_id) : AVG_PRIORITY_NONE;
    if (process) avg_process_leave(process);
    if (!queue || priority <= ceiling) return next(fd, request, asked);
    asked->priority = ceiling;
    int result = next(fd, request, asked);
    asked->priority = priority; /* the caller's structure is the caller's */
    return result;
}

int avg_destroy_queue(int fd, unsigned long request, struct kfd_destroy_queue *asked, avg_request *next) {
    uint32_t queue_id = asked->queue_id;
    /* Forgotten before it goes: afterwards another thread may be given the same id. */
    struct avg_process *process = avg_process_enter(0);
    struct avg_queue *queue = process ? queue_of(process, queue_id, 0) : NULL, kept = {0};
    if (queue) kept = *queue, queue->gpu_id = 0;
    if (process) avg_process_leave(process);
    int result = next(fd, request, asked);
    if (!result || !kept.gpu_id) return result;
    int error = errno;
    if ((process = avg_process_enter(0))) {
        if ((queue = queue_of(process, queue_id, 1)) && !queue->gpu_id) *queue = kept;
        avg_process_leave(process);
    }
    errno = error;
    return result;
}

/* The caller's mask, cut or zero-extended to ours. Not 0 where its pointer is bad: the driver's to say. */
static int fetch_mask(const struct kfd_set_cu_mask *asked, struct avg_mask *mask) {
    *mask = (struct avg_mask){{0}};
    size_t bytes = asked->bits / 8 < sizeof *mask ? asked->bits / 8 : sizeof *mask;
    struct iovec from = {(void *)(uintptr_t)asked->mask_pointer, bytes}, to = {mask->word, bytes};
    long got = avg_syscall(SYS_process_vm_readv, avg_pid(), (long)&to, 1, (long)&from, 1, 0);
    if (got == (long)bytes) return 0;
    if (got == -EFAULT || got >= 0) return -1;
    /* A sandbox that forbids the call: touch it and hope, as every other user of the pointer would. */
    for (size_t i = 0; i < bytes; i++) ((char *)mask->word)[i] = ((const char *)from.iov_base)[i];
    return 0;
}

int avg_set_cu_mask(int fd, unsigned long request, struct kfd_set_cu_mask *asked, avg_request *next) {
    struct kfd_set_cu_mask copy = *asked;
    struct avg_mask_rule rule;
    struct avg_mask wanted, last = {{0}};
    struct avg_process *process = avg_process_enter(0);
    struct avg_queue *queue = process ? queue_of(process, copy.queue_id, 0) : NULL;
    int has_last = queue && queue->has_mask, masked = queue ? avg_mask_rule_of(process, queue->gpu_id, &rule) : 0;
    if (has_last) last = queue->mask;
    if (process) avg_process_leave(process);
    /* Not ours, or wrong in itself: the driver answers, and an error of its leaves the slice's mask in place. */
    if (!process) {
        errno = ENOMEM;
        return -1;
    }
    if (!queue || !masked || !copy.bits || copy.bits % 32 || fetch_mask(&copy, &wanted)) return next(fd, request, asked);
    if (masked < 0) wanted = last; /* the policy cannot be read just now: what is in force stays */
    else wanted = avg_mask_narrow(&rule, &wanted);
    /* 0 also where less was set than asked: an error here fails the call in HIP up to 6.4.3 and crashes 7.2.4. */
    if (has_last && avg_mask_equal(&wanted, &last)) return 0;
    if (masked < 0) return 0;
    int result = send_mask(fd, copy.queue_id, &rule, &wanted, next), error = errno;
    if (!result && (process = avg_process_enter(0))) {
        if ((queue = queue_of(process, copy.queue_id, 0))) queue->mask = wanted, queue->has_mask = 1;
        avg_process_leave(process);
    }
    errno = error;
    return result;
}
