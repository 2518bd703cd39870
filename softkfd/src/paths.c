/* The path and stat families of libc: amdgpu's part of /sys is the root's, and so is its part of /dev on the host (see
 * root.c); a sparse file that stands for a device says that it is a character device.
 *
 * Calls made inside libc (glob, nftw) and system calls made without libc (Go, static programs) do not come by here. */
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "devices.h"
#include "softkfd.h"

#define DRM_MAJOR 226
#define KFD_MAJOR 235 /* a dynamic one; what the tree's kfd/dev says */

/* Each also stands for what is below it. One that ends in a separator stands for all that begins with it: PCI domains
 * and XCP devices have numbers in their names. */
static const char *const sysfs[] = {"/sys/class/kfd", "/sys/class/drm", "/sys/class/hwmon", "/sys/devices/virtual/kfd",
                                    "/sys/devices/pci*", "/sys/devices/platform/amdgpu_xcp*", "/sys/dev/char/226:*",
                                    "/sys/dev/char/235:*", "/sys/bus/pci", "/sys/module/amdgpu"};
static const char *const devices[] = {"/dev/kfd", "/dev/dri"};

static bool is_below(const char *path, const char *const *list, size_t count) {
  for (size_t i = 0; i < count; i++) {
    size_t n = strlen(list[i]);
    if (list[i][n - 1] == '*' ? !strncmp(path, list[i], n - 1)
                              : !strncmp(path, list[i], n) && (!path[n] || path[n] == '/'))
      return true;
  }
  return false;
}

static const char *redirect(const char *path, char *buffer) {
  soft_init();
  if (!soft_root[0] || !path || path[0] != '/') return path;
  if (!is_below(path, sysfs, sizeof sysfs / sizeof *sysfs) &&
      !(soft_redirects_dev && is_below(path, devices, sizeof devices / sizeof *devices)))
    return path;
  snprintf(buffer, PATH_MAX, "%s%s", soft_root, path);
  return buffer;
}

/* SOFTKFD_DENY="renderD128=EPERM,kfd=EACCES": what a device cgroup or file modes would do. */
static int denied(const char *path) {
  const char *d = getenv("SOFTKFD_DENY");
  soft_init();
  if (!d || !soft_root[0] || !path || strncmp(path, "/dev/", 5)) return 0;
  const char *name = strrchr(path, '/') + 1;
  size_t n = strlen(name);
  for (; d && *d; d = strchr(d, ',') ? strchr(d, ',') + 1 : NULL)
    if (!strncmp(d, name, n) && d[n] == '=') return soft_errno_of(d + n + 1);
  return 0;
}

bool soft_admits(const struct soft_gpu *g) {
  char path[64];
  struct stat st;
  snprintf(path, sizeof path, "/dev/dri/renderD%u", g->minor);
  if (denied(path)) return false;
  return soft_redirects_dev || (!syscall(SYS_newfstatat, AT_FDCWD, path, &st, 0) && st.st_dev == soft_dev &&
                                st.st_ino == g->ino);
}

/* The render node of a partition that the present mode does not make: it is there, and cannot be opened. */
static bool leads_nowhere(const char *path, const struct stat *st) {
  struct soft_gpu *g;
  if (st->st_dev != soft_dev || !S_ISREG(st->st_mode) || strncmp(path, "/dev/dri/renderD", 16)) return false;
  soft_reload_gpus();
  return soft_device_of_inode(st->st_dev, st->st_ino, &g) == SOFT_NONE;
}

/* errno of a GPU that is being reset or has died: what faults/<PCI address> of the root says; 0: it is well. */
static int fault_of(const char *path, const struct stat *st) {
  struct soft_gpu *g;
  char name[PATH_MAX], text[32] = "";
  if (st->st_dev != soft_dev || !S_ISREG(st->st_mode) || strncmp(path, "/dev/dri/", 9) ||
      soft_device_of_inode(st->st_dev, st->st_ino, &g) == SOFT_NONE)
    return 0;
  snprintf(name, sizeof name, "%s/faults%s", soft_root, strrchr(g->device, '/'));
  int fd = soft_open(name, O_RDONLY);
  if (fd < 0) return 0;
  ssize_t n = read(fd, text, sizeof text - 1);
  close(fd);
  text[n > 0 ? n : 0] = 0;
  text[strcspn(text, "\n")] = 0;
  return soft_errno_of(text);
}

