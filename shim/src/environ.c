/* Why anything is taken out at all: where two CDI devices each set a variable, the second overwrites the first, so
 *
 *   HSA_CU_MASK          beside the gate it only does harm: HIP <= 6.4.3 fails streams whose mask is wider, and with two
 *                        slices one slice's mask is applied to the other's GPU. The gate sets masks by gpu_id.
 *   ROCR_VISIBLE_DEVICES with two slices it hides the first one's GPU. With one it is right and stays.
 *
 * Only a value that is byte for byte what a mounted policy says it wrote is touched: anything else is the user's.
 * Done in place, by moving pointers: a later setenv, putenv or clearenv finds an ordinary list, and main's third
 * argument is the repaired list too. /proc/self/environ goes on showing the old strings.
 *
 * Reading the slices at this point also gives back, after an exec, what the last image held (process.c). */
#include "environ.h"

#include <stddef.h>

#include "os.h"
#include "process.h"
#include "standalone.h"

extern char **environ __attribute__((weak));

/* Before libc's own constructors (this library is linked with -z initfirst) `environ` is not set yet. */
static char **early;

static char **list(void) { return &environ && environ ? environ : early; }

static const char *value_of(const char *entry, const char *name) {
    while (*name && *entry == *name) entry++, name++;
    return !*name && *entry == '=' ? entry + 1 : NULL;
}

const char *avg_env(const char *name) {
    char **at = list();
    for (; at && *at; at++) {
        const char *value = value_of(*at, name);
        if (value) return value;
    }
    return NULL;
}

void avg_env_exchange(const char *name, char *entry) {
    char **at = list();
    for (; at && *at; at++)
        if (value_of(*at, name)) {
            *at = entry;
            return;
        }
}

static void take_out(char **at) {
    for (; *at; at++) at[0] = at[1];
}

/* Whether any mounted policy wrote `value`. */
static int written_by_a_slice(const struct avg_process *process, const char *value, int visible) {
    uint64_t hash = avg_text_hash(value, avg_length(value));
    for (int i = 0; i < process->slice_count; i++) {
        const struct avg_policy *policy = process->slice[i].policy;
        if (hash == (visible ? policy->visible_env_hash : policy->cu_mask_env_hash)) return 1;
    }
    return 0;
}

void avg_repair_environment(int argc, char **argv, char **envp) {
    if (!(&environ && environ) && argc > 0 && argv && envp == argv + argc + 1) early = envp;
    if (!avg_process_has_slices() && !avg_stands_alone()) return;
    struct avg_process *process = avg_process_enter(1);
    if (!process) return;
    if (process->postponed) avg_stand_alone_early();
    for (char **at = list(); at && *at;) {
        const char *mask = value_of(*at, "HSA_CU_MASK"), *visible = value_of(*at, "ROCR_VISIBLE_DEVICES");
        if ((mask && written_by_a_slice(process, mask, 0)) ||
            (visible && process->slice_count > 1 && written_by_a_slice(process, visible, 1)))
            take_out(at);
        else
            at++;
    }
    if (process->said || process->postponed) avg_process_start_over(process); /* said when memory is asked for, not in every program */
    process->quiet = 0;
    avg_process_leave(process);
}
