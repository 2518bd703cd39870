/* VRAM requests of the KFD: charged before they are made, refused over quota. Each returns what ioctl returns, with
 * errno set. `next` makes the request itself. */
#ifndef AMDVGPU_MEMORY_H
#define AMDVGPU_MEMORY_H

#include "kfd.h"
#include "process.h"

typedef int avg_request(int fd, unsigned long request, void *argument);

int avg_alloc_memory(int fd, unsigned long request, struct kfd_alloc_memory *asked, avg_request *next);
int avg_free_memory(int fd, unsigned long request, struct kfd_free_memory *asked, avg_request *next);
int avg_available_memory(int fd, unsigned long request, struct kfd_available_memory *asked, avg_request *next);

/* Charge a request, whichever door it comes through. Not 0: refused, and counted as such. */
int avg_charge_request(struct avg_process *process, const struct kfd_alloc_memory *asked, struct avg_charge *charge);

/* What a program is to believe of a GPU. Not 0: no slice covers it. */
struct avg_shown { uint64_t total, used; };
int avg_shown_of(struct avg_process *process, uint32_t gpu_id, struct avg_shown *shown);

/* CRIU_OP and CREATE_PROCESS: memory by a door that nobody counts. Refused in a slice, one line. */
int avg_other_door(int fd, unsigned long request, void *argument, avg_request *next);

/* Total to show for KFD node `node`, whose own size is `physical`; `physical` where no slice covers it. */
uint64_t avg_total_of_node(uint32_t node, uint64_t physical);

#endif
