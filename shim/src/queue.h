/* Queue requests of the KFD: every compute queue runs within the slice's CU mask and below its priority. Each returns
 * what ioctl returns, with errno set. */
#ifndef AMDVGPU_QUEUE_H
#define AMDVGPU_QUEUE_H

#include "memory.h"

int avg_create_queue(int fd, unsigned long request, struct kfd_create_queue *asked, avg_request *next);
int avg_update_queue(int fd, unsigned long request, struct kfd_update_queue *asked, avg_request *next);
int avg_destroy_queue(int fd, unsigned long request, struct kfd_destroy_queue *asked, avg_request *next);
int avg_set_cu_mask(int fd, unsigned long request, struct kfd_set_cu_mask *asked, avg_request *next);

#endif
