/* Queues and events: per process, as in the driver. Checks and error numbers follow kfd_chardev.c,
 * kfd_process_queue_manager.c and kfd_mqd_manager.c, as far as user space can tell them apart. A CU mask is checked and
 * logged and has no other effect: nothing is executed here. */
#include <pthread.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "softkfd.h"

#define MAX_PRIORITY 15
#define MAX_PERCENTAGE 100
#define MAX_CU_MASK_BITS 1024

struct soft_queue soft_queues[SOFT_MAX_QUEUES]; /* 0 is never used */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

void soft_queues_lock(void) { pthread_mutex_lock(&mutex); }
void soft_queues_unlock(void) { pthread_mutex_unlock(&mutex); }

static int check_settings(uint32_t percentage, uint32_t priority, uint64_t ring_size) {
  /* Bits 8 to 15 of the percentage name an XCC for PM4 queues. */
  if ((percentage & 0xff) > MAX_PERCENTAGE || priority > MAX_PRIORITY) return EINVAL;
  return ring_size & (ring_size - 1) ? EINVAL : 0;
}

static void publish(int id, const struct soft_queue *q) {
  char path[256];
  int n = soft_process_folder(path, sizeof path);
  n += snprintf(path + n, sizeof path - n, "/queues/%d", id), soft_put_folder(path);
  snprintf(path + n, sizeof path - n, "/gpuid"), soft_put(path, q->gpu->gpu_id);
  /* As the KFD numbers them inside, where AQL is a format and no type. */
  snprintf(path + n, sizeof path - n, "/type"),
      soft_put(path, q->type == KFD_IOC_QUEUE_TYPE_COMPUTE_AQL ? KFD_IOC_QUEUE_TYPE_COMPUTE : q->type);
  snprintf(path + n, sizeof path - n, "/size"), soft_put(path, q->size);
}

int soft_create_queue(struct kfd_ioctl_create_queue_args *a) {
  struct soft_gpu *g = soft_gpu_by_id(a->gpu_id);
  int id = 0, error = soft_refusal("CREATE_QUEUE");
  if (!error) error = g ? check_settings(a->queue_percentage, a->queue_priority, a->ring_size) : EINVAL;
  if (!error) {
    soft_queues_lock();
    for (id = 1; id < SOFT_MAX_QUEUES && soft_queues[id].used;) id++;
    if (id == SOFT_MAX_QUEUES) error = ENOMEM;
    else
      soft_queues[id] = (struct soft_queue){.used = 1, .type = a->queue_type, .gpu = g, .ring = a->ring_base_address,
                                            .size = a->ring_size, .rptr_addr = a->read_pointer_address,
                                            .wptr_addr = a->write_pointer_address, .percentage = a->queue_percentage};
    soft_queues_unlock();
  }
  if (!error) {
    a->queue_id = id;
    /* The GPU goes above bit 32: libhsakmt 5.2 takes all low bits for the place within the page. */
    a->doorbell_offset = (uint64_t)(g - soft_gpus) << 32 | 8ull * id;
    publish(id, &soft_queues[id]);
    soft_start_worker();
  }
  soft_log("\"op\":\"CREATE_QUEUE\",\"gpu\":%u,\"q\":%d,\"type\":%u,\"prio\":%u,\"pct\":%u,\"ring\":%u,\"err\":%d",
           a->gpu_id, id, a->queue_type, a->queue_priority, a->queue_percentage, a->ring_size, error);
  return error;
}

int soft_destroy_queue(uint32_t id) {
  char path[PATH_MAX];
  soft_queues_lock();
  bool known = id < SOFT_MAX_QUEUES && soft_queues[id].used;
  if (known) soft_queues[id].used = 0;
  soft_queues_unlock();
  if (known) {
    static const char *const files[] = {"/gpuid", "/type", "/size", ""};
    char folder[64];
    soft_process_folder(folder, sizeof folder);
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
      snprintf(path, sizeof path, "%s%s/queues/%u%s", soft_root, folder, id, files[i]);
      if (*files[i]) unlink(path);
      else rmdir(path);
    }
  }
  soft_log("\"op\":\"DESTROY_QUEUE\",\"q\":%u,\"err\":%d", id, known ? 0 : EINVAL);
  return known ? 0 : EINVAL;
}

