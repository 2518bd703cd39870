/* Plays a list of KFD requests, one a word, and prints what came back: the program side of the gate's tests.
 *
 *   alloc:GPU:BYTES[:FLAGS]  free:N (the Nth successful alloc, from 0)  freehandle:H  avail:GPU
 *   queue:GPU[:TYPE[:PRIORITY]]  mask:QUEUE:BITS:HEX (low word last)  badmask:QUEUE  update:QUEUE:PRIORITY
 *   destroy:QUEUE  bank:NODE  env:NAME  console (a 'K' request of the terminal)
 *   fork (the child plays the rest, the parent waits)  thread (a thread plays the rest)  exec (a new image plays it)
 *   node:FD:PATH (opens it as FD)  dup:FD:NEW  close:FD  gem:FD:BYTES[:DOMAINS]  gemclose:FD:HANDLE  info:FD:QUERY (its words)
 *   userqueue:FD:IP  criu:OP  context  cat:PATH (by fopen)  put:PATH:TEXT
 *   clone (as fork, by the bare system call)  vfork (a new image in a vfork child plays the rest, the parent waits)
 *   setuid:ID  stop (prints "ready", waits for a line)  kill (SIGKILL to itself)
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../src/drm.h"

#define FD 1000 /* no open file: a request that reached the kernel would answer EBADF */
static uint64_t handles[4096];
static int count;
static char *self;

static void say(const char *word, int result, const char *more) {
    if (result) printf("%s -> %s\n", word, strerrorname_np(errno));
    else printf("%s -> ok%s\n", word, more);
}

static void vfork_and_exec(char **words) {
    pid_t child = vfork();
    if (!child) execv(self, words), _exit(127);
    waitpid(child, 0, 0);
}

static void play(char **words);
static void *play_thread(void *words) {
    play(words);
    return 0;
}

