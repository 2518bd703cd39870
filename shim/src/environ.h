/* The program's environment: read without libc, and repaired before the runtime starts. */
#ifndef AMDVGPU_ENVIRON_H
#define AMDVGPU_ENVIRON_H

struct avg_process;

/* Value of `name` in the program's environment, or NULL. */
const char *avg_env(const char *name);

/* Put `entry` (NAME=value, which must stay) in the place of `name`'s. */
void avg_env_exchange(const char *name, char *entry);

/* Take out what slices wrote and the gate makes superfluous or harmful. `argc`, `argv`, `envp` as a constructor gets them
 * (musl passes none). Idempotent: children inherit the repaired list. */
void avg_repair_environment(int argc, char **argv, char **envp);

#endif
