/* The requests of /dev/kfd that the gate looks into: numbers, sizes and the fields it needs.
 *
 * From the kernel's public interface (include/uapi/linux/kfd_ioctl.h), written anew so that the gate builds whatever
 * headers are installed. Structures only ever grew at their end, so a request is known by type, number, direction and
 * least size, not by its whole word. 'K' is the console's letter too: its requests carry neither direction nor size. */
#ifndef AMDVGPU_KFD_H
#define AMDVGPU_KFD_H

#include <stdint.h>
#include <sys/ioctl.h>

struct kfd_create_queue {
    uint64_t ring_base, write_pointer, read_pointer, doorbell_offset;
    uint32_t ring_bytes, gpu_id, type, percentage, priority, queue_id;
    uint64_t eop_address, eop_bytes, context_address;
    uint32_t context_bytes, control_stack_bytes; /* newer kernels append */
};
struct kfd_destroy_queue { uint32_t queue_id, pad; };
struct kfd_update_queue { uint64_t ring_base; uint32_t queue_id, ring_bytes, percentage, priority; };
struct kfd_set_cu_mask { uint32_t queue_id, bits; uint64_t mask_pointer; };
struct kfd_alloc_memory { uint64_t va, bytes, handle, mmap_offset; uint32_t gpu_id, flags; };
struct kfd_free_memory { uint64_t handle; };
struct kfd_available_memory { uint64_t available; uint32_t gpu_id, pad; };
struct kfd_criu { uint64_t pointers[3], private_bytes; uint32_t counts[3], pid, op; };

#define KFD_CREATE_QUEUE _IOWR('K', 0x02, struct kfd_create_queue)
#define KFD_DESTROY_QUEUE _IOWR('K', 0x03, struct kfd_destroy_queue)
#define KFD_UPDATE_QUEUE _IOW('K', 0x07, struct kfd_update_queue)
#define KFD_ALLOC_MEMORY _IOWR('K', 0x16, struct kfd_alloc_memory)
#define KFD_FREE_MEMORY _IOW('K', 0x17, struct kfd_free_memory)
#define KFD_SET_CU_MASK _IOW('K', 0x1a, struct kfd_set_cu_mask)
#define KFD_CRIU _IOWR('K', 0x22, struct kfd_criu)
#define KFD_CRIU_RESTORE 3
#define KFD_CREATE_PROCESS _IO('K', 0x27) /* the one without direction or size; the console has no such number */
#define KFD_AVAILABLE_MEMORY _IOWR('K', 0x23, struct kfd_available_memory)

#ifndef _IOC_DIR /* musl's <sys/ioctl.h> puts requests together and takes none apart; as asm-generic/ioctl.h has it */
#define _IOC_DIR(request) ((request) >> 30 & 3)
#define _IOC_SIZE(request) ((request) >> 16 & 0x3fff)
#endif

/* Whether `request` is `known` or a longer form of it. */
static inline int kfd_is(unsigned long request, unsigned long known) {
    return _IOC_DIR(request) == _IOC_DIR(known) && _IOC_SIZE(request) >= _IOC_SIZE(known);
}

#define KFD_MEMORY_VRAM (1u << 0)
#define KFD_MEMORY_GTT (1u << 1)
#define KFD_MEMORY_PUBLIC (1u << 29)
#define KFD_MEMORY_EXECUTABLE (1u << 30)

/* Types 1 and 3 and whatever came later are SDMA; the compute slice and priorities are not for them. */
static inline int kfd_is_compute(uint32_t type) { return type == 0 || type == 2; }

_Static_assert(sizeof(struct kfd_create_queue) == 88, "as in kernels before 6.16");
_Static_assert(sizeof(struct kfd_update_queue) == 24, "kfd_ioctl_update_queue_args");
_Static_assert(sizeof(struct kfd_set_cu_mask) == 16, "kfd_ioctl_set_cu_mask_args");
_Static_assert(sizeof(struct kfd_alloc_memory) == 40, "kfd_ioctl_alloc_memory_of_gpu_args");
_Static_assert(sizeof(struct kfd_available_memory) == 16, "kfd_ioctl_get_available_memory_args");

#endif
