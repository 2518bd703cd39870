/* The kernel and a few text routines, without libc: what a guest in a foreign process may use at any moment.
 *
 * Raw system calls do not touch errno, take no lock and work before libc's own constructors have run. Functions return
 * what the kernel returns: a value, or -errno. */
#ifndef AMDVGPU_OS_H
#define AMDVGPU_OS_H

#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>

static inline long avg_syscall(long number, long a, long b, long c, long d, long e, long f) {
#if defined(__x86_64__)
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
#elif defined(__aarch64__)
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
#else
#error "only x86-64 and aarch64 are known here"
#endif
}
#define AVG_SYS(name, a, b, c, d) \
    avg_syscall(SYS_##name, (long)(a), (long)(b), (long)(c), (long)(d), 0, 0)

/* Does not wait at a FIFO and follows no link in the last component: the path may lie where a guest can write. */
static inline int avg_open(int directory, const char *path, int flags) {
    return AVG_SYS(openat, directory, path, flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0);
}
static inline void avg_close(int fd) { AVG_SYS(close, fd, 0, 0, 0); }
static inline uint32_t avg_pid(void) { return AVG_SYS(getpid, 0, 0, 0, 0); }

/* Differs between the threads of a process, is never 0, and is there before libc has started. No system call. */
static inline uintptr_t avg_thread(void) {
    uintptr_t mark;
#if defined(__x86_64__)
    __asm__("mov %%fs:0, %0" : "=r"(mark)); /* the thread's control block begins with its own address */
#else
    __asm__("mrs %0, tpidr_el0" : "=r"(mark));
#endif
    return mark | 1;
}

static inline uint64_t avg_now_ms(void) {
    struct timespec now = {0};
    AVG_SYS(clock_gettime, CLOCK_MONOTONIC, &now, 0, 0);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static inline void *avg_map(size_t length, int protection, int flags, int fd) {
    long at = avg_syscall(SYS_mmap, 0, (long)length, protection, flags, fd, 0);
    return at < 0 && at > -4096 ? NULL : (void *)at;
}

/* Read a file into `text`, closing it with a zero; its length, or -errno. Small files only: one read. */
static inline long avg_read_file(const char *path, char *text, size_t room) {
    int fd = AVG_SYS(openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
    if (fd < 0) return fd;
    long length = AVG_SYS(read, fd, text, room - 1, 0);
    avg_close(fd);
    if (length >= 0) text[length] = 0;
    return length;
}

static inline size_t avg_length(const char *text) {
    size_t length = 0;
    while (text[length]) length++;
    return length;
}

static inline int avg_starts(const char *text, const char *start) {
    while (*start)
        if (*text++ != *start++) return 0;
    return 1;
}

static inline int avg_equal(const char *a, const char *b) {
    while (*a && *a == *b) a++, b++;
    return *a == *b;
}

/* Append to a text that ends at `at`; never beyond `end`, where the closing zero goes. Returns the new end. */
static inline char *avg_put(char *at, char *end, const char *text) {
    while (*text && at < end) *at++ = *text++;
    *at = 0;
    return at;
}

static inline char *avg_put_number(char *at, char *end, uint64_t value) {
    char digits[24];
    int count = 23;
    digits[count] = 0;
    do digits[--count] = (char)('0' + value % 10);
    while (value /= 10);
    return avg_put(at, end, digits + count);
}

static inline char *avg_put_hex(char *at, char *end, uint64_t value) {
    char digits[20];
    int count = 19;
    digits[count] = 0;
    do digits[--count] = "0123456789abcdef"[value & 15];
    while (value >>= 4);
    return avg_put(at, end, digits + count);
}

/* The decimal number at *text, which is moved behind it; 0 where there is none. Saturates. */
static inline uint64_t avg_number(const char **text) {
    uint64_t value = 0;
    for (; **text >= '0' && **text <= '9'; ++*text)
        if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, (uint64_t)(**text - '0'), &value))
            value = UINT64_MAX;
    return value;
}

static inline uint64_t avg_sum(uint64_t a, uint64_t b) { return a + b < a ? UINT64_MAX : a + b; }
static inline uint64_t avg_less(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }
static inline uint64_t avg_min(uint64_t a, uint64_t b) { return a < b ? a : b; }

#endif
