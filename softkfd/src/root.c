/* Finding the simulated machine, and the small files in it.
 *
 * The root is the folder that SOFTKFD_ROOT names, else /run/softkfd: a container gets the root mounted there, and finds
 * it with an empty environment too (`env -i`, sudo, a set-uid program). Where neither is there, the library does
 * nothing at all.
 *
 * Who may open what follows from how the root was found:
 *   - /dev/kfd of this process is the root's kfd (same inode): the devices are mounted. /dev is left alone, and a render
 *     node that is not mounted is not there. This is a container, and its device list is what selects.
 *   - found at /run/softkfd, but no kfd mounted: a container that was given no GPU. /dev is left alone as well.
 *   - named by SOFTKFD_ROOT, and no kfd mounted: a process on the host. /dev/kfd and /dev/dri mean the root's. */
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "softkfd.h"

#define FIXED_ROOT "/run/softkfd"
#define LOG_LIMIT (64ll << 20) /* bytes; the log just ends there: a forgotten simulation must not fill a tmpfs */

struct soft_gpu soft_gpus[SOFT_MAX_GPUS];
int soft_gpu_count;
char soft_root[PATH_MAX];
size_t soft_root_length;
dev_t soft_dev;
ino_t soft_kfd_ino;
bool soft_redirects_dev;

static int stat_at(const char *path, struct stat *st) { return syscall(SYS_newfstatat, AT_FDCWD, path, st, 0); }

int soft_open(const char *path, int flags) {
  int fd = syscall(SYS_openat, AT_FDCWD, path, flags | O_CLOEXEC, 0666);
  /* Whoever comes next may be another user: the umask of the program we are in says nothing about our files. */
  if (fd >= 0 && flags & O_CREAT) {
    int ignored = fchmod(fd, 0666);
    (void)ignored;
  }
  return fd;
}

/* Resolve links in the root's name, or realpath() of a path in it would not begin with it. */
static void resolve_root(const char *name) {
  char link[64];
  int fd = syscall(SYS_openat, AT_FDCWD, name, O_PATH | O_DIRECTORY | O_CLOEXEC, 0);
  if (fd < 0) return;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = syscall(SYS_readlink, link, soft_root, sizeof soft_root - 1);
  close(fd);
  if (n > 0) soft_root[n] = 0;
  else snprintf(soft_root, sizeof soft_root, "%s", name); /* no /proc */
  soft_root_length = strlen(soft_root);
  while (soft_root_length > 1 && soft_root[soft_root_length - 1] == '/') soft_root[--soft_root_length] = 0;
}

void soft_init(void) {
  static bool done;
  /* Set before the work, not after: what is called below may come back here through a function that we interpose, and
   * then has to pass through. The constructor calls first, when there is one thread. */
  if (done) return;
  done = true;
  const char *name = getenv("SOFTKFD_ROOT");
  bool named = name && *name;
  char path[PATH_MAX];
  struct stat st, mounted;
  resolve_root(named ? name : FIXED_ROOT);
  if (!soft_root[0]) return;
  snprintf(path, sizeof path, "%s/gpus.conf", soft_root);
  bool is_machine = !stat_at(path, &st);
  snprintf(path, sizeof path, "%s/dev/kfd", soft_root);
  if (!is_machine || stat_at(path, &st)) {
    soft_root[0] = 0;
    return;
  }
  soft_dev = st.st_dev, soft_kfd_ino = st.st_ino;
  bool is_mounted = !stat_at("/dev/kfd", &mounted) && mounted.st_dev == soft_dev && mounted.st_ino == soft_kfd_ino;
  soft_redirects_dev = named && !is_mounted;
}

__attribute__((constructor)) static void constructor(void) {
  soft_init();
  if (soft_root[0] && getenv("SOFTKFD_REAP")) soft_reap();
}

