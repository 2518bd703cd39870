/* Takes memory through HIP until it is refused, and prints each answer as a line of JSON: what kfdclient does, by way of
 * the whole ROCm runtime.
 *
 *   --gpu N       HIP device (0)
 *   --step BYTES  how much to ask for at a time (1 GiB); K, M, G for powers of 1024
 *   --count N     how often (until refused)
 *   --free        give everything back before the end
 *   --hold        then wait for a line on standard input (or its end), or for a signal
 *   --stream      create a stream first: queues, and with them CU masks
 *
 * Exit status: 0 the last request was granted or refused as out of memory after others were granted, 1 something else
 * went wrong, 2 wrong use, 3 no such device. */
#include <getopt.h>
#include <hip/hip_runtime_api.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX_BUFFERS 4096

static size_t size_of(const char *text) {
  char *end;
  size_t n = strtoull(text, &end, 0);
  switch (*end) {
  case 'T': n <<= 10; /* fall through */
  case 'G': n <<= 10; /* fall through */
  case 'M': n <<= 10; /* fall through */
  case 'K': n <<= 10;
  }
  return n;
}

static size_t free_bytes(void) {
  size_t free = 0, total = 0;
  return hipMemGetInfo(&free, &total) == hipSuccess ? free : 0;
}

int main(int argc, char **argv) {
  static const struct option options[] = {{"gpu", 1, 0, 'g'}, {"step", 1, 0, 's'}, {"count", 1, 0, 'n'}, {"free", 0, 0, 'f'},
                                          {"hold", 0, 0, 'h'}, {"stream", 0, 0, 't'}, {0}};
  static void *buffers[MAX_BUFFERS];
  int wanted = 0, devices = 0, granted = 0;
  long count = -1;
  size_t step = 1ul << 30, held = 0;
  bool give_back = false, hold = false, stream = false;
  for (int o; (o = getopt_long(argc, argv, "", options, NULL)) != -1;) switch (o) {
    case 'g': wanted = atoi(optarg); break;
    case 's': step = size_of(optarg); break;
    case 'n': count = strtol(optarg, NULL, 0); break;
    case 'f': give_back = true; break;
    case 'h': hold = true; break;
    case 't': stream = true; break;
    default: return 2;
    }
  if (optind < argc || !step) return fprintf(stderr, "hipclient: what it takes is written at the head of its source\n"), 2;
  setvbuf(stdout, NULL, _IOLBF, 0);

  hipError_t error = hipGetDeviceCount(&devices);
  printf("{\"op\":\"open\",\"result\":\"%s\",\"devices\":%d}\n", hipGetErrorName(error), devices);
  for (int i = 0; i < devices; i++) {
    char name[256] = "", bus[64] = "";
    size_t total = 0;
    int cus = 0;
    error = hipDeviceGetName(name, sizeof name, i);
    if (!error) error = hipDeviceGetPCIBusId(bus, sizeof bus, i);
    if (!error) error = hipDeviceTotalMem(&total, i);
    if (!error) error = hipDeviceGetAttribute(&cus, hipDeviceAttributeMultiprocessorCount, i);
    printf("{\"op\":\"gpu\",\"index\":%d,\"result\":\"%s\",\"name\":\"%s\",\"pci\":\"%s\",\"total\":%zu,\"cus\":%d}\n", i,
           hipGetErrorName(error), name, bus, total, cus);
  }
  if (wanted < 0 || wanted >= devices) return printf("{\"op\":\"end\",\"result\":\"no such device\"}\n"), 3;
  error = hipSetDevice(wanted);
  if (!error && stream) {
    hipStream_t s;
    error = hipStreamCreate(&s);
    if (!error) error = hipStreamSynchronize(s);
    printf("{\"op\":\"stream\",\"result\":\"%s\"}\n", hipGetErrorName(error));
  }
  if (error) return 1;
  for (long i = 0; i != count && granted < MAX_BUFFERS && !error; i++) {
    void *p = NULL;
    error = hipMalloc(&p, step);
    if (!error) buffers[granted++] = p, held += step;
    printf("{\"op\":\"alloc\",\"size\":%zu,\"result\":\"%s\",\"held\":%zu,\"free\":%zu}\n", step, hipGetErrorName(error), held,
           free_bytes());
  }
  bool expected = !error || (error == hipErrorOutOfMemory && granted);
  if (hold) {
    char line[64];
    printf("{\"op\":\"hold\",\"held\":%zu}\n", held);
    char *ignored = fgets(line, sizeof line, stdin);
    (void)ignored;
  }
  for (int i = 0; give_back && i < granted; i++) {
    if (hipFree(buffers[i])) expected = false;
    else held -= step;
  }
  printf("{\"op\":\"end\",\"granted\":%d,\"held\":%zu,\"free\":%zu}\n", granted, held, free_bytes());
  return expected ? 0 : 1;
}
