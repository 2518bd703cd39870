/* The second way in: LD_AUDIT. The dynamic linker asks la_symbind64 for each binding of a function and takes its answer.
 *
 * It reaches callers that a preloaded definition does not: RTLD_DEEPBIND, dlmopen, dlsym on a handle. It does not reach
 * those that have a function's address by relocation (-fno-plt, Rust), with glibc before 2.35 those bound at once (all
 * that Python imports), and no musl program. ROCr calls by a PLT in every version, so both ways reach it.
 *
 * Rules, each paid for by somebody:
 *  - This copy lives in a namespace of its own, with a libc of its own: its errno, its environ and its `open` are not the
 *    program's. A refusal must be told through the errno of the caller's libc, found in that libc's symbol table, or ROCr
 *    reads a stale one; a stale EAGAIN spins for ever.
 *  - Another interposer's own binding (a dlsym for the next definition) is left alone: answered with us, it would call us
 *    nested, and every charge would count twice.
 *  - Where a preloaded copy is in the program, that one counts: bindings that would go past it are turned to it, and this
 *    copy serves other namespaces only.
 *  - No la_pltenter: its presence costs every call of the program 170 ns.
 */
#include <errno.h>
#include <link.h>
#include <stdarg.h>

#include "gate.h"
#include "next.h"
#include "os.h"

#define EXPORTED __attribute__((visibility("default")))
#define WAYS 8 /* different definitions, times namespaces; a binding beyond is left alone */

typedef int ioctl_function(int, unsigned long, ...);
typedef FILE *fopen_function(const char *, const char *);
typedef int *errno_function(void);

/* What is kept of an object, in its cookie. */
enum { INTERPOSES = 1, GATE = 2, NAMESPACE_SHIFT = 8 };

static struct way {
    uintptr_t real;
    errno_function *errno_of;
} ioctl_ways[WAYS], fopen_ways[WAYS];
static errno_function *errno_of_namespace[16]; /* glibc has no more */
static uintptr_t preloaded_ioctl, preloaded_fopen, preloaded_fopen64; /* of a copy in the program's own namespace */

/* ------------------------------------------------------------------------------------------------------- the calls */

static int through(const struct way *way, avg_request *next, int fd, unsigned long request, void *argument) {
    if (!avg_request_of_interest(request, argument)) return ((ioctl_function *)way->real)(fd, request, argument);
    int *theirs = way->errno_of();
    errno = *theirs;
    int result = avg_gate(fd, request, argument, next);
    *theirs = errno;
    return result;
}

static int on_to(const struct way *way, int fd, unsigned long request, void *argument) {
    int *theirs = way->errno_of();
    *theirs = errno;
    int result = ((ioctl_function *)way->real)(fd, request, argument);
    errno = *theirs;
    return result;
}

static FILE *opened(const struct way *way, const char *path, const char *mode) {
    FILE *file = ((fopen_function *)way->real)(path, mode);
    if (!file) return NULL;
    int *theirs = way->errno_of(), error = *theirs;
    avg_opened(file, path);
    *theirs = error;
    return file;
}

#define WAY(n) \
    static int next_##n(int fd, unsigned long request, void *argument) { return on_to(&ioctl_ways[n], fd, request, argument); } \
    static int ioctl_##n(int fd, unsigned long request, ...) { \
        va_list arguments; \
        va_start(arguments, request); \
        void *argument = va_arg(arguments, void *); \
        va_end(arguments); \
        return through(&ioctl_ways[n], next_##n, fd, request, argument); \
    } \
    static FILE *fopen_##n(const char *path, const char *mode) { return opened(&fopen_ways[n], path, mode); }
WAY(0) WAY(1) WAY(2) WAY(3) WAY(4) WAY(5) WAY(6) WAY(7)

static ioctl_function *const ioctls[WAYS] = {ioctl_0, ioctl_1, ioctl_2, ioctl_3, ioctl_4, ioctl_5, ioctl_6, ioctl_7};
static fopen_function *const fopens[WAYS] = {fopen_0, fopen_1, fopen_2, fopen_3, fopen_4, fopen_5, fopen_6, fopen_7};