static void read_line(struct soft_gpu *g, char *line) {
  const struct {
    const char *key;
    uint32_t *value;
  } numbers[] = {{"gpu_id", &g->gpu_id}, {"minor", &g->minor}, {"card", &g->card}, {"node", &g->node},
                 {"device_id", &g->device_id}, {"rev", &g->rev}, {"family", &g->family}, {"ses", &g->ses},
                 {"sa_per_se", &g->sa_per_se}, {"cus", &g->cus}, {"vram_type", &g->vram_type}, {"width", &g->width},
                 {"sclk_khz", &g->sclk}, {"mclk_khz", &g->mclk}, {"counter_khz", &g->counter_khz}, {"wave", &g->wave},
                 {"gfx", &g->gfx}};
  char *save = NULL;
  for (char *word = strtok_r(line, " \n", &save); word; word = strtok_r(NULL, " \n", &save)) {
    char *value = strchr(word, '=');
    if (!value) continue;
    *value++ = 0;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
      if (!strcmp(numbers[i].key, word)) *numbers[i].value = soft_number(value, NULL, 0);
    if (!strcmp(word, "vram")) g->vram = soft_number(value, NULL, 0);
    if (!strcmp(word, "gtt")) g->gtt = soft_number(value, NULL, 0);
    if (!strcmp(word, "device")) snprintf(g->device, sizeof g->device, "/%s", value);
  }
}

/* The entry of a gpu_id, or a free one for it; NULL: no room. */
static struct soft_gpu *entry_for(uint32_t gpu_id, int *count) {
  struct soft_gpu *free_one = *count < SOFT_MAX_GPUS ? &soft_gpus[*count] : NULL;
  for (int i = 0; i < *count; i++) {
    if (soft_gpus[i].gpu_id == gpu_id) return &soft_gpus[i];
    if (soft_gpus[i].gone) free_one = &soft_gpus[i];
  }
  if (free_one == &soft_gpus[*count]) ++*count;
  return free_one;
}

static void read_gpus(FILE *f) {
  static struct soft_gpu read[SOFT_MAX_GPUS];
  char path[PATH_MAX], *line = NULL;
  size_t capacity = 0;
  int count = 0, n = soft_gpu_count;
  memset(read, 0, sizeof read);
  while (count < SOFT_MAX_GPUS && getline(&line, &capacity, f) > 0) {
    struct soft_gpu *g = &read[count++];
    struct stat st;
    read_line(g, line);
    snprintf(path, sizeof path, "%s/dev/dri/renderD%u", soft_root, g->minor);
    g->ino = stat_at(path, &st) ? 0 : st.st_ino;
    snprintf(path, sizeof path, "%s/dev/dri/card%u", soft_root, g->card);
    g->card_ino = stat_at(path, &st) ? 0 : st.st_ino;
  }
  free(line);
  for (int i = 0; i < n; i++) { /* first, so that what is new finds room */
    bool stays = false;
    for (int j = 0; j < count; j++) stays |= read[j].gpu_id == soft_gpus[i].gpu_id;
    soft_gpus[i].gone = !stays;
  }
  for (int j = 0; j < count; j++) {
    struct soft_gpu *g = entry_for(read[j].gpu_id, &n);
    if (!g) break;
    read[j].claimed = g->gpu_id == read[j].gpu_id && g->claimed;
    read[j].shown = g->gpu_id == read[j].gpu_id && g->shown;
    *g = read[j];
  }
  soft_gpu_count = n; /* last: another thread sees whole entries */
}

/* A partition switch replaces gpus.conf by rename. A process that lives on meanwhile has no queue and no memory on the
 * GPU that was switched, or the switch had been refused. */
void soft_reload_gpus(void) {
  static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  static __thread bool inside; /* what is called below may come back here through a function that we interpose */
  static ino_t loaded;
  char path[PATH_MAX];
  struct stat st;
  if (inside || !soft_root[0]) return;
  snprintf(path, sizeof path, "%s/gpus.conf", soft_root);
  if (stat_at(path, &st) || st.st_ino == loaded) return;
  inside = true;
  pthread_mutex_lock(&mutex);
  int fd = st.st_ino == loaded ? -1 : soft_open(path, O_RDONLY);
  FILE *f = fd < 0 ? NULL : fdopen(fd, "r");
  if (f) {
    read_gpus(f);
    loaded = st.st_ino;
    fclose(f);
  }
  pthread_mutex_unlock(&mutex);
  inside = false;
}

