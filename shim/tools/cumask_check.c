/* amdvgpu-cumask-check: does the CU mask hold on the silicon? It needs a GPU, and says so where there is none.
 *
 *   amdvgpu-cumask-check [--gpu N] [--cus 0-75 [--xccs 8] [--wgp]] [--code DIRECTORY]
 *
 *   --gpu N      HIP device N, and the Nth GPU of the slice's policy (0)
 *   --cus LIST   the mask that should hold. Without: the slice's, from /run/amdvgpu/<slice> or AMDVGPU_SLICE_DIR; where
 *   --xccs N     there is none, the census is printed and judged by nothing
 *   --wgp        mask bits come in pairs, one WGP each (gfx10 and later)
 *   --code DIR   where census-<gfx>.co lie (beside this program)
 *
 * Sends many small groups (census.cl) through a plain HIP queue; each writes where it ran. It fails when they ran on more
 * compute units than the mask has, in all or in one XCC. Fewer is no failure: nothing makes the hardware use each of them.
 * Mask bits count active units and the hardware's numbers are physical, so places are counted, not compared one by one.
 *
 * Exit status: 0 held, 1 it did not, 2 wrong use, 3 no HIP, device, or code for this GPU, 4 the kernel never ran: a
 * simulated GPU (softkfd completes packets and runs nothing) proves nothing about masks.
 *
 * HIP is opened at run time, so this builds without it and runs with any version: only calls without structures are used. */
#include <dirent.h>
#include <dlfcn.h>
#include <getopt.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../src/text.h"

#define GROUPS 8192
#define ROUNDS 1000 /* of 512 clocks: long enough for a group to be sent elsewhere, about a second in all on few CUs */
#define RAN 0x80000000u

static const char *const targets[] = {"gfx90a", "gfx942", "gfx1100", "gfx1201"};

static int (*hipGetDeviceCount)(int *), (*hipSetDevice)(int), (*hipMalloc)(void **, size_t);
static int (*hipMemcpy)(void *, const void *, size_t, int), (*hipDeviceSynchronize)(void), (*hipModuleLoadData)(void **, const void *);
static int (*hipModuleGetFunction)(void **, void *, const char *);
static int (*hipModuleLaunchKernel)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
static const char *(*hipGetErrorName)(int);

static int end(int status, const char *what, const char *more) {
    fprintf(stderr, "amdvgpu-cumask-check: %s%s\n", what, more);
    return status;
}

static int open_hip(void) {
    void *hip = dlopen("libamdhip64.so", RTLD_NOW);
    for (int version = 7; !hip && version >= 5; version--) {
        char name[32];
        snprintf(name, sizeof name, "libamdhip64.so.%d", version);
        hip = dlopen(name, RTLD_NOW);
    }
#define FIND(name) (*(void **)&name = hip ? dlsym(hip, #name) : NULL)
    return FIND(hipGetDeviceCount) && FIND(hipSetDevice) && FIND(hipMalloc) && FIND(hipMemcpy) && FIND(hipDeviceSynchronize) &&
           FIND(hipModuleLoadData) && FIND(hipModuleGetFunction) && FIND(hipModuleLaunchKernel) && FIND(hipGetErrorName);
}

/* The mask of GPU `gpu` of the policy in `directory`; 0 where there is none to check. */
static int from_policy(const char *directory, int gpu, struct avg_mask_rule *rule) {
    struct avg_policy policy;
    char path[4096];
    snprintf(path, sizeof path, "%s/policy", directory);
    FILE *file = fopen(path, "re");
    size_t got = file ? fread(&policy, 1, sizeof policy, file) : 0;
    if (file) fclose(file);
    if (got != sizeof policy || policy.magic != AVG_POLICY_MAGIC || policy.version != AVG_VERSION) return 0;
    if (gpu >= AVG_MAX_GPUS || (uint32_t)gpu >= policy.gpu_count || !(policy.gpu[gpu].flags & AVG_GPU_MASKED)) return 0;
    const struct avg_policy_gpu *entry = &policy.gpu[gpu];
    *rule = (struct avg_mask_rule){.cu_count = entry->cu_count, .xcc_count = entry->xcc_count, .wgp = (entry->flags & AVG_GPU_WGP) != 0};
    memcpy(rule->mask.word, entry->cu_mask, sizeof rule->mask.word);
    return 1;
}

static int from_slice(int gpu, struct avg_mask_rule *rule) {
    DIR *root = opendir("/run/amdvgpu");
    char path[4096];
    const char *named = getenv("AMDVGPU_SLICE_DIR");
    int found = 0;
    for (struct dirent *entry; root && !found && (entry = readdir(root));) {
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "/run/amdvgpu/%s", entry->d_name);
        found = from_policy(path, gpu, rule);
    }
    if (root) closedir(root);
    if (!found && named) {
        snprintf(path, sizeof path, "%.*s", (int)strcspn(named, ":"), named);
        found = from_policy(path, gpu, rule);
    }
    return found;
}

static void *load(const char *directory, const char **target) {
    static char code[1 << 20];
    for (size_t i = 0; i < sizeof targets / sizeof *targets; i++) {
        char path[4096];
        void *module;
        snprintf(path, sizeof path, "%s/census-%s.co", directory, targets[i]);
        FILE *file = fopen(path, "re");
        size_t length = file ? fread(code, 1, sizeof code, file) : 0;
        if (file) fclose(file);
        *target = targets[i];
        if (length && !hipModuleLoadData(&module, code)) return module; /* it refuses the code of another GPU */
    }
    return NULL;
}

