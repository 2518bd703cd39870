/* Memory of the simulated GPUs: one table of buffers in a file that all processes map, in whatever container they are.
 *
 * VRAM of a GPU is its sparse file dev/dri/renderD<minor> and a buffer's mmap offset is its offset there, so mmap() on
 * the device needs no help from us, and processes share a buffer as they would on hardware.
 *
 * An owner is not a pid but a random token whose lock file (procs/<token>) its process keeps locked: the lock ends with
 * the process however that ends, and means the same in every pid namespace. Nothing is freed in a destructor (ours runs
 * before ROCr's, whose queues still live): whoever comes next clears up after the dead. */
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "softkfd.h"

#define MAX_BUFFERS 32768
#define GTT_BASE (1ull << 40) /* where GTT begins in a renderD file */
#define VRAM_BASE (2ull << 20) /* not 0: mmap offset 0 means "no CPU mapping" to ROCr's IPC imports */
#define VRAM_RESERVED (64ull << 20) /* page tables and such; a guess, the driver's figure varies */
#define ALIGN_UP(x, a) (((x) + (a) - 1) & ~((uint64_t)(a) - 1))

enum { FREE_SLOT = 0, OWNS_MEMORY = 1, ALIAS = 2 /* an import, or a GEM_VA mapping: charged to nobody */ };

/* Written by whoever holds the lock on the file. All-zero is an empty table. */
struct buffer {
  uint64_t handle, va, size, offset;
  uint64_t dmabuf_ino; /* of the memfd that stands for it, once exported */
  uint32_t owner, gpu, flags, state; /* gpu: gpu_id, as entries of soft_gpus differ from process to process once a GPU was
                                      * partitioned anew; flags: KFD_IOC_ALLOC_MEM_FLAGS_* */
};
struct table {
  uint64_t count; /* slots that were ever used */
  struct buffer buffer[MAX_BUFFERS];
};
_Static_assert(sizeof(struct table) <= 8 << 20, "the state file of the simulated root is 8 MiB");

static struct table *table;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int table_fd = -1; /* open while locked */
static int owner_fd = -1; /* holds our token's lock for as long as we live */
static uint32_t owner;
static bool in_kfd; /* we have opened /dev/kfd: kfd/proc shows us until we end, whatever we close */

static bool is_vram(const struct buffer *b) { return b->flags & KFD_IOC_ALLOC_MEM_FLAGS_VRAM; }
static bool is_gtt(const struct buffer *b) { return b->flags & KFD_IOC_ALLOC_MEM_FLAGS_GTT; }

static void owner_path(uint32_t o, char *path) { snprintf(path, PATH_MAX, "%s/procs/%08x", soft_root, o); }

static void become_owner(void) {
  char path[PATH_MAX], text[32];
  do {
    owner = syscall(SYS_getrandom, &owner, sizeof owner, 0) == sizeof owner ? owner | 1 : (uint32_t)getpid();
    owner_path(owner, path);
    owner_fd = soft_open(path, O_RDWR | O_CREAT | O_EXCL);
  } while (owner_fd < 0 && errno == EEXIST);
  flock(owner_fd, LOCK_EX);
  int n = snprintf(text, sizeof text, "%d\n", soft_home_pids() ? getpid() : 0);
  ssize_t ignored = write(owner_fd, text, n);
  (void)ignored;
}

