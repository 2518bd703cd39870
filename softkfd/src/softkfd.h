/* What the files of softkfd share. Contract here, argument in the sources. Nothing here is visible outside the library:
 * it exports the libc functions that it stands in front of (paths.c, kfd.c) and no other name.
 *
 *   root.c     finds the simulated machine, reads gpus.conf, writes the log and the sysfs figures
 *   memory.c   the table of buffers that all processes share: accounting, handles, dma-bufs, GPU addresses
 *   queues.c   compute and SDMA queues, CU masks, events
 *   packets.c  the thread that stands for the GPU: works through queues
 *   smi.c      the stream of events
 *   kfd.c      requests on /dev/kfd, and the ioctl() that tells devices apart
 *   drm.c      requests on render nodes
 *   paths.c    the path and stat families of libc
 *
 * Functions that answer a request return 0 or a positive errno. */
#pragma once
#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>

#include "kfdabi.h"

#define EXPORT __attribute__((visibility("default")))
#define SOFT_KFD_PROC "/sys/devices/virtual/kfd/kfd/proc"
#define FIRST_GFX9_TARGET 90000 /* of gfx_target_version */
#define FIRST_GFX10_TARGET 100000 /* from here on CUs come in pairs */
#define SOFT_MAX_GPUS 64 /* the DRM minors that the simulated machine has at most */

/* ---------------------------------------------------------------------------------------------------------- root.c */

/* One KFD GPU node, as its line of gpus.conf says; clocks in kHz. An entry stays where it is for as long as its gpu_id is
 * in that file: queues point to it. */
struct soft_gpu {
  uint32_t gpu_id, minor, card, node, device_id, rev, family, ses, sa_per_se, cus, vram_type, width, sclk, mclk,
      counter_khz, wave, gfx;
  uint64_t vram, gtt;   /* bytes */
  char device[160];     /* sysfs folder of the PCI function, from the root: "/sys/devices/…"; partitions share it */
  ino_t ino, card_ino;  /* of renderD<minor> and card<card> below the root; 0: not there */
  bool gone;            /* a partition of another mode than the present one: the entry is free */
  bool claimed;         /* this process is known to have the GPU open */
  bool shown;           /* and kfd/proc says so */
};
extern struct soft_gpu soft_gpus[SOFT_MAX_GPUS];
extern int soft_gpu_count;

/* strtoull (and so atoi and its kin) by the name that all releases of glibc have: with the headers of 2.38 it gets another, and a container with an
 * older libc could not load the library. */
unsigned long long soft_number(const char *text, char **end, int base) __asm__("strtoull");

extern char soft_root[PATH_MAX]; /* no '/' at its end; empty: no simulated machine, and the library does nothing */
extern size_t soft_root_length;
extern dev_t soft_dev;           /* the file system the root is on */
extern ino_t soft_kfd_ino;
extern bool soft_redirects_dev;  /* /dev/kfd and /dev/dri mean the root's; false where they are mounted (a container) */

void soft_init(void);      /* cheap after the first call; every exported function calls it */
void soft_load_gpus(void); /* before soft_gpus is used; most processes never do */
void soft_reload_gpus(void); /* the same, and see what a partition switch has changed since */
struct soft_gpu *soft_gpu_by_id(uint32_t gpu_id);
bool soft_admits(const struct soft_gpu *g); /* the device cgroup of this process lets it have the GPU */
int soft_open(const char *path, int flags);             /* past our own open(); close-on-exec, mode 0666 whatever the umask */
void soft_put(const char *path_from_root, uint64_t n);  /* a sysfs figure */
void soft_put_folder(const char *path_from_root);
bool soft_home_pids(void); /* this process's pid means the same to whoever made the root */
void soft_log(const char *format, ...) __attribute__((format(printf, 1, 2))); /* the inside of a JSON object */
int soft_refusal(const char *op); /* errno that SOFTKFD_FAIL wants for this request; 0: none */
int soft_errno_of(const char *name);

/* -------------------------------------------------------------------------------------------------------- memory.c */

void soft_reap(void);
void soft_claim(struct soft_gpu *only); /* write down that this process has the GPU open; NULL: all that it may have */
int soft_alloc(struct kfd_ioctl_alloc_memory_of_gpu_args *a);
int soft_free(uint64_t handle);
int soft_available(struct kfd_ioctl_get_available_memory_args *a);
int soft_dmabuf_info(struct kfd_ioctl_get_dmabuf_info_args *a);
int soft_import_dmabuf(struct kfd_ioctl_import_dmabuf_args *a);
int soft_export_dmabuf(struct kfd_ioctl_export_dmabuf_args *a);
int soft_ipc_export(struct kfd_ioctl_ipc_export_args *a);
int soft_ipc_import(struct kfd_ioctl_ipc_import_args *a);
int soft_gem_create(struct soft_gpu *g, union drm_amdgpu_gem_create *a);
int soft_gem_close(uint32_t handle);
int soft_gem_of_fd(int fd, uint32_t *handle);
int soft_gem_to_fd(uint32_t handle, int *fd);
int soft_gem_offset(uint32_t handle, uint64_t *offset);
int soft_gem_size(uint32_t handle, uint64_t *size);
int soft_gem_va(const struct drm_amdgpu_gem_va *a);
void soft_used(const struct soft_gpu *g, uint64_t *vram, uint64_t *gtt); /* bytes, of all processes */
void *soft_gpu_pointer(uint64_t va, uint64_t length); /* where this process can touch a GPU address; NULL: a fault */
int soft_process_folder(char *path, size_t size); /* what kfd/proc shows of this process, from the root; its length */
void soft_memory_forget(void); /* in a forked child */

/* -------------------------------------------------------------------------------------------------------- queues.c */

#define SOFT_MAX_QUEUES 1024
struct soft_queue {
  int used, type;
  struct soft_gpu *gpu;
  uint64_t ring, size, rptr_addr, wptr_addr, rptr;
  uint32_t percentage; /* 0: off the hardware until an update says otherwise */
};
extern struct soft_queue soft_queues[SOFT_MAX_QUEUES];
void soft_queues_lock(void);
void soft_queues_unlock(void);
int soft_create_queue(struct kfd_ioctl_create_queue_args *a);
int soft_destroy_queue(uint32_t queue_id);
int soft_update_queue(struct kfd_ioctl_update_queue_args *a);
int soft_set_cu_mask(struct kfd_ioctl_set_cu_mask_args *a);
int soft_create_event(struct kfd_ioctl_create_event_args *a);
void soft_destroy_event(uint32_t event_id);
void soft_set_event(uint32_t event_id);
void soft_reset_event(uint32_t event_id);
int soft_wait_events(struct kfd_ioctl_wait_events_args *a);
void soft_queues_forget(void); /* in a forked child */

/* ----------------------------------------------------------------------------------------------------------- smi.c */

int soft_smi_events(struct kfd_ioctl_smi_events_args *a);

/* ------------------------------------------------------------------------------------------------------- packets.c */

void soft_start_worker(void); /* once per process that has queues */
uint64_t soft_gpu_clock(void); /* 100 MHz */

/* ---------------------------------------------------------------------------------------------------- kfd.c, drm.c */

int soft_drm_ioctl(struct soft_gpu *g, bool is_card, unsigned long request, void *arg);