/* One number for a place, and its XCC. */
static unsigned place_of(const char *target, unsigned where, unsigned xcc) {
    int wgp = !strcmp(target, "gfx1100") || !strcmp(target, "gfx1201");
    unsigned unit = wgp ? where >> 10 & 15 : where >> 8 & 15, array = wgp ? where >> 16 & 1 : where >> 12 & 1;
    unsigned engine = wgp ? where >> 18 & 7 : where >> 13 & (strcmp(target, "gfx942") ? 7 : 3);
    return ((xcc & 15) << 8 | engine << 5 | array << 4 | unit) & 0xfff;
}

static int by_number(const void *a, const void *b) { return *(const int *)b - *(const int *)a; }

int main(int argc, char **argv) {
    static const struct option options[] = {{"gpu", 1, 0, 'g'}, {"cus", 1, 0, 'c'}, {"xccs", 1, 0, 'x'}, {"wgp", 0, 0, 'w'}, {"code", 1, 0, 'd'}, {0}};
    static unsigned answers[GROUPS * 2];
    static char seen[4096], self[4096];
    struct avg_mask_rule rule = {.xcc_count = 1};
    int gpu = 0, given = 0, wrong = 0, count = 0, error;
    const char *code = NULL, *target;
    for (int o; (o = getopt_long(argc, argv, "", options, NULL)) != -1;) switch (o) {
        case 'g': gpu = atoi(optarg); break;
        case 'c': given = 1, wrong |= !avg_parse_cus(optarg, &rule.mask); break;
        case 'x': rule.xcc_count = (uint32_t)atoi(optarg), wrong |= rule.xcc_count < 1 || rule.xcc_count > 16; break;
        case 'w': rule.wgp = 1; break;
        case 'd': code = optarg; break;
        default: wrong = 1;
        }
    if (wrong || optind < argc || gpu < 0) return end(2, "usage: amdvgpu-cumask-check [--gpu N] [--cus LIST [--xccs N] [--wgp]] [--code DIRECTORY]", "");
    if (!given) given = from_slice(gpu, &rule);
    if (!code && readlink("/proc/self/exe", self, sizeof self - 1) > 0) code = dirname(self);

    if (!open_hip()) return end(3, "this needs a GPU and ROCm: there is no HIP runtime (libamdhip64.so)", "");
    if ((error = hipGetDeviceCount(&count)) || gpu >= count) return end(3, "this needs a GPU: HIP has no such device: ", hipGetErrorName(error));
    if ((error = hipSetDevice(gpu))) return end(3, "hipSetDevice: ", hipGetErrorName(error));
    void *module = load(code ? code : ".", &target), *function, *places;
    if (!module) return end(3, "no code for this GPU (census-<gfx>.co) in ", code ? code : ".");
    if ((error = hipModuleGetFunction(&function, module, "census")) || (error = hipMalloc(&places, sizeof answers)) ||
        (error = hipMemcpy(places, answers, sizeof answers, 1 /* to the device */)))
        return end(3, "HIP: ", hipGetErrorName(error));
    unsigned rounds = ROUNDS;
    void *arguments[] = {&places, &rounds};
    if ((error = hipModuleLaunchKernel(function, GROUPS, 1, 1, 64, 1, 1, 0, NULL, arguments, NULL)) || (error = hipDeviceSynchronize()) ||
        (error = hipMemcpy(answers, places, sizeof answers, 2 /* to the host */)))
        return end(3, "HIP: ", hipGetErrorName(error));

    int ran = 0, all = 0, most = 0, of_xcc[16] = {0}, may[16] = {0};
    for (int i = 0; i < GROUPS; i++) {
        if (!(answers[i * 2 + 1] & RAN)) continue;
        unsigned place = place_of(target, answers[i * 2], answers[i * 2 + 1]);
        ran++;
        if (!seen[place]++) all++, of_xcc[place >> 8]++;
    }
    if (!ran)
        return end(4, "the kernel was sent and said to be done, but never ran: this GPU is simulated. It needs a real one; "
                      "nothing is shown about masks", "");
    if (ran < GROUPS) return end(3, "some of the groups did not answer", "");
    const char *unit = rule.wgp ? "WGPs" : "CUs";
    for (uint32_t bit = 0; bit < AVG_MASK_WORDS * 64; bit += rule.wgp ? 2 : 1)
        if (avg_mask_bit(&rule.mask, bit) || (rule.wgp && avg_mask_bit(&rule.mask, bit + 1))) may[bit % rule.xcc_count]++, most++;
    printf("%s: %d groups ran on %d %s\n", target, ran, all, unit);
    for (int xcc = 0; xcc < 16; xcc++)
        if (of_xcc[xcc]) printf("  XCC %d: %d\n", xcc, of_xcc[xcc]);
    if (!given) return printf("no mask to hold it against: name one by --cus, or run it in a slice\n"), 0;
    qsort(of_xcc, 16, sizeof *of_xcc, by_number); /* which XCC has which number is the driver's affair */
    qsort(may, 16, sizeof *may, by_number);
    int held = all <= most;
    for (int i = 0; i < 16; i++) held &= of_xcc[i] <= may[i];
    printf("the mask has %d %s: it %s\n", most, unit, held ? "held" : "DID NOT HOLD");
    if (held && all < most) printf("%d of them were not seen to be used; that is no proof of anything\n", most - all);
    return !held;
}