/* False: the table cannot be had or is nonsense (anybody may write it), and every request for memory is refused. */
static bool lock(void) {
  char path[PATH_MAX];
  pthread_mutex_lock(&mutex);
  snprintf(path, sizeof path, "%s/state", soft_root);
  if (!table) {
    /* By a descriptor of its own: a mapping keeps its open file, and with it a lock, for as long as any child lives. */
    int fd = soft_open(path, O_RDWR);
    void *p = mmap(NULL, sizeof *table, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    table = p == MAP_FAILED ? NULL : p;
    if (fd >= 0) close(fd);
  }
  table_fd = soft_open(path, O_RDWR);
  if (!table || table_fd < 0 || table->count > MAX_BUFFERS) {
    if (table_fd >= 0) close(table_fd);
    table_fd = -1;
    pthread_mutex_unlock(&mutex);
    return false;
  }
  flock(table_fd, LOCK_EX);
  soft_reload_gpus(); /* now: whoever partitions a GPU anew holds the lock too */
  if (owner_fd < 0) become_owner();
  return true;
}

static void unlock(void) {
  flock(table_fd, LOCK_UN); /* not by close alone: a child forked meanwhile has the descriptor too */
  close(table_fd);
  table_fd = -1;
  pthread_mutex_unlock(&mutex);
}

/* A forked child is a new KFD process: it must neither share nor keep alive the parent's locks. */
void soft_memory_forget(void) {
  if (table_fd >= 0) close(table_fd);
  if (owner_fd >= 0) close(owner_fd);
  table_fd = owner_fd = -1;
  in_kfd = false;
  for (int i = 0; i < soft_gpu_count; i++) soft_gpus[i].claimed = soft_gpus[i].shown = false;
  pthread_mutex_init(&mutex, NULL);
}

/* ------------------------------------------------------------------------------------------------------ accounting */

/* who 0: all processes; else what that one has by the KFD. charged: as the driver charges VRAM, in steps of 2 MiB. */
static uint64_t used_locked(uint32_t gpu, uint32_t pool, uint32_t who, bool charged) {
  uint64_t sum = 0;
  for (uint64_t i = 0; i < table->count; i++) {
    const struct buffer *b = &table->buffer[i];
    if (b->state == OWNS_MEMORY && b->gpu == gpu && b->flags & pool && (!who || (b->owner == who && b->handle)))
      sum += ALIGN_UP(b->size, charged ? 2u << 20 : 4096u);
  }
  return sum;
}

void soft_used(const struct soft_gpu *g, uint64_t *vram, uint64_t *gtt) {
  *vram = *gtt = 0;
  if (!lock()) return;
  *vram = used_locked(g->gpu_id, KFD_IOC_ALLOC_MEM_FLAGS_VRAM, 0, false);
  *gtt = used_locked(g->gpu_id, KFD_IOC_ALLOC_MEM_FLAGS_GTT, 0, false);
  unlock();
}

/* The device's figures are of the whole device, also where it is partitioned, and so is used_memory of each node. */
static void publish_device_locked(const char *device) {
  char path[256];
  uint64_t vram = 0, gtt = 0;
  for (int i = 0; i < soft_gpu_count; i++)
    if (!soft_gpus[i].gone && !strcmp(soft_gpus[i].device, device)) {
      vram += used_locked(soft_gpus[i].gpu_id, KFD_IOC_ALLOC_MEM_FLAGS_VRAM, 0, false);
      gtt += used_locked(soft_gpus[i].gpu_id, KFD_IOC_ALLOC_MEM_FLAGS_GTT, 0, false);
    }
  snprintf(path, sizeof path, "%s/mem_info_vram_used", device), soft_put(path, vram);
  snprintf(path, sizeof path, "%s/mem_info_gtt_used", device), soft_put(path, gtt);
  for (int i = 0; i < soft_gpu_count; i++)
    if (!soft_gpus[i].gone && !strcmp(soft_gpus[i].device, device)) {
      snprintf(path, sizeof path, "/sys/devices/virtual/kfd/kfd/topology/nodes/%u/mem_banks/0/used_memory",
               soft_gpus[i].node);
      soft_put(path, vram);
    }
}

int soft_process_folder(char *path, size_t size) { return snprintf(path, size, "/processes/%08x", owner); }

static void publish_process_locked(const struct soft_gpu *g) {
  char path[256];
  if (!in_kfd) return; /* a client of the render node only */
  int n = soft_process_folder(path, sizeof path);
  snprintf(path + n, sizeof path - n, "/vram_%u", g->gpu_id);
  soft_put(path, used_locked(g->gpu_id, KFD_IOC_ALLOC_MEM_FLAGS_VRAM, owner, false));
}

/* What kfd/proc shows of us. kfd/proc/<pid> is a link here, as a process in a container does not know its pid on the
 * host: where we cannot make the link ourselves, the simulated driver does, who sees the pid at our token's lock. */
static void enter_kfd_locked(void) {
  char path[256], to[64], from[PATH_MAX];
  if (in_kfd) return;
  in_kfd = true;
  int n = soft_process_folder(path, sizeof path);
  soft_put_folder(path);
  snprintf(path + n, sizeof path - n, "/queues"), soft_put_folder(path);
  snprintf(path + n, sizeof path - n, "/pasid"), soft_put(path, 0); /* what newer kernels print */
  if (!soft_home_pids()) return;
  snprintf(to, sizeof to, "../../../../../../processes/%08x", owner);
  snprintf(from, sizeof from, "%s" SOFT_KFD_PROC "/%d", soft_root, getpid());
  unlink(from); /* of a dead process that had our pid */
  int ignored = symlink(to, from);
  (void)ignored;
}

/* What the driver counts besides memory. Nothing runs here, so the files say 0 until somebody else writes there. */
static void publish_counters_locked(const struct soft_gpu *g) {
  static const char *const counters[] = {"faults", "page_in", "page_out"};
  char path[256];
  int n = soft_process_folder(path, sizeof path), m;
  snprintf(path + n, sizeof path - n, "/sdma_%u", g->gpu_id), soft_put(path, 0);
  m = n + snprintf(path + n, sizeof path - n, "/stats_%u", g->gpu_id);
  soft_put_folder(path);
  snprintf(path + m, sizeof path - m, "/evicted_ms"), soft_put(path, 0);
  snprintf(path + m, sizeof path - m, "/cu_occupancy");
  if (g->gfx >= FIRST_GFX9_TARGET && g->gfx < FIRST_GFX10_TARGET) soft_put(path, 0); /* others do not count it */
  m = n + snprintf(path + n, sizeof path - n, "/counters_%u", g->gpu_id);
  soft_put_folder(path);
  for (size_t i = 0; i < sizeof counters / sizeof *counters; i++)
    snprintf(path + m, sizeof path - m, "/%s", counters[i]), soft_put(path, 0);
}

static struct soft_gpu *gpu_locked(uint32_t gpu_id) { /* NULL: a partition that is no more, with memory of the dead */
  for (int i = 0; i < soft_gpu_count; i++)
    if (!soft_gpus[i].gone && soft_gpus[i].gpu_id == gpu_id) return &soft_gpus[i];
  return NULL;
}

static void publish_locked(uint32_t gpu_id) {
  const struct soft_gpu *g = gpu_locked(gpu_id);
  if (!g) return;
  publish_device_locked(g->device);
  publish_process_locked(g);
}

static void reap_locked(void);

void soft_claim(struct soft_gpu *only) {
  char text[16];
  if (!lock()) return;
  if (!only && !in_kfd) {
    reap_locked(); /* a program that only opens and ends leaves as much as any other */
    enter_kfd_locked();
  }
  for (int i = 0; i < soft_gpu_count; i++) {
    struct soft_gpu *g = &soft_gpus[i];
    if (g->gone || (only ? g != only : !soft_admits(g))) continue;
    int n = snprintf(text, sizeof text, "%u\n", g->gpu_id);
    if (!g->claimed) g->claimed = lseek(owner_fd, 0, SEEK_END) >= 0 && write(owner_fd, text, n) == n;
    if (in_kfd && !g->shown) g->shown = true, publish_process_locked(g), publish_counters_locked(g);
  }
  unlock();
}

/* -------------------------------------------------------------------------------------------------------- the dead */

static int open_memory(uint32_t gpu_id) {
  char path[PATH_MAX];
  const struct soft_gpu *g = gpu_locked(gpu_id);
  if (!g) return -1;
  snprintf(path, sizeof path, "%s/dev/dri/renderD%u", soft_root, g->minor);
  return soft_open(path, O_RDWR);
}

static void drop_locked(struct buffer *b) {
  if (b->state == OWNS_MEMORY && (is_vram(b) || is_gtt(b))) {
    int fd = open_memory(b->gpu);
    if (fd >= 0) {
      fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, b->offset, ALIGN_UP(b->size, 4096));
      close(fd);
    }
  }
  b->state = FREE_SLOT;
}