int soft_update_queue(struct kfd_ioctl_update_queue_args *a) {
  int error = soft_refusal("UPDATE_QUEUE");
  if (!error) error = check_settings(a->queue_percentage, a->queue_priority, a->ring_size);
  if (!error) {
    soft_queues_lock();
    if (a->queue_id >= SOFT_MAX_QUEUES || !soft_queues[a->queue_id].used) error = EFAULT;
    else soft_queues[a->queue_id].percentage = a->queue_percentage;
    soft_queues_unlock();
  }
  soft_log("\"op\":\"UPDATE_QUEUE\",\"q\":%u,\"pct\":%u,\"prio\":%u,\"err\":%d", a->queue_id, a->queue_percentage,
           a->queue_priority, error);
  return error;
}

int soft_set_cu_mask(struct kfd_ioctl_set_cu_mask_args *a) {
  const uint32_t *mask = (const void *)a->cu_mask_ptr;
  uint32_t bits = a->num_cu_mask, set = 0, gpu_id = 0, node = 0;
  char hex[MAX_CU_MASK_BITS / 4 + 1] = "";
  int error = soft_refusal("SET_CU_MASK");
  if (!error && (!bits || bits % 32)) error = EINVAL;
  if (bits > MAX_CU_MASK_BITS) bits = MAX_CU_MASK_BITS; /* accepted, and cut */
  if (!error) {
    soft_queues_lock();
    const struct soft_queue *q = a->queue_id < SOFT_MAX_QUEUES ? &soft_queues[a->queue_id] : NULL;
    if (!q || !q->used) error = EFAULT;
    else {
      gpu_id = q->gpu->gpu_id, node = q->gpu->node;
      for (uint32_t i = 0; i < bits / 32; i++) {
        set += __builtin_popcount(mask[i]);
        snprintf(hex + 8 * i, 9, "%08x", mask[bits / 32 - 1 - i]);
        if (q->gpu->gfx >= FIRST_GFX10_TARGET && (mask[i] & 0x55555555) != (mask[i] >> 1 & 0x55555555)) error = EINVAL;
      }
    }
    soft_queues_unlock();
  }
  soft_log("\"op\":\"SET_CU_MASK\",\"gpu\":%u,\"node\":%u,\"q\":%u,\"bits\":%u,\"set\":%u,\"mask\":\"%s\",\"err\":%d",
           gpu_id, node, a->queue_id, a->num_cu_mask, set, hex, error);
  return error;
}

/* ---------------------------------------------------------------------------------------------------------- events */

#define MAX_EVENTS 4096
#define EVENT_PAGE_OFFSET (12ull << 20) /* in the file behind /dev/kfd */
static struct {
  bool used, signaled, auto_reset;
  uint32_t type, waiting; /* waiting: callers that wait for it now */
  uint64_t age, last_set; /* last_set: `sets` as it was set last */
} events[MAX_EVENTS];
static uint64_t sets; /* of all events, since the start */
static pthread_mutex_t event_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t event_change = PTHREAD_COND_INITIALIZER;

int soft_create_event(struct kfd_ioctl_create_event_args *a) {
  uint32_t id = 1;
  pthread_mutex_lock(&event_mutex);
  while (id < MAX_EVENTS && events[id].used) id++;
  if (id < MAX_EVENTS)
    events[id].used = true, events[id].signaled = false, events[id].auto_reset = a->auto_reset,
    events[id].type = a->event_type, events[id].age = 1;
  pthread_mutex_unlock(&event_mutex);
  if (id == MAX_EVENTS) return ENOSPC;
  a->event_id = a->event_slot_index = a->event_trigger_data = id;
  if (!a->event_page_offset) a->event_page_offset = EVENT_PAGE_OFFSET;
  return 0;
}

