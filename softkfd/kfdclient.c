/* Asks a KFD for memory, as ROCm would, and prints each answer as a line of JSON. Needs no ROCm; speaks to a real or a
 * simulated /dev/kfd, through whatever stands in front of libc's open, fopen and ioctl.
 *
 *   --gpu N       the Nth GPU that this process may open, in KFD order (0)
 *   --step BYTES  how much to ask for at a time (1 GiB); K, M, G for powers of 1024
 *   --count N     how often (until refused)
 *   --free        give everything back before the end
 *   --hold        then wait for a line on standard input (or its end), or for a signal
 *   --queue       create a compute queue first
 *   --priority N  of that queue (7)
 *   --mask HEX    and set this CU mask on it (bit 0 is the last)
 *
 * Exit status: 0 the last request was granted or was refused with ENOMEM after others were granted, 1 something else was
 * refused, 2 wrong use, 3 no such GPU. */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "src/kfdabi.h"

#define TOPOLOGY "/sys/devices/virtual/kfd/kfd/topology/nodes"
#define MAX_NODES 128
#define MAX_BUFFERS 4096
#define FLAGS_WRITABLE 0x80000000u
#define FLAGS_EXECUTABLE 0x40000000u
#define FLAGS_PUBLIC 0x20000000u
#define FLAGS_NO_SUBSTITUTE 0x10000000u
#define HIPMALLOC_FLAGS (FLAGS_WRITABLE | FLAGS_PUBLIC | FLAGS_NO_SUBSTITUTE | KFD_IOC_ALLOC_MEM_FLAGS_VRAM)

struct acquire_vm_args { u32 drm_fd, gpu_id; };
#define IOC_GET_VERSION _IOR('K', 0x01, struct kfd_ioctl_get_version_args)
#define IOC_UPDATE_QUEUE _IOW('K', 0x07, struct kfd_ioctl_update_queue_args)
#define IOC_ACQUIRE_VM _IOW('K', 0x15, struct acquire_vm_args)

struct gpu {
  unsigned node, gpu_id, minor;
  u64 total; /* bytes, as the memory bank says */
  int drm_fd;
};

static u64 number_in(const char *path, const char *key) {
  char line[256], name[64];
  u64 value = 0, found = 0;
  FILE *f = fopen(path, "re");
  if (!f) return 0;
  while (fgets(line, sizeof line, f)) {
    if (!key) found = strtoull(line, NULL, 10);
    else if (sscanf(line, "%63s %lu", name, &value) == 2 && !strcmp(name, key)) found = value;
  }
  fclose(f);
  return found;
}

/* The node's memory and, if this process may have it, its render node: what a container was not given is passed over. */
static bool open_gpu(unsigned node, struct gpu *g) {
  char path[128];
  snprintf(path, sizeof path, TOPOLOGY "/%u/gpu_id", node);
  *g = (struct gpu){.node = node, .gpu_id = number_in(path, NULL), .drm_fd = -1};
  if (!g->gpu_id) return false;
  snprintf(path, sizeof path, TOPOLOGY "/%u/properties", node);
  g->minor = number_in(path, "drm_render_minor");
  snprintf(path, sizeof path, TOPOLOGY "/%u/mem_banks/0/properties", node);
  g->total = number_in(path, "size_in_bytes");
  snprintf(path, sizeof path, "/dev/dri/renderD%u", g->minor);
  g->drm_fd = open(path, O_RDWR | O_CLOEXEC);
  return g->drm_fd >= 0;
}

static const char *say(int result) { return result ? strerrorname_np(errno) : "ok"; }

static u64 available(int kfd, const struct gpu *g) {
  struct kfd_ioctl_get_available_memory_args a = {.gpu_id = g->gpu_id};
  return ioctl(kfd, AMDKFD_IOC_AVAILABLE_MEMORY, &a) ? 0 : a.available;
}

static int make_queue(int kfd, const struct gpu *g, unsigned priority, const char *hex) {
  static _Alignas(4096) char ring[4096];
  static u64 pointers[2];
  u32 mask[32] = {0};
  struct kfd_ioctl_create_queue_args q = {.ring_base_address = (u64)ring, .ring_size = sizeof ring,
                                          .write_pointer_address = (u64)&pointers[0],
                                          .read_pointer_address = (u64)&pointers[1], .gpu_id = g->gpu_id,
                                          .queue_type = KFD_IOC_QUEUE_TYPE_COMPUTE_AQL, .queue_percentage = 100,
                                          .queue_priority = priority};
  int result = ioctl(kfd, AMDKFD_IOC_CREATE_QUEUE, &q);
  printf("{\"op\":\"queue\",\"result\":\"%s\",\"queue\":%u}\n", say(result), q.queue_id);
  if (result || !hex) return result;
  size_t digits = strlen(hex), words = (digits + 7) / 8;
  if (words > sizeof mask / sizeof *mask) words = sizeof mask / sizeof *mask;
  for (size_t i = 0; i < digits && i / 8 < words; i++) {
    char digit[2] = {hex[digits - 1 - i], 0};
    mask[i / 8] |= (u32)strtoul(digit, NULL, 16) << i % 8 * 4;
  }
  struct kfd_ioctl_set_cu_mask_args m = {.queue_id = q.queue_id, .num_cu_mask = 32 * words, .cu_mask_ptr = (u64)mask};
  result = ioctl(kfd, AMDKFD_IOC_SET_CU_MASK, &m);
  printf("{\"op\":\"mask\",\"result\":\"%s\",\"bits\":%zu}\n", say(result), 32 * words);
  return result;
}