static void remove_tree(char *path) { /* path: a PATH_MAX buffer, unchanged afterwards */
  int fd = soft_open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  DIR *d = fd < 0 ? NULL : fdopendir(fd);
  if (!d) {
    unlink(path);
    return;
  }
  size_t n = strlen(path);
  for (struct dirent *e; (e = readdir(d));)
    if (e->d_name[0] != '.') {
      snprintf(path + n, PATH_MAX - n, "/%s", e->d_name);
      remove_tree(path);
      path[n] = 0;
    }
  closedir(d);
  rmdir(path);
}

/* The links of kfd/proc to what we have of `dead`, whoever made them. */
static void remove_links(uint32_t dead) {
  char path[PATH_MAX], link[PATH_MAX], name[16];
  snprintf(name, sizeof name, "/%08x", dead);
  int n = snprintf(path, sizeof path, "%s" SOFT_KFD_PROC, soft_root), fd = soft_open(path, O_RDONLY | O_DIRECTORY);
  DIR *d = fd < 0 ? NULL : fdopendir(fd);
  for (struct dirent *e; d && (e = readdir(d));) {
    snprintf(path + n, sizeof path - n, "/%s", e->d_name);
    ssize_t length = syscall(SYS_readlink, path, link, sizeof link - 1);
    if (length < 9) continue;
    link[length] = 0;
    if (!strcmp(link + length - 9, name)) unlink(path);
  }
  if (d) closedir(d);
}