/* Index of the way to definition `real`, made on first sight; -1 where there is none left. The dynamic linker calls one
 * at a time for symbols it binds at load, and any thread for lazy ones: a way is taken by compare and swap. */
static int way_to(struct way *ways, uintptr_t real, errno_function *errno_of) {
    for (int i = 0; i < WAYS; i++) {
        uintptr_t there = __atomic_load_n(&ways[i].real, __ATOMIC_ACQUIRE);
        if (!there) {
            errno_function *free = NULL;
            if (!__atomic_compare_exchange_n(&ways[i].errno_of, &free, errno_of, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST) && free != errno_of)
                continue; /* somebody else is taking it */
            if (__atomic_compare_exchange_n(&ways[i].real, &there, real, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return i;
        }
        if (there == real && ways[i].errno_of == errno_of) return i;
    }
    return -1;
}

/* ------------------------------------------------------------------------------------------- asked by the dynamic linker */

EXPORTED unsigned int la_version(unsigned int offered) { return offered < LAV_CURRENT ? offered : LAV_CURRENT; }

EXPORTED unsigned int la_objopen(struct link_map *object, Lmid_t namespace, uintptr_t *cookie) {
    const ElfW(Sym) *ioctl_there = avg_symbol_at(object->l_addr, object->l_ld, "ioctl");
    const ElfW(Sym) *errno_there = avg_symbol_at(object->l_addr, object->l_ld, "__errno_location");
    unsigned number = namespace >= 0 && namespace < 16 ? (unsigned)namespace : 15;
    const ElfW(Sym) *fopen_there = avg_symbol_at(object->l_addr, object->l_ld, "fopen");
    const ElfW(Sym) *fopen64_there = avg_symbol_at(object->l_addr, object->l_ld, "fopen64");
    int is_gate = ioctl_there && fopen_there && fopen64_there && avg_symbol_at(object->l_addr, object->l_ld, "la_symbind64");
    if (errno_there && !errno_of_namespace[number])
        errno_of_namespace[number] = (errno_function *)(object->l_addr + errno_there->st_value);
    if (is_gate && !number && !preloaded_ioctl) {
        preloaded_ioctl = object->l_addr + ioctl_there->st_value;
        preloaded_fopen = object->l_addr + fopen_there->st_value;
        preloaded_fopen64 = object->l_addr + fopen64_there->st_value;
    }
    *cookie = (ioctl_there ? INTERPOSES : 0) | (is_gate ? GATE : 0) | (uintptr_t)number << NAMESPACE_SHIFT;
    /* Whoever defines ioctl defines what else we want (libc, an emulator): only bindings to those are of interest. */
    return LA_FLG_BINDFROM | (ioctl_there ? LA_FLG_BINDTO : 0);
}

EXPORTED uintptr_t la_symbind64(ElfW(Sym) *symbol, unsigned int index, uintptr_t *from, uintptr_t *to, unsigned int *flags, const char *name) {
    (void)index;
    uintptr_t real = symbol->st_value;
    if (*name != 'i' && *name != 'f' && *name != 'o') return real;
    int is_ioctl = avg_equal(name, "ioctl"), is_fopen = avg_equal(name, "fopen"), is_fopen64 = avg_equal(name, "fopen64");
    unsigned number = (unsigned)(*from >> NAMESPACE_SHIFT);
    if (avg_equal(name, "open") && !number && !(*flags & LA_SYMB_DLSYM) && !avg_program_open) avg_program_open = (avg_open_function *)real;
    if ((!is_ioctl && !is_fopen && !is_fopen64) || !real || *from & INTERPOSES || *to & GATE) return real;
    if (!number && preloaded_ioctl) return is_ioctl ? preloaded_ioctl : is_fopen ? preloaded_fopen : preloaded_fopen64;
    errno_function *errno_of = errno_of_namespace[number];
    if (!errno_of) return real; /* no libc that we know: no errno to tell a refusal by */
    int way = way_to(is_ioctl ? ioctl_ways : fopen_ways, real, errno_of);
    return way < 0 ? real : is_ioctl ? (uintptr_t)ioctls[way] : (uintptr_t)fopens[way];
}