void soft_destroy_event(uint32_t id) {
  pthread_mutex_lock(&event_mutex);
  if (id < MAX_EVENTS) events[id].used = false;
  pthread_cond_broadcast(&event_change);
  pthread_mutex_unlock(&event_mutex);
}

void soft_set_event(uint32_t id) {
  if (!id || id >= MAX_EVENTS) return;
  pthread_mutex_lock(&event_mutex);
  if (events[id].used) {
    /* As in kfd_events.c: whoever waits now is woken, all of them, and only what nobody waits for is kept for the next
     * one. ROCr has two threads on one event when it destroys a queue: woken one alone, it waits for ever. */
    events[id].signaled = !events[id].auto_reset || !events[id].waiting;
    events[id].age++, events[id].last_set = ++sets;
  }
  pthread_cond_broadcast(&event_change);
  pthread_mutex_unlock(&event_mutex);
}

void soft_reset_event(uint32_t id) {
  pthread_mutex_lock(&event_mutex);
  if (id < MAX_EVENTS) events[id].signaled = false;
  pthread_mutex_unlock(&event_mutex);
}

/* A caller that passes the age it last saw is woken by every later one, so that no signal falls between two waits. */
static bool counts_age(const struct kfd_event_data *d) {
  return events[d->event_id].type == KFD_IOC_EVENT_SIGNAL && d->signal_event_data.last_event_age;
}

int soft_wait_events(struct kfd_ioctl_wait_events_args *a) {
  struct kfd_event_data *d = (void *)a->events_ptr;
  struct timespec until;
  int error = 0;
  if (a->num_events > MAX_EVENTS) return EINVAL;
  bool activated[MAX_EVENTS];
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += a->timeout / 1000;
  until.tv_nsec += a->timeout % 1000 * 1000000l;
  if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
  pthread_mutex_lock(&event_mutex);
  uint64_t entered = sets;
  for (uint32_t i = 0; i < a->num_events; i++) {
    uint32_t id = d[i].event_id;
    if (!id || id >= MAX_EVENTS) continue;
    activated[i] = events[id].signaled;
    if (events[id].auto_reset) events[id].signaled = false;
    events[id].waiting++;
  }
  for (;;) {
    uint32_t hits = 0, unknown = 0;
    for (uint32_t i = 0; i < a->num_events; i++) {
      uint32_t id = d[i].event_id;
      if (!id || id >= MAX_EVENTS || !events[id].used) unknown++;
      else
        hits += activated[i] || events[id].last_set > entered ||
                (counts_age(&d[i]) && d[i].signal_event_data.last_event_age != events[id].age);
    }
    if (unknown) {
      a->wait_result = KFD_IOC_WAIT_RESULT_FAIL;
      error = EIO;
      break;
    }
    if (hits && (!a->wait_for_all || hits == a->num_events)) {
      for (uint32_t i = 0; i < a->num_events; i++)
        if (counts_age(&d[i])) d[i].signal_event_data.last_event_age = events[d[i].event_id].age;
      a->wait_result = KFD_IOC_WAIT_RESULT_COMPLETE;
      break;
    }
    if (a->timeout == UINT32_MAX) pthread_cond_wait(&event_change, &event_mutex);
    else if (!a->timeout || pthread_cond_timedwait(&event_change, &event_mutex, &until) == ETIMEDOUT) {
      a->wait_result = KFD_IOC_WAIT_RESULT_TIMEOUT;
      break;
    }
  }
  for (uint32_t i = 0; i < a->num_events; i++)
    if (d[i].event_id && d[i].event_id < MAX_EVENTS) events[d[i].event_id].waiting--;
  pthread_mutex_unlock(&event_mutex);
  return error;
}

/* A forked child has none of its parent's queues, and must not work through their rings. */
void soft_queues_forget(void) {
  memset(soft_queues, 0, sizeof soft_queues);
  memset(events, 0, sizeof events);
  pthread_mutex_init(&mutex, NULL);
  pthread_mutex_init(&event_mutex, NULL);
  pthread_cond_init(&event_change, NULL);
}