static void clear_up_locked(uint32_t dead) {
  char path[PATH_MAX];
  for (uint64_t i = 0; i < table->count; i++)
    if (table->buffer[i].state && table->buffer[i].owner == dead) drop_locked(&table->buffer[i]);
  remove_links(dead);
  snprintf(path, sizeof path, "%s/processes/%08x", soft_root, dead);
  remove_tree(path);
  owner_path(dead, path);
  unlink(path);
}

static void reap_locked(void) {
  char path[PATH_MAX];
  bool any = false;
  snprintf(path, sizeof path, "%s/procs", soft_root);
  int dir = soft_open(path, O_RDONLY | O_DIRECTORY);
  DIR *d = dir < 0 ? NULL : fdopendir(dir);
  for (struct dirent *e; d && (e = readdir(d));) {
    uint32_t o = soft_number(e->d_name, NULL, 16);
    if (e->d_name[0] == '.' || o == owner) continue;
    owner_path(o, path);
    int fd = soft_open(path, O_RDONLY);
    if (fd >= 0 && !flock(fd, LOCK_EX | LOCK_NB)) {
      clear_up_locked(o);
      any = true;
    }
    if (fd >= 0) close(fd);
  }
  if (d) closedir(d);
  for (int i = 0; any && i < soft_gpu_count; i++)
    if (!soft_gpus[i].gone && (!i || strcmp(soft_gpus[i].device, soft_gpus[i - 1].device)))
      publish_device_locked(soft_gpus[i].device);
}

void soft_reap(void) {
  if (!lock()) return;
  reap_locked();
  unlock();
}

/* ---------------------------------------------------------------------------------------------- allocate and free */

static uint64_t fit_locked(uint32_t gpu, uint64_t base, uint64_t end, uint64_t size) {
  uint64_t at = base;
again:
  for (uint64_t i = 0; i < table->count; i++) {
    const struct buffer *b = &table->buffer[i];
    if (b->state == OWNS_MEMORY && b->gpu == gpu && (is_vram(b) || is_gtt(b)) && b->offset < at + size &&
        at < b->offset + ALIGN_UP(b->size, 4096)) {
      at = ALIGN_UP(b->offset + b->size, 4096);
      goto again;
    }
  }
  return at + size <= end ? at : UINT64_MAX;
}

