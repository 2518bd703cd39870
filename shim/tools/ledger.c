/* amdvgpu-ledger: what a slice has taken, read from its files.
 *
 *   amdvgpu-ledger [--json] [-w[SECONDS]] [DIRECTORY...]
 *
 *   --json, -j     one line of JSON for each reading
 *   --watch, -w    read again every second (or so many: -w5, --watch=0.5), until killed
 *   DIRECTORY      a slice's guest directory, with `policy` and `ledger` in it. Without: what the gate itself would obey
 *                  (/run/amdvgpu/<slice>, else AMDVGPU_SLICE_DIR), else the daemon's (/run/amdvgpud/slices/<slice>/guest)
 *
 * Exit status: 0, 1 a slice could not be read (said on standard error), 2 wrong use, 3 no slice found.
 *
 * It opens both files for reading and uses pread: writers are neither waited for nor disturbed, and a ledger that is cut
 * short meanwhile is a short read and no SIGBUS. So a reading is no picture of one moment: bytes that move while it reads
 * may be missed or counted twice, once. What a guest can write is believed in nothing: sums saturate, names are cleaned. */
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <amdvgpu/abi.h>

static int json, failed;

static uint64_t sum(uint64_t a, uint64_t b) { return a + b < a ? UINT64_MAX : a + b; }
static uint64_t max(uint64_t a, uint64_t b) { return a > b ? a : b; }

static const char *people(uint64_t bytes) {
    static char text[8][32];
    static int turn;
    char *at = text[turn++ % 8];
    const char *unit = "BKMGTPE";
    double value = (double)bytes;
    while (value >= 1024 && unit[1]) value /= 1024, unit++;
    snprintf(at, sizeof text[0], *unit == 'B' ? "%.0f %c" : "%.1f %ciB", value, *unit);
    return at;
}

static long read_whole(const char *directory, const char *name, void *to, size_t bytes) {
    char path[4096];
    if (snprintf(path, sizeof path, "%s/%s", directory, name) >= (int)sizeof path) return -ENAMETOOLONG;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) return -errno;
    struct stat status;
    long length = -EINVAL;
    if (!fstat(fd, &status) && S_ISREG(status.st_mode)) length = pread(fd, to, bytes, 0);
    close(fd);
    return length;
}

static int cannot(const char *directory, const char *what) {
    fprintf(stderr, "amdvgpu-ledger: %s: %s\n", directory, what);
    failed = 1;
    return -1;
}

/* "alive", "gone", or "elsewhere": of another pid namespace, whose numbers mean nothing here. */
static const char *state_of(uint64_t owner) {
    struct stat ours;
    if (stat("/proc/self/ns/pid", &ours) || (uint32_t)ours.st_ino != (uint32_t)(owner >> AVG_OWNER_NS_SHIFT)) return "elsewhere";
    pid_t pid = (pid_t)(owner & AVG_OWNER_PID_MASK);
    return kill(pid, 0) && errno == ESRCH ? "gone" : "alive";
}