static int open_at(int dir, const char *path, int flags, mode_t mode) {
  char buffer[PATH_MAX];
  int error = denied(path);
  if (error) {
    errno = error;
    return -1;
  }
  int fd = syscall(SYS_openat, dir, redirect(path, buffer), flags, mode);
  struct stat st;
  if (fd >= 0 && soft_root[0] && !(flags & O_PATH)) {
    int saved = errno;
    if (!syscall(SYS_newfstatat, fd, "", &st, AT_EMPTY_PATH)) {
      if (st.st_dev == soft_dev && st.st_ino == soft_kfd_ino) soft_opened_kfd(fd);
      else if (path && (error = leads_nowhere(path, &st) ? ENOENT : fault_of(path, &st))) {
        close(fd);
        fd = -1, saved = error;
      }
    }
    errno = saved;
  }
  return fd;
}

#define REAL(name) \
  ({ \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(real))dlsym(RTLD_NEXT, #name); \
    real; \
  })
#define REDIRECT(path) \
  char redirected[PATH_MAX]; \
  path = redirect(path, redirected)
#define MODE(flags) \
  mode_t mode = 0; \
  if (flags & (O_CREAT | O_TMPFILE)) { \
    va_list arguments; \
    va_start(arguments, flags); \
    mode = va_arg(arguments, mode_t); \
    va_end(arguments); \
  }

EXPORT int open(const char *path, int flags, ...) {
  MODE(flags);
  return open_at(AT_FDCWD, path, flags, mode);
}
EXPORT int open64(const char *path, int flags, ...) {
  MODE(flags);
  return open_at(AT_FDCWD, path, flags | O_LARGEFILE, mode);
}
EXPORT int openat(int dir, const char *path, int flags, ...) {
  MODE(flags);
  return open_at(dir, path, flags, mode);
}
EXPORT int openat64(int dir, const char *path, int flags, ...) {
  MODE(flags);
  return open_at(dir, path, flags | O_LARGEFILE, mode);
}
EXPORT int __open_2(const char *path, int flags) { return open_at(AT_FDCWD, path, flags, 0); }
EXPORT int __open64_2(const char *path, int flags) { return open_at(AT_FDCWD, path, flags | O_LARGEFILE, 0); }
EXPORT int __openat_2(int dir, const char *path, int flags) { return open_at(dir, path, flags, 0); }
EXPORT int __openat64_2(int dir, const char *path, int flags) { return open_at(dir, path, flags | O_LARGEFILE, 0); }

EXPORT FILE *fopen(const char *path, const char *how) {
  REDIRECT(path);
  return REAL(fopen)(path, how);
}
EXPORT FILE *fopen64(const char *path, const char *how) {
  REDIRECT(path);
  return REAL(fopen64)(path, how);
}
EXPORT DIR *opendir(const char *path) {
  REDIRECT(path);
  return REAL(opendir)(path);
}
EXPORT int scandir(const char *path, struct dirent ***list, int (*want)(const struct dirent *),
                   int (*order)(const struct dirent **, const struct dirent **)) {
  REDIRECT(path);
  return REAL(scandir)(path, list, want, order);
}
EXPORT int access(const char *path, int how) {
  REDIRECT(path);
  return syscall(SYS_access, path, how);
}
EXPORT int faccessat(int dir, const char *path, int how, int flags) {
  REDIRECT(path);
  return REAL(faccessat)(dir, path, how, flags);
}
EXPORT ssize_t readlink(const char *path, char *buffer, size_t size) {
  REDIRECT(path);
  return syscall(SYS_readlink, path, buffer, size);
}
EXPORT ssize_t readlinkat(int dir, const char *path, char *buffer, size_t size) {
  REDIRECT(path);
  return syscall(SYS_readlinkat, dir, path, buffer, size);
}

static char *without_root(char *path) {
  if (path && soft_root[0] && !strncmp(path, soft_root, soft_root_length) && path[soft_root_length] == '/')
    memmove(path, path + soft_root_length, strlen(path + soft_root_length) + 1);
  return path;
}
EXPORT char *realpath(const char *path, char *resolved) {
  REDIRECT(path);
  return without_root(REAL(realpath)(path, resolved));
}
EXPORT char *__realpath_chk(const char *path, char *resolved, size_t size) {
  (void)size;
  REDIRECT(path);
  return without_root(REAL(realpath)(path, resolved));
}

