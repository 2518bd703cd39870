/* The KFD's event stream (kfd_smi_events.c), one for each ask.
 *
 * The driver makes an anonymous file that takes a mask and gives lines. Here it is one end of a socket pair; a thread holds
 * the other. It follows the file smi/<gpu_id> of the root from where that ends at the time of the ask: what somebody who
 * plays the driver appends there ("3 1 test\n": before a reset) is passed on if the mask has the event's bit, as
 * "<number in hex> <text>\n". */
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "softkfd.h"

#define LOOK_MS 10

struct stream {
  int end, file;
  uint32_t gpu_id;
  off_t at; /* the next line begins here */
  uint64_t mask;
};

/* False: closed by all who had it. Logged here and not at the ask, so that who has seen it may send what the mask admits. */
static bool take_mask(struct stream *s, int flags) {
  ssize_t n = recv(s->end, &s->mask, sizeof s->mask, flags);
  if (n > 0) soft_log("\"op\":\"SMI_EVENTS\",\"gpu\":%u,\"mask\":\"%llx\"", s->gpu_id, (unsigned long long)s->mask);
  return n > 0 || (n < 0 && errno == EAGAIN);
}

static void pass_lines(struct stream *s) {
  char block[4096], *line = block, *end;
  ssize_t n = pread(s->file, block, sizeof block - 1, s->at);
  if (n <= 0) return;
  take_mask(s, MSG_DONTWAIT); /* one that was written before these lines were */
  block[n] = 0;
  for (; (end = strchr(line, '\n')); line = end + 1) {
    unsigned long event = soft_number(line, NULL, 16);
    if (event && event <= 64 && s->mask >> (event - 1) & 1) send(s->end, line, end + 1 - line, MSG_NOSIGNAL);
    s->at += end + 1 - line;
  }
}

static void *follow(void *argument) {
  struct stream *s = argument;
  for (;;) {
    struct pollfd p = {s->end, POLLIN, 0};
    int ready = poll(&p, 1, LOOK_MS);
    if (ready < 0 && errno != EINTR) break;
    if (ready > 0 && !take_mask(s, 0)) break;
    pass_lines(s);
  }
  close(s->end);
  close(s->file);
  free(s);
  return NULL;
}

int soft_smi_events(struct kfd_ioctl_smi_events_args *a) {
  char path[PATH_MAX];
  int ends[2];
  pthread_t thread;
  int error = soft_refusal("SMI_EVENTS");
  if (!error && !soft_gpu_by_id(a->gpuid)) error = EINVAL;
  if (error) return error;
  struct stream *s = calloc(1, sizeof *s);
  if (!s) return ENOMEM;
  snprintf(path, sizeof path, "%s/smi/%u", soft_root, a->gpuid);
  s->file = soft_open(path, O_RDONLY | O_CREAT);
  if (s->file < 0 || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends)) {
    if (s->file >= 0) close(s->file);
    free(s);
    return ENOMEM;
  }
  s->at = lseek(s->file, 0, SEEK_END);
  s->end = ends[1];
  s->gpu_id = a->gpuid;
  if (pthread_create(&thread, NULL, follow, s)) {
    close(ends[0]), close(ends[1]), close(s->file);
    free(s);
    return ENOMEM;
  }
  pthread_detach(thread);
  a->anon_fd = ends[0];
  return 0;
}
