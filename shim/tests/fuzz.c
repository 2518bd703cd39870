/* What the gate reads and did not write, fuzzed: one harness for each kind of text or file, by libFuzzer.
 *
 *   clang -fsanitize=fuzzer,address,undefined -DFUZZ_<KIND> fuzz.c <the gate's sources but gate.c> -o fuzz-<kind>
 *   fuzz-<kind> [-close_fd_mask=2] fuzz/<kind>     the option: the gate says on standard error what is wrong with each input
 *
 *   POLICY   a policy file and requests on it     LEDGER  a ledger beneath a whole policy, and requests on it
 *   SIZES    AMDVGPU_VRAM and its aliases         CUS     AMDVGPU_CUS       BANK  a mem_banks file shown to a program
 *
 * Beyond what the sanitizers see, each harness checks what must hold whatever the input says. */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../src/environ.h"
#include "../src/ledger.h"
#include "../src/memory.h"
#include "../src/queue.h"
#include "../src/text.h"

#define CHECK(truth) ((truth) ? (void)0 : (fprintf(stderr, "not so: %s\n", #truth), abort()))

#if defined(FUZZ_POLICY) || defined(FUZZ_LEDGER)
static char directory[64];
static void put(const char *name, const void *bytes, size_t length) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    FILE *file = fopen(path, "w");
    if (!file || fwrite(bytes, 1, length, file) != length || fclose(file)) abort();
}
static void clear(void) {
    put("policy", "", 0), put("ledger", "", 0);
}
static void prepare(void) {
    if (*directory) return;
    strcpy(directory, "/dev/shm/avg-fuzz-XXXXXX");
    if (!mkdtemp(directory)) abort();
    setenv("AMDVGPU_SLICE_DIR", directory, 1);
    atexit(clear);
}

static uint64_t handles, out_bytes, handle_bytes[64];
static int driver(int fd, unsigned long request, void *argument) {
    (void)fd;
    if (_IOC_NR(request) == _IOC_NR(KFD_ALLOC_MEMORY)) {
        struct kfd_alloc_memory *asked = argument;
        asked->handle = ++handles;
        out_bytes += asked->bytes, handle_bytes[asked->handle % 64] = asked->bytes;
    } else if (_IOC_NR(request) == _IOC_NR(KFD_FREE_MEMORY)) {
        struct kfd_free_memory *asked = argument;
        out_bytes -= handle_bytes[asked->handle % 64], handle_bytes[asked->handle % 64] = 0;
    } else if (_IOC_NR(request) == _IOC_NR(KFD_AVAILABLE_MEMORY))
        ((struct kfd_available_memory *)argument)->available = 1ULL << 40;
    else if (_IOC_NR(request) == _IOC_NR(KFD_CREATE_QUEUE))
        ((struct kfd_create_queue *)argument)->queue_id = 1;
    return 0;
}

/* Some requests of a program, on the GPUs that the policy may name; `quota` bounds what one GPU may hand out where the
 * policy can be believed. */
static void play(uint64_t quota) {
    struct avg_process *process = avg_process_enter(1);
    avg_process_start_over(process);
    avg_process_leave(process);
    handles = out_bytes = 0;
    uint64_t mine[8] = {0};
    for (int i = 0; i < 8; i++) {
        struct kfd_alloc_memory asked = {.bytes = (uint64_t)(i + 1) << 26, .gpu_id = 1000, .flags = 0xb0000001u};
        struct kfd_available_memory available = {0, 1000, 0};
        if (!avg_alloc_memory(3, KFD_ALLOC_MEMORY, &asked, driver)) mine[i] = asked.handle;
        CHECK(out_bytes <= quota);
        avg_available_memory(3, KFD_AVAILABLE_MEMORY, &available, driver);
        CHECK(quota == UINT64_MAX || available.available <= quota);
    }
    struct kfd_create_queue queue = {.gpu_id = 1000, .type = 2, .priority = 15};
    if (!avg_create_queue(3, KFD_CREATE_QUEUE, &queue, driver)) {
        uint32_t words[10] = {0xff};
        struct kfd_set_cu_mask mask = {1, 320, (uintptr_t)words};
        avg_set_cu_mask(3, KFD_SET_CU_MASK, &mask, driver);
        struct kfd_destroy_queue destroy = {1, 0};
        avg_destroy_queue(3, KFD_DESTROY_QUEUE, &destroy, driver);
    }
    avg_total_of_node(1, 1ULL << 34);
    for (int i = 0; i < 8; i++) {
        struct kfd_free_memory asked = {mine[i]};
        if (mine[i]) avg_free_memory(3, KFD_FREE_MEMORY, &asked, driver);
    }
    CHECK(out_bytes == 0);
    process = avg_process_enter(1);
    avg_process_start_over(process);
    avg_process_leave(process);
}