static void play(char **words) {
    for (; *words; words++) {
        char *word = *words, more[4400] = "";
        char copy[8192], *field[8] = {0};
        snprintf(copy, sizeof copy, "%s", word);
        int fields = 0;
        for (char *save, *part = strtok_r(copy, ":", &save); part && fields < 8; part = strtok_r(0, ":", &save)) field[fields++] = part;
        uint64_t n[8] = {0};
        for (int i = 1; i < fields; i++) n[i] = strtoull(field[i], 0, 0);
        errno = EAGAIN; /* a stale one that must not show */
        if (!strcmp(field[0], "alloc")) {
            struct kfd_alloc_memory a = {.bytes = n[2], .gpu_id = n[1], .flags = fields > 3 ? n[3] : 0xb0000001u};
            int result = ioctl(FD, KFD_ALLOC_MEMORY, &a);
            if (!result) handles[count++] = a.handle;
            say(word, result, more);
        } else if (!strcmp(field[0], "free")) {
            struct kfd_free_memory a = {handles[n[1]]};
            say(word, ioctl(FD, KFD_FREE_MEMORY, &a), more);
        } else if (!strcmp(field[0], "freehandle")) {
            struct kfd_free_memory a = {n[1]};
            say(word, ioctl(FD, KFD_FREE_MEMORY, &a), more);
        } else if (!strcmp(field[0], "avail")) {
            struct kfd_available_memory a = {0, n[1], 0};
            int result = ioctl(FD, KFD_AVAILABLE_MEMORY, &a);
            sprintf(more, " %llu", (unsigned long long)a.available);
            say(word, result, more);
        } else if (!strcmp(field[0], "queue")) {
            struct kfd_create_queue a = {.gpu_id = n[1], .type = fields > 2 ? n[2] : 2, .priority = fields > 3 ? n[3] : 7};
            int result = ioctl(FD, KFD_CREATE_QUEUE, &a);
            sprintf(more, " %u", a.queue_id);
            say(word, result, more);
        } else if (!strcmp(field[0], "mask")) {
            uint32_t mask[64] = {0};
            size_t length = strlen(field[3]);
            for (size_t i = 0; i < length && i / 8 < 64; i++) {
                char digit[2] = {field[3][length - 1 - i], 0};
                mask[i / 8] |= (uint32_t)strtoul(digit, 0, 16) << i % 8 * 4;
            }
            struct kfd_set_cu_mask a = {n[1], n[2], (uintptr_t)mask};
            say(word, ioctl(FD, KFD_SET_CU_MASK, &a), more);
        } else if (!strcmp(field[0], "badmask")) {
            struct kfd_set_cu_mask a = {n[1], 64, 16};
            say(word, ioctl(FD, KFD_SET_CU_MASK, &a), more);
        } else if (!strcmp(field[0], "update")) {
            struct kfd_update_queue a = {.queue_id = n[1], .percentage = 100, .priority = n[2]};
            int result = ioctl(FD, KFD_UPDATE_QUEUE, &a);
            sprintf(more, " %u", a.priority);
            say(word, result, more);
        } else if (!strcmp(field[0], "destroy")) {
            struct kfd_destroy_queue a = {n[1], 0};
            say(word, ioctl(FD, KFD_DESTROY_QUEUE, &a), more);
        } else if (!strcmp(field[0], "console")) {
            char byte[64];
            say(word, ioctl(FD, 0x4B16, byte), more);
        } else if (!strcmp(field[0], "bank")) {
            snprintf(more, sizeof more, "/sys/devices/virtual/kfd/kfd/topology/nodes/%s/mem_banks/0/properties", field[1]);
            FILE *file = fopen(more, "r");
            *more = 0;
            int result = !file;
            while (file && fgets(more + strlen(more), 200, file)) more[strlen(more) - 1] = ';';
            if (file) fclose(file);
            memmove(more + 1, more, strlen(more) + 1), more[0] = ' ';
            say(word, result, more);
        } else if (!strcmp(field[0], "cat")) {
            FILE *file = fopen(field[1], "r");
            if (file && fgets(more + 1, 200, file)) *more = ' ', more[strcspn(more, "\n")] = 0;
            say(word, !file, more);
            if (file) fclose(file);
        } else if (!strcmp(field[0], "put")) {
            FILE *file = fopen(field[1], "w");
            say(word, !file || fprintf(file, "%s:\t%s\n", field[2], field[3]) < 0 || fclose(file), more);
        } else if (!strcmp(field[0], "node")) {
            int fd = open(field[2], O_PATH);
            say(word, fd < 0 || dup2(fd, (int)n[1]) < 0 || close(fd), more);
        } else if (!strcmp(field[0], "dup")) {
            say(word, dup2((int)n[1], (int)n[2]) < 0, more);
        } else if (!strcmp(field[0], "close")) {
            say(word, close((int)n[1]), more);
        } else if (!strcmp(field[0], "gem")) {
            struct drm_gem_create a = {.bytes = n[2], .domains = fields > 3 ? n[3] : DRM_DOMAIN_VRAM};
            int result = ioctl((int)n[1], DRM_GEM_CREATE, &a);
            sprintf(more, " %u", *(uint32_t *)&a);
            say(word, result, more);
        } else if (!strcmp(field[0], "gemclose")) {
            struct drm_gem_close a = {n[2], 0};
            say(word, ioctl((int)n[1], DRM_GEM_CLOSE, &a), more);
        } else if (!strcmp(field[0], "info")) {
            uint64_t words[12] = {0};
            struct drm_info a = {.pointer = (uintptr_t)words, .bytes = sizeof words, .query = n[2]};
            int result = ioctl((int)n[1], DRM_INFO, &a);
            for (int i = 0; i < 12 && (i < 1 || words[i]); i++) sprintf(more + strlen(more), " %llu", (unsigned long long)words[i]);
            say(word, result, more);
        } else if (!strcmp(field[0], "userqueue")) {
            uint32_t a[32] = {1, 0, n[2]};
            say(word, ioctl((int)n[1], _IOC(_IOC_READ | _IOC_WRITE, 'd', 0x56, sizeof a), a), more);
        } else if (!strcmp(field[0], "criu")) {
            struct kfd_criu a = {.op = n[1]};
            say(word, ioctl(FD, KFD_CRIU, &a), more);
        } else if (!strcmp(field[0], "context")) {
            say(word, ioctl(FD, KFD_CREATE_PROCESS, 0), more);
        } else if (!strcmp(field[0], "env")) {
            printf("%s -> %s\n", word, getenv(field[1]) ? getenv(field[1]) : "none");
        } else if (!strcmp(field[0], "fork")) {
            fflush(stdout);
            pid_t child = fork();
            if (child) {
                waitpid(child, 0, 0);
                return;
            }
        } else if (!strcmp(field[0], "clone")) {
            fflush(stdout);
            long child = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
            if (child) {
                waitpid((pid_t)child, 0, 0);
                return;
            }
        } else if (!strcmp(field[0], "vfork")) {
            fflush(stdout);
            *words = self;
            vfork_and_exec(words);
            return;
        } else if (!strcmp(field[0], "thread")) {
            pthread_t thread;
            pthread_create(&thread, 0, play_thread, words + 1);
            pthread_join(thread, 0);
            return;
        } else if (!strcmp(field[0], "exec")) {
            fflush(stdout);
            *words = self;
            execv(self, words);
        } else if (!strcmp(field[0], "setuid")) {
            say(word, setresuid(n[1], n[1], n[1]), more);
        } else if (!strcmp(field[0], "stop")) {
            printf("ready\n");
            fflush(stdout);
            if (!fgets(more, sizeof more, stdin)) return;
        } else if (!strcmp(field[0], "kill")) {
            fflush(stdout);
            raise(SIGKILL);
        } else {
            printf("%s -> what?\n", word);
        }
        fflush(stdout);
    }
}

int main(int argc, char **argv) {
    self = argv[0];
    (void)argc;
    play(argv + 1);
    return 0;
}
