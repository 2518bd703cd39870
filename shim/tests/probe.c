/* A caller of ioctl, as a library and as programs that reach it in different ways. Prints one errno a request for VRAM.
 *
 *   as a library   probe(bytes): errno of one ALLOC on GPU 1000, 0 where it was granted
 *   as a program   probe WAY LIBRARY BYTES...     WAY: own (this program's own call), deepbind, dlmopen, handle (dlsym of
 *                  libc's ioctl), twice (a namespace of its own first, then the program's)
 */
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>

#include "../src/kfd.h"

static int ask(int (*call)(int, unsigned long, ...), unsigned long bytes) {
    struct kfd_alloc_memory a = {.bytes = bytes, .gpu_id = 1000, .flags = 0xb0000001u};
    errno = EAGAIN; /* a stale one that must not show */
    return call(1000, KFD_ALLOC_MEMORY, &a) ? errno : 0;
}

int probe(unsigned long bytes) {
    struct kfd_alloc_memory a = {.bytes = bytes, .gpu_id = 1000, .flags = 0xb0000001u};
    errno = EAGAIN;
    return ioctl(1000, KFD_ALLOC_MEMORY, &a) ? errno : 0;
}

#ifdef PROGRAM
int main(int argc, char **argv) {
    int (*asked)(unsigned long) = probe;
    int (*call)(int, unsigned long, ...) = 0;
    void *library = 0;
    if (!strcmp(argv[1], "deepbind")) library = dlopen(argv[2], RTLD_NOW | RTLD_DEEPBIND);
    if (!strcmp(argv[1], "dlmopen") || !strcmp(argv[1], "twice")) library = dlmopen(LM_ID_NEWLM, argv[2], RTLD_NOW);
    if (library) asked = (int (*)(unsigned long))dlsym(library, "probe");
    if (!strcmp(argv[1], "handle")) call = (int (*)(int, unsigned long, ...))dlsym(dlopen("libc.so.6", RTLD_NOW), "ioctl");
    if (!asked) return puts(dlerror()), 1;
    for (int i = 3; i < argc; i++) {
        unsigned long bytes = strtoul(argv[i], 0, 0);
        printf("%d ", call ? ask(call, bytes) : asked(bytes));
        if (!strcmp(argv[1], "twice")) asked = probe;
    }
    printf("\n");
    return 0;
}
#endif