static u64 size_of(const char *text) {
  char *end;
  u64 n = strtoull(text, &end, 0);
  switch (*end) {
  case 'T': n <<= 10; /* fall through */
  case 'G': n <<= 10; /* fall through */
  case 'M': n <<= 10; /* fall through */
  case 'K': n <<= 10;
  }
  return n;
}

int main(int argc, char **argv) {
  static const struct option options[] = {{"gpu", 1, 0, 'g'}, {"step", 1, 0, 's'}, {"count", 1, 0, 'n'}, {"free", 0, 0, 'f'},
                                          {"hold", 0, 0, 'h'}, {"queue", 0, 0, 'q'}, {"priority", 1, 0, 'p'},
                                          {"mask", 1, 0, 'm'}, {0}};
  static u64 handles[MAX_BUFFERS];
  unsigned wanted = 0, priority = 7, granted = 0;
  long count = -1;
  u64 step = 1ull << 30, total = 0;
  bool give_back = false, hold = false, queue = false;
  const char *mask = NULL;
  for (int o; (o = getopt_long(argc, argv, "", options, NULL)) != -1;) switch (o) {
    case 'g': wanted = strtoul(optarg, NULL, 0); break;
    case 's': step = size_of(optarg); break;
    case 'n': count = strtol(optarg, NULL, 0); break;
    case 'f': give_back = true; break;
    case 'h': hold = true; break;
    case 'q': queue = true; break;
    case 'p': queue = true, priority = strtoul(optarg, NULL, 0); break;
    case 'm': queue = true, mask = optarg; break;
    default: return 2;
    }
  if (optind < argc || !step) return fprintf(stderr, "kfdclient: what it takes is written at the head of its source\n"), 2;
  setvbuf(stdout, NULL, _IOLBF, 0);

  int kfd = open("/dev/kfd", O_RDWR | O_CLOEXEC);
  if (kfd < 0) return printf("{\"op\":\"open\",\"result\":\"%s\"}\n", say(-1)), 3;
  struct kfd_ioctl_get_version_args version = {0};
  int result = ioctl(kfd, IOC_GET_VERSION, &version);
  printf("{\"op\":\"open\",\"result\":\"%s\",\"version\":\"%u.%u\"}\n", say(result), version.major_version,
         version.minor_version);
  if (result) return 1;
  struct gpu gpu = {.drm_fd = -1};
  unsigned index = 0;
  for (unsigned node = 0; node < MAX_NODES; node++) {
    struct gpu g;
    if (!open_gpu(node, &g)) continue;
    printf("{\"op\":\"gpu\",\"index\":%u,\"node\":%u,\"gpu_id\":%u,\"minor\":%u,\"total\":%lu,\"available\":%lu}\n", index,
           g.node, g.gpu_id, g.minor, g.total, available(kfd, &g));
    if (index++ == wanted) gpu = g;
    else close(g.drm_fd);
  }
  if (gpu.drm_fd < 0) return printf("{\"op\":\"end\",\"result\":\"no such GPU\",\"index\":%u}\n", wanted), 3;
  struct acquire_vm_args vm = {.drm_fd = gpu.drm_fd, .gpu_id = gpu.gpu_id};
  result = ioctl(kfd, IOC_ACQUIRE_VM, &vm);
  printf("{\"op\":\"acquire_vm\",\"result\":\"%s\"}\n", say(result));
  if (result) return 1;
  if (queue && make_queue(kfd, &gpu, priority, mask)) return 1;

  result = 0;
  for (long i = 0; i != count && granted < MAX_BUFFERS && !result; i++) {
    /* Addresses are ours to choose; nothing is mapped there on the CPU. */
    void *va = mmap(NULL, step, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    struct kfd_ioctl_alloc_memory_of_gpu_args a = {.va_addr = va == MAP_FAILED ? 0 : (u64)va, .size = step,
                                                   .gpu_id = gpu.gpu_id, .flags = HIPMALLOC_FLAGS};
    result = ioctl(kfd, AMDKFD_IOC_ALLOC_MEMORY_OF_GPU, &a);
    const char *answer = say(result);
    int error = errno;
    if (!result) handles[granted++] = a.handle, total += step;
    printf("{\"op\":\"alloc\",\"size\":%lu,\"result\":\"%s\",\"held\":%lu,\"available\":%lu}\n", step, answer, total,
           available(kfd, &gpu));
    errno = error;
  }
  bool expected = !result || (errno == ENOMEM && granted);
  if (hold) {
    char line[64];
    printf("{\"op\":\"hold\",\"held\":%lu}\n", total);
    char *ignored = fgets(line, sizeof line, stdin);
    (void)ignored;
  }
  for (unsigned i = 0; give_back && i < granted; i++) {
    struct kfd_ioctl_free_memory_of_gpu_args f = {.handle = handles[i]};
    if (ioctl(kfd, AMDKFD_IOC_FREE_MEMORY_OF_GPU, &f)) expected = false;
    else total -= step;
  }
  printf("{\"op\":\"end\",\"granted\":%u,\"held\":%lu,\"available\":%lu}\n", granted, total, available(kfd, &gpu));
  return expected ? 0 : 1;
}