static struct buffer *free_slot_locked(void) {
  uint64_t i = 0;
  while (i < table->count && table->buffer[i].state) i++;
  if (i >= MAX_BUFFERS) return NULL;
  if (i >= table->count) table->count = i + 1;
  return &table->buffer[i];
}

static uint64_t handle_of(const struct buffer *b) {
  return (uint64_t)b->gpu << 32 | (uint64_t)(b - table->buffer + 1);
}

static struct buffer *by_handle_locked(uint64_t handle) {
  for (uint64_t i = 0; i < table->count; i++) {
    struct buffer *b = &table->buffer[i];
    if (handle && b->state && b->handle == handle && b->owner == owner) return b;
  }
  return NULL;
}

/* by_kfd: FREE_MEMORY_OF_GPU finds it, and kfd/proc counts it as this process's. */
static int take_locked(const struct soft_gpu *g, struct buffer want, bool by_kfd, struct buffer **taken) {
  uint32_t gpu = g->gpu_id;
  reap_locked();
  if (want.size > 1ull << 46) return ENOMEM; /* no sum below can overflow */
  if (is_vram(&want)) {
    if (used_locked(gpu, KFD_IOC_ALLOC_MEM_FLAGS_VRAM, 0, true) + ALIGN_UP(want.size, 2u << 20) >
        g->vram - VRAM_RESERVED)
      return ENOMEM;
    want.offset = fit_locked(gpu, VRAM_BASE, g->vram + VRAM_BASE, ALIGN_UP(want.size, 4096));
  } else if (is_gtt(&want)) {
    /* The driver has one GTT and one system-memory limit for all devices; here each device has its own. */
    if (used_locked(gpu, KFD_IOC_ALLOC_MEM_FLAGS_GTT, 0, false) + ALIGN_UP(want.size, 4096) > g->gtt) return ENOMEM;
    want.offset = fit_locked(gpu, GTT_BASE, GTT_BASE * 2, ALIGN_UP(want.size, 4096));
  }
  if (want.offset == UINT64_MAX) return ENOMEM;
  struct buffer *b = free_slot_locked();
  if (!b) return ENOMEM;
  want.gpu = gpu, want.owner = owner, want.state = OWNS_MEMORY;
  *b = want;
  b->handle = by_kfd ? handle_of(b) : 0;
  if (is_vram(b) || is_gtt(b)) publish_locked(gpu);
  *taken = b;
  return 0;
}

int soft_alloc(struct kfd_ioctl_alloc_memory_of_gpu_args *a) {
  struct soft_gpu *g = soft_gpu_by_id(a->gpu_id);
  struct buffer want = {.va = a->va_addr, .size = a->size, .flags = a->flags}, *b = NULL;
  int error = soft_refusal("ALLOC");
  if (!error && (!g || !a->size)) error = EINVAL;
  if (!error && !lock()) error = ENOMEM;
  else if (!error) {
    if (a->flags & KFD_IOC_ALLOC_MEM_FLAGS_USERPTR) want.offset = a->mmap_offset; /* an address of the process */
    if (a->flags & KFD_IOC_ALLOC_MEM_FLAGS_MMIO_REMAP) want.offset = (8ull << 20) + (g - soft_gpus) * 4096;
    error = take_locked(g, want, true, &b);
    if (!error) {
      a->handle = b->handle;
      if (!(a->flags & KFD_IOC_ALLOC_MEM_FLAGS_USERPTR)) a->mmap_offset = b->offset;
    }
    unlock();
  }
  soft_log("\"op\":\"ALLOC\",\"gpu\":%u,\"size\":%llu,\"flags\":\"%s%s%s%s%s%s%s\",\"word\":\"%08x\",\"va\":\"%llx\",\"err\":%d",
           a->gpu_id, (unsigned long long)a->size, a->flags & 1 ? "VRAM" : "", a->flags & 2 ? "GTT" : "",
           a->flags & 4 ? "USERPTR" : "", a->flags & 8 ? "DOORBELL" : "", a->flags & 16 ? "MMIO" : "",
           a->flags & 1u << 29 ? "+PUBLIC" : "", a->flags & 1u << 30 ? "+EXEC" : "", a->flags,
           (unsigned long long)a->va_addr, error);
  return error;
}

