/* Render nodes: what Vulkan, OpenGL and VA-API take of a slice's VRAM, and what SMI tools are told.
 *
 * From the kernel's public interface (include/uapi/drm/drm.h, amdgpu_drm.h), written anew as in kfd.h. Other drivers use
 * the same numbers for requests of their own, so a request counts as amdgpu's by type, number, direction, least size and
 * what it says in it; only one that looks like ours costs a look at the file it was made on. */
#ifndef AMDVGPU_DRM_H
#define AMDVGPU_DRM_H

#include "memory.h"

struct drm_gem_create { uint64_t bytes, alignment, domains, flags; }; /* answered with the handle in the first 32 bits */
struct drm_gem_close { uint32_t handle, pad; };
struct drm_info { uint64_t pointer; uint32_t bytes, query, more[4]; };
struct drm_user_queue { uint32_t op, queue_id, ip_type; };

#define DRM_GEM_CLOSE _IOW('d', 0x09, struct drm_gem_close)
#define DRM_GEM_CREATE _IOWR('d', 0x40, struct drm_gem_create)
#define DRM_INFO _IOW('d', 0x45, struct drm_info)
#define DRM_USER_QUEUE _IOWR('d', 0x56, struct drm_user_queue)

#define DRM_DOMAIN_GTT 2ULL
#define DRM_DOMAIN_VRAM 4ULL
#define DRM_DOMAINS 0xffULL

_Static_assert(sizeof(struct drm_gem_create) == 32, "union drm_amdgpu_gem_create");
_Static_assert(sizeof(struct drm_info) == 32, "struct drm_amdgpu_info");

int avg_gem_create(int fd, unsigned long request, struct drm_gem_create *asked, avg_request *next);
int avg_gem_close(int fd, unsigned long request, struct drm_gem_close *asked, avg_request *next);
int avg_drm_info(int fd, unsigned long request, struct drm_info *asked, avg_request *next);
int avg_user_queue(int fd, unsigned long request, struct drm_user_queue *asked, avg_request *next);

/* What a file of the driver's that tells of VRAM should say instead of `value`; `value` where no slice covers the GPU.
 * `path` as it was opened: .../device/mem_info_vram_total and its kin. */
uint64_t avg_memory_file_value(const char *path, uint64_t value);

/* Whether `path` is such a file. */
int avg_is_memory_file(const char *path);

#endif
