/* What the two ways in, interposed functions (gate.c) and audited bindings (audit.c), have in common. */
#ifndef AMDVGPU_GATE_H
#define AMDVGPU_GATE_H

#include <stdio.h>

#include "memory.h"

/* Whether a request may be ours at all, by its number: the first and nearly always the only question. */
int avg_request_of_interest(unsigned long request, const void *argument);

/* Such a request. `next` makes it; errno is this library's own (which is the program's only where it is preloaded). */
int avg_gate(int fd, unsigned long request, void *argument, avg_request *next);

/* A file that the program has just opened for `path`: where it tells of memory, it tells of the slice from here on. */
void avg_opened(FILE *file, const char *path);

#endif