int soft_free(uint64_t handle) {
  uint64_t size = 0;
  uint32_t flags = 0, gpu = 0;
  int error = soft_refusal("FREE");
  if (!error && !lock()) error = EINVAL;
  else if (!error) {
    struct buffer *b = by_handle_locked(handle);
    if (b) {
      gpu = b->gpu;
      size = b->size, flags = b->flags;
      bool counts = b->state == OWNS_MEMORY && (is_vram(b) || is_gtt(b));
      drop_locked(b);
      if (counts) publish_locked(gpu);
    } else error = EINVAL;
    unlock();
  }
  soft_log("\"op\":\"FREE\",\"gpu\":%u,\"handle\":\"%llx\",\"size\":%llu,\"vram\":%u,\"err\":%d", gpu,
           (unsigned long long)handle, (unsigned long long)size, flags & 1, error);
  return error;
}

int soft_available(struct kfd_ioctl_get_available_memory_args *a) {
  struct soft_gpu *g = soft_gpu_by_id(a->gpu_id);
  int error = soft_refusal("AVAILABLE");
  if (error) return error;
  if (!g || !lock()) return EINVAL;
  reap_locked();
  uint64_t used = used_locked(g->gpu_id, KFD_IOC_ALLOC_MEM_FLAGS_VRAM, 0, true) + VRAM_RESERVED;
  unlock();
  a->available = used > g->vram ? 0 : (g->vram - used) & ~((2ull << 20) - 1);
  soft_log("\"op\":\"AVAILABLE\",\"gpu\":%u,\"available\":%llu", a->gpu_id, (unsigned long long)a->available);
  return 0;
}

/* ---------------------------------------------------------------------------------------------- sharing of buffers */

static uint64_t ino_of(int fd) {
  struct stat st;
  return syscall(SYS_newfstatat, fd, "", &st, AT_EMPTY_PATH) ? 0 : st.st_ino;
}

static struct buffer *by_dmabuf_locked(int fd) { /* of any process */
  uint64_t ino = ino_of(fd);
  for (uint64_t i = 0; ino && i < table->count; i++)
    if (table->buffer[i].state == OWNS_MEMORY && table->buffer[i].dmabuf_ino == ino) return &table->buffer[i];
  return NULL;
}

static int export_locked(struct buffer *b) {
  int fd = syscall(SYS_memfd_create, "softkfd-dmabuf", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, b->size)) return fd;
  b->dmabuf_ino = ino_of(fd);
  return fd;
}

static int alias_locked(uint32_t gpu, const struct buffer *of, uint64_t va, uint64_t offset, uint64_t size,
                        uint64_t *handle) {
  struct buffer alias = *of, *b = free_slot_locked();
  if (!b) return ENOMEM;
  alias.gpu = gpu, alias.va = va, alias.offset = offset, alias.size = size;
  alias.owner = owner, alias.state = ALIAS, alias.dmabuf_ino = 0;
  *b = alias;
  b->handle = handle_of(b);
  if (handle) *handle = b->handle;
  return 0;
}

int soft_dmabuf_info(struct kfd_ioctl_get_dmabuf_info_args *a) {
  if (!lock()) return EINVAL;
  struct buffer *b = by_dmabuf_locked(a->dmabuf_fd);
  if (b) a->size = b->size, a->gpu_id = b->gpu, a->flags = b->flags, a->metadata_size = 0;
  unlock();
  soft_log("\"op\":\"DMABUF_INFO\",\"found\":%d", b != NULL);
  return b ? 0 : EINVAL;
}

