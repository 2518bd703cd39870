/* The thread that stands for the GPU: it works through this process's queues, one packet after another.
 *
 * Kernels are not run: their dispatch packets are completed, so a program goes on, with stale data. Barriers wait, and
 * SDMA packets do what they say: copies and fills move data, fences, polls, atomics, traps and timestamps keep programs
 * in step. Packet formats: HSA Platform System Architecture, and the sdma packet headers of the driver. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>
#include <stdlib.h>

#include "softkfd.h"

#define GFX90A_TARGET 90010 /* gfx_target_version */
#define GFX94_TARGET 90400
#define GFX103_TARGET 100300

/* Start of amd_signal_t (ROCr's amd_hsa_signal.h). */
struct signal {
  int64_t kind;
  _Atomic int64_t value;
  uint64_t mailbox;
  uint32_t event_id, reserved;
  uint64_t start, end;
};

enum { HEADER_VENDOR = 0, HEADER_INVALID = 1, HEADER_DISPATCH = 2, HEADER_BARRIER_AND = 3, HEADER_BARRIER_OR = 5 };
enum { VENDOR_BARRIER_VALUE = 2 };

uint64_t soft_gpu_clock(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC_RAW, &t);
  return (t.tv_sec * 1000000000ull + t.tv_nsec) / 10;
}

static void complete(uint64_t signal, uint64_t started) {
  struct signal *s = signal ? soft_gpu_pointer(signal, sizeof *s) : NULL;
  if (!s) return;
  s->start = started, s->end = soft_gpu_clock();
  atomic_fetch_sub(&s->value, 1);
  if (s->mailbox) {
    uint64_t *mailbox = soft_gpu_pointer(s->mailbox, sizeof *mailbox);
    if (mailbox) __atomic_store_n(mailbox, s->event_id, __ATOMIC_RELEASE);
    soft_set_event(s->event_id);
  }
}

static bool barrier_holds(int type, const uint64_t *packet) {
  int pending = 0, done = 0;
  for (int i = 1; i <= 5; i++) {
    if (!packet[i]) continue;
    struct signal *s = soft_gpu_pointer(packet[i], sizeof *s);
    if (s && atomic_load(&s->value) <= 0) done++;
    else pending++;
  }
  if (!pending && !done) return false;
  return type == HEADER_BARRIER_AND ? pending : !done;
}

static bool barrier_value_holds(const uint64_t *packet) {
  struct signal *s = soft_gpu_pointer(packet[1], sizeof *s);
  int64_t value = s ? atomic_load(&s->value) & (int64_t)packet[3] : 0, wanted = packet[2];
  switch ((uint32_t)packet[4]) {
  case 0: return value != wanted;
  case 1: return value == wanted;
  case 2: return value >= wanted;
  default: return value < wanted;
  }
}

static const char *name_of(int type) {
  switch (type) {
  case HEADER_VENDOR: return "vendor";
  case HEADER_DISPATCH: return "dispatch";
  case HEADER_BARRIER_AND: return "barrier_and";
  case HEADER_BARRIER_OR: return "barrier_or";
  default: return "other";
  }
}

