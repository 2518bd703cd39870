/* Limits without a daemon: what the environment says, held by the same code as a slice's. */
#ifndef AMDVGPU_STANDALONE_H
#define AMDVGPU_STANDALONE_H

#include "process.h"

/* Before the program runs: where the environment limits VRAM, make sure that the ledger of this tree of processes exists
 * and is named in the environment that children inherit; give back what an earlier image of this process held. Reads
 * nothing of the machine: an emulator behind us may not be ready. */
void avg_stand_alone_early(void);

/* Bytes of a value of AMDVGPU_VRAM, with the ledger that a tree of processes appended to it or without; 0: no size. */
uint64_t avg_vram_limit_of(const char *text);

/* Whether the environment asks for limits at all. */
int avg_stands_alone(void);

/* Add the slice that the environment describes: one of every GPU in the KFD's topology. What cannot be understood or
 * made bars all VRAM, with one line. */
void avg_stand_alone(struct avg_process *process);

/* The text of a file of KFD node `node`, as the program itself would find it; its length, or -1. */
long avg_read_node(uint64_t node, const char *name, char *text, size_t room);

/* The number behind `name` in a text of "name number" lines; 0 where it is not there. */
uint64_t avg_field(const char *text, const char *name);

#endif