/* 0: not a simulated device. */
static dev_t device_number(dev_t dev, ino_t ino) {
  struct soft_gpu *g = NULL;
  switch (soft_device_of_inode(dev, ino, &g)) {
  case SOFT_KFD: return makedev(KFD_MAJOR, 0);
  case SOFT_RENDER: return makedev(DRM_MAJOR, g->minor);
  case SOFT_CARD: return makedev(DRM_MAJOR, g->card);
  default: return 0;
  }
}

static int stat_at(int dir, const char *path, struct stat *st, int flags) {
  REDIRECT(path);
  int result = syscall(SYS_newfstatat, dir, path, st, flags);
  dev_t number = result ? 0 : device_number(st->st_dev, st->st_ino);
  if (number) st->st_mode = S_IFCHR | 0666, st->st_rdev = number;
  return result;
}
_Static_assert(sizeof(struct stat) == sizeof(struct stat64), "64-bit only: the two are one");

EXPORT int stat(const char *path, struct stat *st) { return stat_at(AT_FDCWD, path, st, 0); }
EXPORT int lstat(const char *path, struct stat *st) { return stat_at(AT_FDCWD, path, st, AT_SYMLINK_NOFOLLOW); }
EXPORT int fstat(int fd, struct stat *st) { return stat_at(fd, "", st, AT_EMPTY_PATH); }
EXPORT int fstatat(int dir, const char *path, struct stat *st, int flags) { return stat_at(dir, path, st, flags); }
EXPORT int stat64(const char *path, struct stat64 *st) { return stat_at(AT_FDCWD, path, (struct stat *)st, 0); }
EXPORT int lstat64(const char *path, struct stat64 *st) {
  return stat_at(AT_FDCWD, path, (struct stat *)st, AT_SYMLINK_NOFOLLOW);
}
EXPORT int fstat64(int fd, struct stat64 *st) { return stat_at(fd, "", (struct stat *)st, AT_EMPTY_PATH); }
EXPORT int fstatat64(int dir, const char *path, struct stat64 *st, int flags) {
  return stat_at(dir, path, (struct stat *)st, flags);
}

/* What programs call that were linked against a glibc older than 2.33. */
EXPORT int __xstat(int v, const char *path, struct stat *st) { return (void)v, stat_at(AT_FDCWD, path, st, 0); }
EXPORT int __xstat64(int v, const char *path, struct stat *st) { return (void)v, stat_at(AT_FDCWD, path, st, 0); }
EXPORT int __lxstat(int v, const char *path, struct stat *st) {
  return (void)v, stat_at(AT_FDCWD, path, st, AT_SYMLINK_NOFOLLOW);
}
EXPORT int __lxstat64(int v, const char *path, struct stat *st) {
  return (void)v, stat_at(AT_FDCWD, path, st, AT_SYMLINK_NOFOLLOW);
}
EXPORT int __fxstat(int v, int fd, struct stat *st) { return (void)v, stat_at(fd, "", st, AT_EMPTY_PATH); }
EXPORT int __fxstat64(int v, int fd, struct stat *st) { return (void)v, stat_at(fd, "", st, AT_EMPTY_PATH); }
EXPORT int __fxstatat(int v, int dir, const char *path, struct stat *st, int flags) {
  return (void)v, stat_at(dir, path, st, flags);
}
EXPORT int __fxstatat64(int v, int dir, const char *path, struct stat *st, int flags) {
  return (void)v, stat_at(dir, path, st, flags);
}

EXPORT int statx(int dir, const char *path, int flags, unsigned mask, struct statx *st) {
  REDIRECT(path);
  int result = syscall(SYS_statx, dir, path, flags, mask, st);
  dev_t number = result ? 0 : device_number(makedev(st->stx_dev_major, st->stx_dev_minor), st->stx_ino);
  if (number) {
    st->stx_mode = S_IFCHR | 0666;
    st->stx_rdev_major = major(number), st->stx_rdev_minor = minor(number);
  }
  return result;
}