/* True: something was done. */
static bool step_aql(struct soft_queue *q) {
  uint64_t *wptr = soft_gpu_pointer(q->wptr_addr, 8), *rptr = soft_gpu_pointer(q->rptr_addr, 8);
  bool did = false;
  if (!wptr || !rptr || !q->size || !soft_gpu_pointer(q->ring, 64)) return false;
  while (q->rptr < __atomic_load_n(wptr, __ATOMIC_ACQUIRE)) {
    uint64_t *packet = soft_gpu_pointer(q->ring + q->rptr * 64 % q->size, 64);
    if (!packet) break;
    uint16_t header = __atomic_load_n((uint16_t *)packet, __ATOMIC_ACQUIRE);
    int type = header & 0xff;
    uint64_t started = soft_gpu_clock(), completion = packet[7];
    if (type == HEADER_INVALID) break; /* the slot is taken but not yet written */
    if ((type == HEADER_BARRIER_AND || type == HEADER_BARRIER_OR) && barrier_holds(type, packet)) break;
    if (type == HEADER_VENDOR && (packet[0] >> 16 & 0xff) == VENDOR_BARRIER_VALUE && barrier_value_holds(packet)) break;
    const uint32_t *grid = (uint32_t *)packet + 3;
    bool dispatch = type == HEADER_DISPATCH;
    soft_log("\"op\":\"AQL\",\"q\":%d,\"gpu\":%u,\"idx\":%llu,\"type\":\"%s\",\"grid\":[%u,%u,%u]", (int)(q - soft_queues),
             q->gpu->gpu_id, (unsigned long long)q->rptr, name_of(type), dispatch ? grid[0] : 0, dispatch ? grid[1] : 0,
             dispatch ? grid[2] : 0);
    __atomic_store_n((uint16_t *)packet, HEADER_INVALID, __ATOMIC_RELEASE);
    __atomic_store_n(rptr, ++q->rptr, __ATOMIC_RELEASE);
    complete(completion, started);
    did = true;
  }
  return did;
}

static uint64_t address(const uint32_t *words) { return words[0] | (uint64_t)words[1] << 32; }

static bool poll_passes(const uint32_t *d) {
  uint32_t *at = soft_gpu_pointer(address(d + 1), 4);
  if (!at) return true;
  uint32_t value = __atomic_load_n(at, __ATOMIC_ACQUIRE) & d[4], wanted = d[3];
  switch (d[0] >> 28 & 7) {
  case 0: return true;
  case 1: return value < wanted;
  case 2: return value <= wanted;
  case 3: return value == wanted;
  case 4: return value != wanted;
  case 5: return value >= wanted;
  default: return value > wanted;
  }
}

static void sdma_copy(const uint32_t *d, uint64_t bytes) {
  void *from = soft_gpu_pointer(address(d + 3), bytes), *to = soft_gpu_pointer(address(d + 5), bytes);
  if (from && to) memcpy(to, from, bytes);
}

static void sdma_fill(const uint32_t *d, uint64_t bytes) {
  uint32_t *to = soft_gpu_pointer(address(d + 1), bytes);
  for (uint64_t i = 0; to && i < bytes / 4; i++) to[i] = d[3];
}

/* The bits of a copy's or fill's count: 30 from SDMA 4.4 (gfx90a, gfx94x) and 5.2 (gfx10.3) on, 22 before. As ROCr's
 * GpuAgent::CreateBlitSdma has it, which makes use of them since 6.1. Not all of 9.0.x: gfx908 and gfx90c have SDMA 4.0
 * to 4.2. Where a runtime keeps to 22 the other bits are 0, so that too many here harm nobody and too few cut a copy. */
static uint32_t count_mask(uint32_t gfx) {
  bool large = gfx == GFX90A_TARGET || (gfx >= GFX94_TARGET && gfx < FIRST_GFX10_TARGET) || gfx >= GFX103_TARGET;
  return large ? 0x3fffffff : 0x3fffff;
}

