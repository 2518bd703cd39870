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

/* Total to show for KFD node `node`, whose own size is `physical`; `physical` where no slice covers it. */
uint64_t avg_total_of_node(uint32_t node, uint64_t physical);

#endif