int soft_import_dmabuf(struct kfd_ioctl_import_dmabuf_args *a) {
  struct soft_gpu *g = soft_gpu_by_id(a->gpu_id);
  int error = EINVAL;
  if (!lock()) return EINVAL;
  struct buffer *b = by_dmabuf_locked(a->dmabuf_fd);
  if (b && g) error = alias_locked(g->gpu_id, b, a->va_addr, b->offset, b->size, &a->handle);
  unlock();
  soft_log("\"op\":\"IMPORT_DMABUF\",\"gpu\":%u,\"err\":%d", a->gpu_id, error);
  return error;
}

int soft_export_dmabuf(struct kfd_ioctl_export_dmabuf_args *a) {
  if (!lock()) return EINVAL;
  struct buffer *b = by_handle_locked(a->handle);
  int fd = b ? export_locked(b) : -1;
  unlock();
  a->dmabuf_fd = fd;
  soft_log("\"op\":\"EXPORT_DMABUF\",\"handle\":\"%llx\",\"fd\":%d", (unsigned long long)a->handle, fd);
  return fd >= 0 ? 0 : EINVAL;
}

int soft_ipc_export(struct kfd_ioctl_ipc_export_args *a) {
  if (!lock()) return EINVAL;
  struct buffer *b = by_handle_locked(a->handle);
  if (b) a->share[0] = b - table->buffer, a->share[1] = b->owner, a->share[2] = a->share[3] = 0;
  unlock();
  soft_log("\"op\":\"IPC_EXPORT\",\"gpu\":%u,\"err\":%d", a->gpu_id, b ? 0 : EINVAL);
  return b ? 0 : EINVAL;
}

int soft_ipc_import(struct kfd_ioctl_ipc_import_args *a) {
  struct soft_gpu *g = soft_gpu_by_id(a->gpu_id);
  int error = EINVAL;
  if (!lock()) return EINVAL;
  struct buffer *b = a->share[0] < table->count ? &table->buffer[a->share[0]] : NULL;
  if (g && b && b->state == OWNS_MEMORY && b->owner == a->share[1]) {
    a->mmap_offset = b->offset, a->flags = 0;
    error = alias_locked(g->gpu_id, b, a->va_addr, b->offset, b->size, &a->handle);
  }
  unlock();
  soft_log("\"op\":\"IPC_IMPORT\",\"gpu\":%u,\"err\":%d", a->gpu_id, error);
  return error;
}

/* ------------------------------------------------------------------------------------------------------------- GEM
 * A GEM handle is a slot of the table plus one. The driver's are per open file; here they are the same for all. */

static struct buffer *by_gem_locked(uint32_t handle) {
  struct buffer *b = handle && handle <= table->count ? &table->buffer[handle - 1] : NULL;
  return b && b->state ? b : NULL;
}

int soft_gem_create(struct soft_gpu *g, union drm_amdgpu_gem_create *a) {
  uint64_t size = a->in.bo_size, domains = a->in.domains;
  struct buffer want = {.size = size}, *b = NULL;
  if (!size || !(domains & (AMDGPU_GEM_DOMAIN_VRAM | AMDGPU_GEM_DOMAIN_GTT))) return EINVAL;
  want.flags = domains & AMDGPU_GEM_DOMAIN_VRAM ? KFD_IOC_ALLOC_MEM_FLAGS_VRAM : KFD_IOC_ALLOC_MEM_FLAGS_GTT;
  soft_claim(g); /* the driver asks no such thing of a DRM client; here its memory lies in the file that a switch empties */
  if (!lock()) return ENOMEM;
  int error = take_locked(g, want, false, &b);
  if (!error) a->out.handle = b - table->buffer + 1;
  unlock();
  soft_log("\"op\":\"GEM_CREATE\",\"gpu\":%u,\"size\":%llu,\"domains\":%llu,\"err\":%d", g->gpu_id,
           (unsigned long long)size, (unsigned long long)domains, error);
  return error;
}

/* Closing a handle that came from a dma-buf leaves the memory to whoever the KFD gave it to. */
int soft_gem_close(uint32_t handle) {
  if (!lock()) return EINVAL;
  struct buffer *b = by_gem_locked(handle);
  if (b && b->state == OWNS_MEMORY && !b->handle && b->owner == owner) {
    uint32_t gpu = b->gpu;
    drop_locked(b);
    publish_locked(gpu);
  }
  unlock();
  return 0;
}