void soft_load_gpus(void) {
  if (!soft_gpu_count) soft_reload_gpus();
}

struct soft_gpu *soft_gpu_by_id(uint32_t gpu_id) {
  soft_reload_gpus();
  for (int i = 0; i < soft_gpu_count; i++)
    if (!soft_gpus[i].gone && soft_gpus[i].gpu_id == gpu_id) return &soft_gpus[i];
  return NULL;
}

void soft_put(const char *path_from_root, uint64_t n) {
  char path[PATH_MAX], text[32];
  snprintf(path, sizeof path, "%s%s", soft_root, path_from_root);
  int fd = soft_open(path, O_WRONLY | O_CREAT | O_TRUNC);
  if (fd < 0) return;
  int length = snprintf(text, sizeof text, "%llu\n", (unsigned long long)n);
  ssize_t ignored = write(fd, text, length);
  (void)ignored;
  close(fd);
}

void soft_put_folder(const char *path_from_root) {
  char path[PATH_MAX];
  snprintf(path, sizeof path, "%s%s", soft_root, path_from_root);
  if (!mkdir(path, 0777)) {
    int ignored = chmod(path, 0777);
    (void)ignored;
  }
}

bool soft_home_pids(void) {
  static int known = -1;
  if (known < 0) {
    char path[PATH_MAX], text[32] = "";
    struct stat st;
    snprintf(path, sizeof path, "%s/pid_namespace", soft_root);
    int fd = soft_open(path, O_RDONLY);
    if (fd >= 0) {
      ssize_t n = read(fd, text, sizeof text - 1);
      text[n > 0 ? n : 0] = 0;
      close(fd);
    }
    known = !stat_at("/proc/self/ns/pid", &st) && st.st_ino == soft_number(text, NULL, 10);
  }
  return known;
}

/* Opened for each line: a program that closes every descriptor it does not know would otherwise make us write into
 * whatever file it opens next. */
void soft_log(const char *format, ...) {
  char path[PATH_MAX], line[4096];
  struct stat st;
  const char *named = getenv("SOFTKFD_LOG");
  snprintf(path, sizeof path, "%s/log.jsonl", soft_root);
  int fd = soft_open(named && *named ? named : path, O_WRONLY | O_CREAT | O_APPEND);
  if (fd < 0) return;
  if (!syscall(SYS_newfstatat, fd, "", &st, AT_EMPTY_PATH) && st.st_size < LOG_LIMIT) {
    int n = snprintf(line, sizeof line, "{\"pid\":%d,", getpid());
    va_list arguments;
    va_start(arguments, format);
    n += vsnprintf(line + n, sizeof line - n - 3, format, arguments);
    va_end(arguments);
    if (n > (int)sizeof line - 3) n = sizeof line - 3;
    line[n++] = '}';
    line[n++] = '\n';
    ssize_t ignored = write(fd, line, n); /* one write, so lines of several processes do not mix */
    (void)ignored;
  }
  close(fd);
}

int soft_errno_of(const char *name) {
  static const struct {
    const char *name;
    int value;
  } known[] = {{"EPERM", EPERM}, {"ENOENT", ENOENT}, {"EIO", EIO}, {"EBADF", EBADF}, {"ENOMEM", ENOMEM},
               {"EACCES", EACCES}, {"EFAULT", EFAULT}, {"EBUSY", EBUSY}, {"ENODEV", ENODEV}, {"EINVAL", EINVAL},
               {"ENOTTY", ENOTTY}, {"ENOSPC", ENOSPC}};
  for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
    size_t n = strlen(known[i].name);
    if (!strncmp(name, known[i].name, n) && (!name[n] || name[n] == ',')) return known[i].value;
  }
  return (int)soft_number(name, NULL, 10);
}

int soft_refusal(const char *op) {
  size_t n = strlen(op);
  for (const char *p = getenv("SOFTKFD_FAIL"); p && *p; p = strchr(p, ',') ? strchr(p, ',') + 1 : NULL)
    if (!strncmp(p, op, n) && p[n] == '=') return soft_errno_of(p + n + 1);
  return 0;
}
