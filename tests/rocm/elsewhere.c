/* HIP that is not in the program's own search order: what it says and how much it grants there.
 *
 *   elsewhere HOW FILE     FILE brings HIP and the simulated KFD along; HOW: namespace (dlmopen) or deep (RTLD_DEEPBIND) */
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv) {
  if (argc != 3) return 2;
  void *file = strcmp(argv[1], "deep") ? dlmopen(LM_ID_NEWLM, argv[2], RTLD_NOW) : dlopen(argv[2], RTLD_NOW | RTLD_DEEPBIND);
  if (!file) return fprintf(stderr, "%s\n", dlerror()), 1;
  int (*memory)(size_t *, size_t *) = (int (*)(size_t *, size_t *))dlsym(file, "hipMemGetInfo");
  int (*attribute)(int *, int, int) = (int (*)(int *, int, int))dlsym(file, "hipDeviceGetAttribute");
  int (*take)(void **, size_t) = (int (*)(void **, size_t))dlsym(file, "hipMalloc");
  size_t free = 0, total = 0;
  int cus = 0, granted = 0, failed = memory(&free, &total) || attribute(&cus, 63, 0);
  void *p;
  while (granted < 64 && !take(&p, 128 << 20)) granted++;
  printf("{\"op\":\"elsewhere\",\"failed\":%d,\"total\":%zu,\"cus\":%d,\"granted\":%d}\n", failed, total, cus, granted);
  fflush(stdout);
  _exit(0);
}