int soft_gem_of_fd(int fd, uint32_t *handle) {
  if (!lock()) return EBADF;
  struct buffer *b = by_dmabuf_locked(fd);
  *handle = b ? b - table->buffer + 1 : 0;
  unlock();
  return b ? 0 : EBADF;
}

int soft_gem_to_fd(uint32_t handle, int *fd) {
  if (!lock()) return EINVAL;
  struct buffer *b = by_gem_locked(handle);
  *fd = b ? export_locked(b) : -1;
  unlock();
  return *fd >= 0 ? 0 : EINVAL;
}

int soft_gem_offset(uint32_t handle, uint64_t *offset) {
  if (!lock()) return EINVAL;
  struct buffer *b = by_gem_locked(handle);
  if (b) *offset = b->offset;
  unlock();
  return b ? 0 : ENOENT;
}

int soft_gem_size(uint32_t handle, uint64_t *size) {
  if (!lock()) return EINVAL;
  struct buffer *b = by_gem_locked(handle);
  if (b) *size = b->size;
  unlock();
  return b ? 0 : ENOENT;
}

int soft_gem_va(const struct drm_amdgpu_gem_va *a) {
  int error = 0;
  if (!lock()) return EINVAL;
  if (a->operation == AMDGPU_VA_OP_MAP || a->operation == AMDGPU_VA_OP_REPLACE) {
    struct buffer *b = by_gem_locked(a->handle);
    error = b ? alias_locked(b->gpu, b, a->va_address, b->offset + a->offset_in_bo, a->map_size, NULL) : ENOENT;
  } else {
    for (uint64_t i = 0; i < table->count; i++) {
      struct buffer *b = &table->buffer[i];
      if (b->state == ALIAS && b->owner == owner && b->va == a->va_address) {
        b->state = FREE_SLOT;
        break;
      }
    }
  }
  unlock();
  return error;
}

/* ---------------------------------------------------------------------------------------------------- GPU addresses
 * Most VRAM is mapped PROT_NONE in the process, so the "GPU" has mappings of its own; one slot a buffer, reused. */

void *soft_gpu_pointer(uint64_t va, uint64_t length) {
  static struct {
    uint64_t handle, size, offset;
    char *at;
  } views[4096];
  void *pointer = (void *)va;
  /* Without the lock on the file: only our own buffers are looked at, and only we change them. The worker comes by here
   * thousands of times a second. */
  pthread_mutex_lock(&mutex);
  for (uint64_t i = 0; table && i < table->count && i < MAX_BUFFERS; i++) {
    const struct buffer *b = &table->buffer[i];
    if (!b->state || b->owner != owner || va < b->va || va + length > b->va + b->size) continue;
    if (b->flags & KFD_IOC_ALLOC_MEM_FLAGS_USERPTR) pointer = (void *)(b->offset + (va - b->va));
    else if (is_vram(b) || is_gtt(b)) {
      __typeof__(&views[0]) v = &views[i % (sizeof views / sizeof *views)];
      if (!v->at || v->handle != b->handle || v->size != b->size || v->offset != b->offset) {
        if (v->at) munmap(v->at, v->size);
        int fd = open_memory(b->gpu);
        v->at = mmap(NULL, b->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, b->offset);
        if (v->at == MAP_FAILED) v->at = NULL;
        if (fd >= 0) close(fd);
        v->handle = b->handle, v->size = b->size, v->offset = b->offset;
      }
      pointer = v->at ? v->at + (va - b->va) : NULL;
    }
    break;
  }
  pthread_mutex_unlock(&mutex);
  /* Host memory may have been unmapped behind our back: a GPU would fault, the process must not. */
  char byte;
  struct iovec here = {&byte, 1}, there = {pointer, 1};
  if (pointer == (void *)va && process_vm_readv(getpid(), &here, 1, &there, 1, 0) != 1) return NULL;
  return pointer;
}