static bool step_sdma(struct soft_queue *q) {
  uint64_t *wptr = soft_gpu_pointer(q->wptr_addr, 8), *rptr = soft_gpu_pointer(q->rptr_addr, 8);
  uint32_t counted = count_mask(q->gpu->gfx);
  bool did = false;
  if (!wptr || !rptr || !q->size || !soft_gpu_pointer(q->ring, 64)) return false;
  while (q->rptr < __atomic_load_n(wptr, __ATOMIC_ACQUIRE)) {
    const uint32_t *d = soft_gpu_pointer(q->ring + q->rptr % q->size, 4);
    if (!d) break;
    uint32_t op = d[0] & 0xff, sub = d[0] >> 8 & 0xff, words = 1;
    uint64_t bytes = 0;
    const char *name = NULL;
    switch (op) {
    case 0: words = 1 + (d[0] >> 16 & 0x3fff); break; /* NOP with its padding */
    case 1:
      if (sub == 4) name = "copy_rect(skipped)", words = 13;
      else name = "copy", words = 7, bytes = (d[1] & counted) + 1ull, sdma_copy(d, bytes);
      break;
    case 5: {
      uint32_t *at = soft_gpu_pointer(address(d + 1), 4);
      if (at) __atomic_store_n(at, d[3], __ATOMIC_RELEASE);
      name = "fence", words = 4;
      break;
    }
    case 6: name = "trap", words = 2, soft_set_event(d[1] & 0xfffffff); break;
    case 8:
      if (d[0] >> 31 && !poll_passes(d)) return did;
      name = "poll", words = 6;
      break;
    case 10: {
      int64_t *at = soft_gpu_pointer(address(d + 1), 8);
      if (at) __atomic_fetch_add(at, (int64_t)address(d + 3), __ATOMIC_ACQ_REL);
      name = "atomic", words = 8;
      break;
    }
    case 11: name = "fill", words = 5, bytes = ((d[4] & counted) + 4ull) & ~3ull, sdma_fill(d, bytes); break;
    case 13: {
      uint64_t *at = soft_gpu_pointer(address(d + 1), 8);
      if (at) *at = soft_gpu_clock();
      name = "timestamp", words = 3;
      break;
    }
    case 14: name = "srbm_write", words = 3; break;
    case 17: name = "gcr", words = 5; break;
    default: /* its length is not known: drop all that was submitted rather than read on in the middle of a packet */
      soft_log("\"op\":\"SDMA_UNKNOWN\",\"q\":%d,\"dw\":\"%08x %08x\"", (int)(q - soft_queues), d[0], d[1]);
      q->rptr = __atomic_load_n(wptr, __ATOMIC_ACQUIRE);
      __atomic_store_n(rptr, q->rptr, __ATOMIC_RELEASE);
      return true;
    }
    if (name)
      soft_log("\"op\":\"SDMA\",\"q\":%d,\"gpu\":%u,\"pkt\":\"%s\",\"bytes\":%llu", (int)(q - soft_queues), q->gpu->gpu_id,
               name, (unsigned long long)bytes);
    q->rptr += words * 4;
    __atomic_store_n(rptr, q->rptr, __ATOMIC_RELEASE);
    did = true;
  }
  return did;
}

static bool step(struct soft_queue *q) {
  if (!q->used || !(q->percentage & 0xff)) return false;
  switch (q->type) {
  case KFD_IOC_QUEUE_TYPE_COMPUTE: return false; /* PM4 packets are accepted and not looked at */
  case KFD_IOC_QUEUE_TYPE_COMPUTE_AQL: return step_aql(q);
  default: return step_sdma(q);
  }
}

static void *work(void *unused) {
  (void)unused;
  for (int idle = 0;;) {
    bool did = false;
    soft_queues_lock();
    for (int i = 1; i < SOFT_MAX_QUEUES; i++) did |= step(&soft_queues[i]);
    soft_queues_unlock();
    idle = did ? 0 : idle + 1;
    /* There is no doorbell to hear, only write pointers to look at. Quick while a program is busy, then a poll a
     * millisecond: a program that holds memory and waits must not cost a core. */
    if (idle > 50) usleep(idle > 2000 ? 1000 : 50);
  }
  return NULL;
}

void soft_start_worker(void) {
  static int running_in; /* pid: a forked child needs a thread of its own */
  const char *wanted = getenv("SOFTKFD_EXEC");
  if (wanted && !soft_number(wanted, NULL, 10)) return;
  soft_queues_lock();
  if (running_in != getpid()) {
    pthread_t thread;
    running_in = getpid();
    if (!pthread_create(&thread, NULL, work, NULL)) pthread_detach(thread);
  }
  soft_queues_unlock();
}
