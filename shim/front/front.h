/* The HIP front: refuses at the call what cannot fit, and reports the slice's compute units. It never counts: what is
 * charged is charged at the KFD, with or without it. README.md has the argument for the way it is bound. */
#ifndef AMDVGPU_FRONT_H
#define AMDVGPU_FRONT_H

#include <stddef.h>
#include <stdint.h>

/* Look whether objects were loaded since the last look, and if a HIP runtime is among them, bind the front to it. Cheap
 * where nothing was. Called where the gate is anyway: at start, and when the program opens a file. */
void avg_front_look(void);

/* How many calls of the front want to hear of allocations; nearly always none. */
extern int avg_front_listening;

/* The driver, or the gate, has answered this thread's request with `result`. Touches no errno. */
struct kfd_alloc_memory;
void avg_front_hear(const struct kfd_alloc_memory *asked, int result);
static inline void avg_front_tell(const struct kfd_alloc_memory *asked, int result) {
    if (__builtin_expect(__atomic_load_n(&avg_front_listening, __ATOMIC_RELAXED), 0)) avg_front_hear(asked, result);
}

/* ---- between bind.c and calls.c */

enum front_name {
#define HIP(name) F_##name,
#define USES(name) F_##name,
#include "names.h"
#undef HIP
#undef USES
    FRONT_NAMES
};

/* Address of the runtime's own function; NULL where this runtime has none. Set before any caller can come by ours. */
extern void *front_real[FRONT_NAMES];

/* Ours, or NULL for those that are only used. */
extern void *const front_ours[FRONT_NAMES];

#endif