static void whole_policy(struct avg_policy *policy, uint64_t quota) {
    *policy = (struct avg_policy){.magic = AVG_POLICY_MAGIC, .version = AVG_VERSION, .bytes = AVG_POLICY_BYTES, .gpu_count = 1,
                                  .slice_key = 7, .name = "f"};
    policy->gpu[0] = (struct avg_policy_gpu){.kfd_gpu_id = 1000, .kfd_node = 1, .vram_bytes = quota, .physical_bytes = 1ULL << 34,
                                             .cu_count = 304, .xcc_count = 8, .flags = AVG_GPU_MASKED, .priority = 7,
                                             .cu_mask = {~0ULL, 0xfff}};
}
static void whole_ledger(struct avg_ledger *ledger, uint32_t gpus) {
    memset(ledger, 0, avg_ledger_bytes(gpus));
    *ledger = (struct avg_ledger){.magic = AVG_LEDGER_MAGIC, .version = AVG_VERSION, .slot_count = AVG_SLOTS,
                                  .slot_bytes = (uint32_t)avg_slot_bytes(gpus), .gpu_count = gpus, .slice_key = 7};
}
#endif

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t length) {
#if defined(FUZZ_POLICY)
    /* 8 bytes each: an offset (16 bits of them) and a value; on a whole policy. Or, first byte odd, the file as it is. */
    static struct avg_policy policy;
    static union { struct avg_ledger head; char bytes[AVG_LEDGER_HEAD_BYTES + AVG_SLOTS * (AVG_SLOT_HEAD_BYTES + AVG_MAX_GPUS * AVG_CELL_BYTES)]; } ledger;
    prepare();
    if (length && data[0] & 1) {
        put("policy", data + 1, length - 1);
    } else {
        whole_policy(&policy, 1ULL << 30);
        for (size_t at = 1; at + 6 <= length; at += 6) {
            uint16_t offset;
            memcpy(&offset, data + at, 2);
            memcpy((char *)&policy + offset % (sizeof policy - 4), data + at + 2, 4);
        }
        put("policy", &policy, sizeof policy);
    }
    uint32_t gpus = policy.gpu_count < 1 || policy.gpu_count > AVG_MAX_GPUS ? 1 : policy.gpu_count;
    whole_ledger(&ledger.head, gpus);
    put("ledger", &ledger, avg_ledger_bytes(gpus));
    play(UINT64_MAX);
#elif defined(FUZZ_LEDGER)
    /* The guest's own part as it is; the head must hold or nothing is looked at (first byte odd: write there too). */
    static struct avg_policy policy;
    static union { struct avg_ledger head; char bytes[AVG_LEDGER_HEAD_BYTES + AVG_SLOTS * (AVG_SLOT_HEAD_BYTES + AVG_CELL_BYTES)]; } ledger;
    prepare();
    whole_policy(&policy, 1ULL << 30);
    whole_ledger(&ledger.head, 1);
    for (size_t at = 1; at + 10 <= length; at += 10) {
        uint16_t offset;
        memcpy(&offset, data + at, 2);
        size_t first = data[0] & 1 ? 0 : offsetof(struct avg_ledger, occupied);
        memcpy(ledger.bytes + first + offset % (sizeof ledger - first - 8), data + at + 2, 8);
    }
    put("policy", &policy, sizeof policy);
    put("ledger", &ledger, sizeof ledger);
    play(1ULL << 30); /* whatever a guest has written there: its quota holds for what this process takes */
#else
    char *text = malloc(length + 1); /* its end is the sanitizer's to guard */
    memcpy(text, data, length);
    text[length] = 0;
#if defined(FUZZ_SIZES)
    uint64_t bytes = avg_parse_size(text);
    CHECK(bytes <= INT64_MAX);
    if (bytes) CHECK(strspn(text, "0123456789. \t\n\v\f\rkKmMgGtTiIbB") == strlen(text));
    CHECK(avg_parse_binary_size(text) <= INT64_MAX);
#elif defined(FUZZ_CUS)
    struct avg_mask mask;
    if (avg_parse_cus(text, &mask)) {
        uint64_t any = 0;
        for (int i = 0; i < AVG_MASK_WORDS; i++) any |= mask.word[i];
        CHECK(any);
        CHECK(strspn(text, "0123456789-,") == strlen(text));
    }
#elif defined(FUZZ_BANK)
    /* The program's fopen shows a file whose size is the slice's: text comes back whole but for that line. */
    extern void fuzz_show(const char *text, size_t length);
    fuzz_show(text, length);
#else
#error "which harness? -DFUZZ_POLICY, LEDGER, SIZES, CUS or BANK"
#endif
    free(text);
#endif
    return 0;
}

#if defined(FUZZ_BANK)
/* gate.c itself, whose fopen shows the file. Its entry points are renamed: libFuzzer has need of the true ones. */
#define ioctl gate_ioctl
#define fopen gate_fopen
#define fopen64 gate_fopen64
#include "../src/gate.c"
#undef fopen
#include <sys/stat.h>

void fuzz_show(const char *text, size_t length) {
    static char path[128], shown[8192];
    if (!*path) {
        strcpy(path, "/dev/shm/avg-fuzz-XXXXXX");
        if (!mkdtemp(path)) abort();
        for (const char *part = "/topology /nodes /1 /mem_banks /0 "; *part; part = strchr(part, ' ') + 1) {
            strncat(path, part, strcspn(part, " "));
            mkdir(path, 0700);
        }
        strcat(path, "/properties");
    }
    FILE *file = fopen(path, "w");
    if (!file || fwrite(text, 1, length, file) != length || fclose(file) || !(file = gate_fopen(path, "r"))) abort();
    size_t got = fread(shown, 1, sizeof shown, file);
    CHECK(got <= 4200 || got == length);
    if (length < 4000 && strlen(text) == length && !strstr(text, "size_in_bytes")) CHECK(got == length && !memcmp(shown, text, length));
    fclose(file);
}
#endif
