/* Requests on /dev/kfd, and the ioctl() in front of libc's that finds out whether a descriptor is a simulated device.
 *
 * Devices are told by inode, so dup, fork, SCM_RIGHTS, close and mmap need no tracking. What does need it is who opened
 * /dev/kfd: the driver refuses every request on a descriptor that another process opened. The opener's pid is kept where
 * the kernel keeps one for each open file anyway, as its SIGIO owner: shared by dup and fork, translated between pid
 * namespaces, gone when the process is. */
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "devices.h"
#include "softkfd.h"

#define KFD_MINOR_VERSION 17

static uint64_t clock_ns(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static int get_apertures(struct kfd_ioctl_get_process_apertures_new_args *a) {
  struct kfd_process_device_apertures *p = (void *)a->kfd_process_device_apertures_ptr;
  soft_reload_gpus();
  uint32_t n = 0;
  for (int i = 0; i < soft_gpu_count; i++) {
    if (soft_gpus[i].gone || (a->num_of_nodes && n == a->num_of_nodes)) continue;
    if (a->num_of_nodes)
      p[n] = (struct kfd_process_device_apertures){.lds_base = 1ull << 48, .lds_limit = (1ull << 48) + 0xffffffff,
                                                 .scratch_base = 2ull << 48, .scratch_limit = (2ull << 48) + 0xffffffff,
                                                 .gpuvm_base = 0x10000, .gpuvm_limit = (1ull << 47) - 1,
                                                 .gpu_id = soft_gpus[i].gpu_id};
    n++;
  }
  a->num_of_nodes = n;
  return 0;
}

/* Nothing migrates: memory has no preferred place and no GPU has access, which user space takes for "not set". */
static int svm(struct kfd_ioctl_svm_args *a) {
  soft_log("\"op\":\"SVM\",\"set\":%d,\"start\":\"%llx\",\"size\":%llu,\"nattr\":%u", a->op == KFD_IOCTL_SVM_OP_SET_ATTR,
           (unsigned long long)a->start_addr, (unsigned long long)a->size, a->nattr);
  for (uint32_t i = 0; a->op == KFD_IOCTL_SVM_OP_GET_ATTR && i < a->nattr; i++)
    if (a->attrs[i].type <= KFD_IOCTL_SVM_ATTR_PREFETCH_LOC) a->attrs[i].value = KFD_IOCTL_SVM_LOCATION_UNDEFINED;
    else if (a->attrs[i].type == KFD_IOCTL_SVM_ATTR_ACCESS) a->attrs[i].type = KFD_IOCTL_SVM_ATTR_NO_ACCESS;
  return 0;
}

static int get_version(struct kfd_ioctl_get_version_args *a) {
  const char *minor = getenv("SOFTKFD_KFD_MINOR");
  soft_reap();
  a->major_version = 1;
  a->minor_version = minor ? (int)soft_number(minor, NULL, 10) : KFD_MINOR_VERSION;
  soft_log("\"op\":\"GET_VERSION\",\"minor\":%u", a->minor_version);
  return 0;
}

static int kfd_ioctl(unsigned long request, void *arg) {
  switch (_IOC_NR(request)) {
  case 0x01: return get_version(arg);
  case 0x02: return soft_create_queue(arg);
  case 0x03: return soft_destroy_queue(((struct kfd_ioctl_destroy_queue_args *)arg)->queue_id);
  case 0x05: {
    struct kfd_ioctl_get_clock_counters_args *a = arg;
    a->gpu_clock_counter = soft_gpu_clock();
    a->cpu_clock_counter = clock_ns(CLOCK_MONOTONIC_RAW);
    a->system_clock_counter = clock_ns(CLOCK_BOOTTIME);
    a->system_clock_freq = 1000000000;
    return 0;
  }
  case 0x07: return soft_update_queue(arg);
  case 0x08: return soft_create_event(arg);
  case 0x09: soft_destroy_event(((struct kfd_ioctl_destroy_event_args *)arg)->event_id); return 0;
  case 0x0a: soft_set_event(((struct kfd_ioctl_set_event_args *)arg)->event_id); return 0;
  case 0x0b: soft_reset_event(((struct kfd_ioctl_reset_event_args *)arg)->event_id); return 0;
  case 0x0c: return soft_wait_events(arg);
  case 0x12: {
    struct kfd_ioctl_get_tile_config_args *a = arg;
    a->num_tile_configs = a->num_macro_tile_configs = 0;
    a->gb_addr_config = 0x2a110002, a->num_banks = 16, a->num_ranks = 1;
    return 0;
  }
  case 0x14: return get_apertures(arg);
  case 0x16: return soft_alloc(arg);
  case 0x17: return soft_free(((struct kfd_ioctl_free_memory_of_gpu_args *)arg)->handle);
  case 0x18: {
    struct kfd_ioctl_map_memory_to_gpu_args *a = arg;
    a->n_success = a->n_devices;
    return 0;
  }
  case 0x19: {
    struct kfd_ioctl_unmap_memory_from_gpu_args *a = arg;
    a->n_success = a->n_devices;
    return 0;
  }
  case 0x1a: return soft_set_cu_mask(arg);
  case 0x1c: return soft_dmabuf_info(arg);
  case 0x1d: return soft_import_dmabuf(arg);
  case 0x1f: return soft_smi_events(arg);
  case 0x20: return svm(arg);
  case 0x21: ((struct kfd_ioctl_set_xnack_mode_args *)arg)->xnack_enabled = 0; return 0;
  case 0x23: return soft_available(arg);
  case 0x24: return soft_export_dmabuf(arg);
  case 0x25: ((struct kfd_ioctl_runtime_enable_args *)arg)->capabilities_mask = 0; return 0;
  case 0x04: /* SET_MEMORY_POLICY */
  case 0x11: /* SET_SCRATCH_BACKING_VA */
  case 0x13: /* SET_TRAP_HANDLER */
  case 0x15: /* ACQUIRE_VM */
  case 0x1e: /* ALLOC_QUEUE_GWS */
    soft_log("\"op\":\"KFD_OK\",\"nr\":\"0x%lx\"", (unsigned long)_IOC_NR(request));
    return 0;
  case 0x80: return soft_ipc_import(arg);
  case 0x81: return getenv("SOFTKFD_NO_IPC") ? ENOTTY : soft_ipc_export(arg);
  default: soft_log("\"op\":\"KFD_UNHANDLED\",\"nr\":\"0x%lx\"", (unsigned long)_IOC_NR(request)); return EINVAL;
  }
}

/* The driver gives a process a context on each GPU that its device cgroup admits, at its first open and until it ends;
 * and while there is one, the GPU cannot be partitioned anew. */
void soft_opened_kfd(int fd) {
  syscall(SYS_fcntl, fd, F_SETOWN, getpid());
  soft_claim(NULL);
}

static bool opened_by_us(int fd) { return syscall(SYS_fcntl, fd, F_GETOWN, 0) == getpid(); }

enum soft_device soft_device_of_inode(dev_t dev, ino_t ino, struct soft_gpu **g) {
  if (!soft_root[0] || dev != soft_dev) return SOFT_NONE;
  if (ino == soft_kfd_ino) return SOFT_KFD;
  soft_load_gpus();
  for (int i = 0; i < soft_gpu_count; i++) {
    if (soft_gpus[i].gone) continue;
    *g = &soft_gpus[i];
    if (ino == soft_gpus[i].ino) return SOFT_RENDER;
    if (ino == soft_gpus[i].card_ino) return SOFT_CARD;
  }
  return SOFT_NONE;
}

static void after_fork(void) {
  soft_memory_forget();
  soft_queues_forget();
}
__attribute__((constructor)) static void constructor(void) { pthread_atfork(NULL, NULL, after_fork); }

EXPORT int ioctl(int fd, unsigned long request, ...) {
  va_list arguments;
  va_start(arguments, request);
  void *arg = va_arg(arguments, void *);
  va_end(arguments);
  struct soft_gpu *g = NULL;
  struct stat st;
  int error;
  soft_init();
  /* 'K' is the console's letter too, hence the look at the inode before anything is answered. */
  if (!soft_root[0] || (_IOC_TYPE(request) != 'K' && _IOC_TYPE(request) != 'd') ||
      syscall(SYS_newfstatat, fd, "", &st, AT_EMPTY_PATH))
    return syscall(SYS_ioctl, fd, request, arg);
  soft_reload_gpus();
  enum soft_device device = soft_device_of_inode(st.st_dev, st.st_ino, &g);
  switch (device) {
  case SOFT_NONE: return syscall(SYS_ioctl, fd, request, arg);
  case SOFT_KFD:
    if (_IOC_TYPE(request) != 'K') error = ENOTTY;
    else error = opened_by_us(fd) ? kfd_ioctl(request, arg) : EBADF;
    break;
  default: error = _IOC_TYPE(request) == 'd' ? soft_drm_ioctl(g, device == SOFT_CARD, request, arg) : ENOTTY;
  }
  if (getenv("SOFTKFD_TRACE"))
    soft_log("\"op\":\"TRACE\",\"dev\":\"%s\",\"nr\":\"0x%02lx\",\"err\":%d", device == SOFT_KFD ? "kfd" : "drm",
             (unsigned long)_IOC_NR(request), error);
  if (!error) return 0;
  errno = error;
  return -1;
}