static int show(const char *directory, int first) {
    static union { struct avg_policy policy; char bytes[AVG_POLICY_BYTES]; } of;
    static union { struct avg_ledger head; char bytes[AVG_LEDGER_HEAD_BYTES + AVG_SLOTS * (AVG_SLOT_HEAD_BYTES + AVG_MAX_GPUS * AVG_CELL_BYTES)]; } in;
    const struct avg_policy *policy = &of.policy;
    const struct avg_ledger *ledger = &in.head;
    long length = read_whole(directory, "policy", &of, sizeof of);
    if (length < 0) return cannot(directory, length == -EACCES ? "no permission to read the policy" : "no readable policy here");
    if (length < AVG_POLICY_BYTES || policy->magic != AVG_POLICY_MAGIC) return cannot(directory, "the policy is damaged");
    if (policy->version != AVG_VERSION) return cannot(directory, "the policy is of another version than this program understands");
    if (policy->gpu_count < 1 || policy->gpu_count > AVG_MAX_GPUS) return cannot(directory, "the policy is damaged");
    uint32_t gpus = policy->gpu_count;
    length = read_whole(directory, "ledger", &in, avg_ledger_bytes(gpus));
    if (length < 0) return cannot(directory, length == -EACCES ? "no permission to read the ledger" : "no readable ledger here");
    if ((size_t)length < avg_ledger_bytes(gpus)) return cannot(directory, "the ledger has been cut short");
    if (ledger->magic != AVG_LEDGER_MAGIC || ledger->slice_key != policy->slice_key) return cannot(directory, "the ledger does not belong to the policy");

    char name[AVG_NAME_BYTES + 1] = "";
    for (int i = 0; i < AVG_NAME_BYTES && policy->name[i]; i++) name[i] = isalnum((unsigned char)policy->name[i]) || strchr("-_.", policy->name[i]) ? policy->name[i] : '?';
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    uint64_t now_ms = (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;

    if (json) printf("%s{\"slice\":\"%s\",\"gpus\":[", first ? "" : ",", name);
    else printf("%s\n", name);
    for (uint32_t gpu = 0; gpu < gpus; gpu++) {
        const struct avg_past *past = &ledger->past[gpu];
        struct avg_cell all = {.peak = past->peak, .allocations = past->allocations, .frees = past->frees,
                               .denials = past->denials, .denied_bytes = past->denied_bytes};
        uint64_t promised = 0;
        char processes[AVG_SLOTS * 96] = "", *put = processes;
        for (uint32_t i = 0; i < AVG_SLOTS; i++) {
            const struct avg_slot *slot = (const struct avg_slot *)(in.bytes + AVG_LEDGER_HEAD_BYTES + i * avg_slot_bytes(gpus));
            const struct avg_cell *cell = (const struct avg_cell *)((const char *)slot + AVG_SLOT_HEAD_BYTES) + gpu;
            all.used = sum(all.used, cell->used), all.pending = sum(all.pending, cell->pending);
            if (cell->earmark >> AVG_EARMARK_MS_SHIFT > now_ms) promised = sum(promised, (cell->earmark & AVG_EARMARK_MIB_MASK) << 20);
            all.peak = max(all.peak, cell->peak);
            all.allocations = sum(all.allocations, cell->allocations), all.frees = sum(all.frees, cell->frees);
            all.denials = sum(all.denials, cell->denials), all.denied_bytes = sum(all.denied_bytes, cell->denied_bytes);
            uint32_t pid = slot->owner & AVG_OWNER_PID_MASK;
            if (!pid || slot->owner & AVG_OWNER_RECLAIM || !(cell->used | cell->allocations | cell->denials)) continue;
            if (json) put += sprintf(put, "%s{\"pid\":%u,\"state\":\"%s\",\"used_bytes\":%" PRIu64 "}", put == processes ? "" : ",", pid, state_of(slot->owner), cell->used);
            else put += sprintf(put, "    pid %-7u %-9s %12s\n", pid, state_of(slot->owner), people(cell->used));
        }
        const struct avg_policy_gpu *entry = &policy->gpu[gpu];
        if (json)
            printf("%s{\"kfd_gpu_id\":%u,\"quota_bytes\":%" PRIu64 ",\"used_bytes\":%" PRIu64 ",\"pending_bytes\":%" PRIu64
                   ",\"promised_bytes\":%" PRIu64 ",\"peak_bytes\":%" PRIu64 ",\"allocations\":%" PRIu64 ",\"frees\":%" PRIu64
                   ",\"denials\":%" PRIu64 ",\"denied_bytes\":%" PRIu64 ",\"reclaimed_bytes\":%" PRIu64 ",\"processes\":[%s]}",
                   gpu ? "," : "", entry->kfd_gpu_id, entry->vram_bytes, all.used, all.pending, promised, all.peak, all.allocations,
                   all.frees, all.denials, all.denied_bytes, past->reclaimed_bytes, processes);
        else
            printf("  GPU %u: %s of %s taken, %s promised, peak %s; %" PRIu64 " allocations, %" PRIu64 " refused\n%s", entry->kfd_gpu_id,
                   people(all.used), people(entry->vram_bytes), people(promised), people(all.peak), all.allocations, all.denials, processes);
    }
    if (json) printf("]}");
    return 0;
}

/* Show each directory `root`/<name>`suffix`; their number. */
static int show_below(const char *root, const char *suffix, int shown) {
    DIR *open = opendir(root);
    char path[4096];
    int found = 0;
    for (struct dirent *entry; open && (entry = readdir(open));) {
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%s/%s%s", root, entry->d_name, suffix);
        shown += !show(path, !shown), found++;
    }
    if (open) closedir(open);
    return found;
}

static int show_all(char **directories, int count) {
    int found = 0, shown = 0;
    failed = 0;
    if (json) printf("{\"slices\":[");
    for (int i = 0; i < count; i++) shown += !show(directories[i], !shown), found++;
    if (!count) {
        found = show_below("/run/amdvgpu", "", 0);
        const char *named = getenv("AMDVGPU_SLICE_DIR");
        if (!found && named) {
            char *copy = strdup(named), *save;
            for (char *part = copy ? strtok_r(copy, ":", &save) : NULL; part; part = strtok_r(NULL, ":", &save))
                shown += !show(part, !shown), found++;
            free(copy);
        }
        if (!found) found = show_below("/run/amdvgpud/slices", "/guest", 0);
    }
    if (json) printf("]}\n");
    fflush(stdout);
    if (!found) fprintf(stderr, "amdvgpu-ledger: there is no slice here; name its directory\n");
    return !found ? 3 : failed;
}

int main(int argc, char **argv) {
    static const struct option options[] = {{"json", no_argument, 0, 'j'}, {"watch", optional_argument, 0, 'w'}, {0}};
    double every_s = 0;
    for (int o; (o = getopt_long(argc, argv, "jw::", options, NULL)) != -1;) {
        char *end = "";
        if (o == 'j') json = 1;
        else if (o == 'w') every_s = optarg ? strtod(optarg, &end) : 1;
        if (o == '?' || *end || (o == 'w' && !(every_s > 0 && every_s < 1e6))) {
            fprintf(stderr, "usage: amdvgpu-ledger [--json] [-w[SECONDS]] [DIRECTORY...]\n");
            return 2;
        }
    }
    int status = show_all(argv + optind, argc - optind);
    while (every_s > 0 && !ferror(stdout)) {
        struct timespec pause = {(time_t)every_s, (long)((every_s - (double)(time_t)every_s) * 1e9)};
        nanosleep(&pause, NULL);
        if (!json) printf("\n");
        status = show_all(argv + optind, argc - optind);
    }
    return status;
}
