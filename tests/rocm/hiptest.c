/* A HIP program of many small parts, each named on the command line; prints every call with its answer. */
#include <hip/hip_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define HV (HIP_VERSION_MAJOR * 100 + HIP_VERSION_MINOR)
#define SHOW(x) ({ hipError_t e_ = (x); printf("  %-46s -> %s (%d)\n", #x, hipGetErrorName(e_), e_); fflush(stdout); e_; })
static const size_t G = 1ull << 30, M = 1ull << 20;

static void mi(const char *w) {
  size_t f = 0, t = 0;
  hipError_t e = hipMemGetInfo(&f, &t);
  printf("  [%s] MemGetInfo %s free=%zu (%.3f GiB) total=%zu (%.3f GiB)\n", w, hipGetErrorName(e), f, f / 1073741824., t, t / 1073741824.);
  fflush(stdout);
}
static void info(void) {
  int n = -1;
  SHOW(hipGetDeviceCount(&n));
  printf("  count=%d\n", n);
  for (int i = 0; i < n; i++) {
    char name[256] = "", bus[64] = "";
    size_t tot = 0;
    int cu = 0, warp = 0, l2 = 0, clk = 0, pools = 0, vmm = 0, managed = 0;
    hipDeviceGetName(name, sizeof name, i);
    hipDeviceGetPCIBusId(bus, sizeof bus, i);
    hipDeviceTotalMem(&tot, i);
    hipDeviceGetAttribute(&cu, hipDeviceAttributeMultiprocessorCount, i);
    hipDeviceGetAttribute(&warp, hipDeviceAttributeWarpSize, i);
    hipDeviceGetAttribute(&l2, hipDeviceAttributeL2CacheSize, i);
    hipDeviceGetAttribute(&clk, hipDeviceAttributeClockRate, i);
    hipDeviceGetAttribute(&pools, hipDeviceAttributeMemoryPoolsSupported, i);
#if HV >= 503
    hipDeviceGetAttribute(&vmm, hipDeviceAttributeVirtualMemoryManagementSupported, i);
#endif
    hipDeviceGetAttribute(&managed, hipDeviceAttributeManagedMemory, i);
    printf("  dev %d: %s bus=%s total=%zu MP=%d warp=%d l2=%d clk=%d pools=%d vmm=%d managed=%d\n", i, name, bus, tot, cu, warp, l2, clk, pools, vmm, managed);
#if HIP_VERSION_MAJOR >= 6 && !defined(RUNTIME_5)
    hipDeviceProp_t p;
    if (hipGetDeviceProperties(&p, i) == hipSuccess)
      printf("         prop: %s arch=%s totalGlobalMem=%zu MP=%d pci=%04x:%02x:%02x uuid=%.16s\n", p.name, p.gcnArchName, p.totalGlobalMem, p.multiProcessorCount, p.pciDomainID, p.pciBusID, p.pciDeviceID, p.uuid.bytes);
#endif
  }
}
static void mem(void) {
  void *p, *q;
  mi("start");
  SHOW(hipMalloc(&p, 10 * G));
  mi("after 10G");
  SHOW(hipMalloc(&q, 1));
  mi("after 1 byte");
  SHOW(hipFree(q));
  SHOW(hipFree(p));
  mi("after free");
}
static void oom(void) {
  void *p[64];
  size_t f = 0, t = 0;
  hipMemGetInfo(&f, &t);
  mi("start");
  SHOW(hipMalloc(&p[0], f - 4 * G));
  mi("left 4G");
  SHOW(hipMalloc(&p[1], 5 * G));
  printf("  lastError=%s\n", hipGetErrorName(hipGetLastError()));
  SHOW(hipMalloc(&p[2], 3 * G));
  mi("left 1G");
  SHOW(hipMalloc(&p[3], t * 2));
  SHOW(hipMallocManaged(&p[4], 5 * G, hipMemAttachGlobal));
  mi("after managed 5G");
  SHOW(hipFree(p[0]));
  mi("after free");
  SHOW(hipMalloc(&p[0], 5 * G));
}
static void streams(int per) {
  int n = 0;
  hipGetDeviceCount(&n);
  for (int i = 0; i < n; i++) {
    SHOW(hipSetDevice(i));
    for (int k = 0; k < per; k++) {
      hipStream_t s;
      SHOW(hipStreamCreate(&s));
      SHOW(hipStreamSynchronize(s));
    }
    SHOW(hipDeviceSynchronize());
  }
}
static void work(void) { /* force a queue to be used: event record + memset + copy */
  int n = 0;
  hipGetDeviceCount(&n);
  for (int i = 0; i < n; i++) {
    hipStream_t s;
    hipEvent_t a;
    char *p, h[4096], b[4096] = "";
    memset(h, 0x5a, sizeof h);
    printf(" device %d\n", i);
    hipSetDevice(i);
    SHOW(hipStreamCreate(&s));
    SHOW(hipEventCreate(&a));
    SHOW(hipEventRecord(a, s));
    SHOW(hipEventSynchronize(a));
    SHOW(hipMalloc((void **)&p, 64 * M));
    SHOW(hipMemcpy(p, h, sizeof h, hipMemcpyHostToDevice));
    SHOW(hipMemcpy(b, p, sizeof b, hipMemcpyDeviceToHost));
    printf("  roundtrip 4K %s\n", memcmp(h, b, sizeof h) ? "DIFFERS" : "equal");
    char *hb = malloc(32 * M), *hc = calloc(1, 32 * M);
    for (size_t j = 0; j < 32 * M; j++) hb[j] = j * 7 + (j >> 12);
    SHOW(hipMemcpyAsync(p, hb, 32 * M, hipMemcpyHostToDevice, s));
    SHOW(hipMemcpyAsync(hc, p, 32 * M, hipMemcpyDeviceToHost, s));
    SHOW(hipStreamSynchronize(s));
    printf("  roundtrip 32M %s\n", memcmp(hb, hc, 32 * M) ? "DIFFERS" : "equal");
    SHOW(hipMemsetAsync(p, 1, 4096, s));
    SHOW(hipStreamSynchronize(s));
    SHOW(hipFree(p));
    SHOW(hipStreamDestroy(s));
  }
}
static void async(void) {
  void *p, *q;
  hipStream_t s;
  SHOW(hipStreamCreate(&s));
  mi("start");
  SHOW(hipMallocAsync(&p, 2 * G, s));
  mi("mallocAsync 2G");
  SHOW(hipFreeAsync(p, s));
  SHOW(hipStreamSynchronize(s));
  mi("freeAsync");
  SHOW(hipMallocAsync(&q, 1 * G, s));
  mi("mallocAsync 1G");
  SHOW(hipFreeAsync(q, s));
  SHOW(hipStreamSynchronize(s));
  hipMemPool_t pool;
  SHOW(hipDeviceGetDefaultMemPool(&pool, 0));
  SHOW(hipMemPoolTrimTo(pool, 0));
  mi("trim");
  SHOW(hipMallocManaged(&p, 1 * G, hipMemAttachGlobal));
  mi("managed 1G");
  ((char *)p)[5] = 7;
  SHOW(hipFree(p));
  SHOW(hipHostMalloc(&p, 256 * M, 0));
  mi("hostMalloc");
  SHOW(hipHostFree(p));
  size_t pitch;
  SHOW(hipMallocPitch(&p, &pitch, 1000, 1000));
  mi("pitch");
  hipFree(p);
}
#if HV < 503
static void graph(void) {}
#else
static void graph(void) {
  hipGraph_t g;
  hipGraphExec_t x;
  hipGraphNode_t na, nf;
  hipStream_t s;
  SHOW(hipStreamCreate(&s));
  SHOW(hipGraphCreate(&g, 0));
  hipMemAllocNodeParams ap;
  memset(&ap, 0, sizeof ap);
  ap.poolProps.allocType = hipMemAllocationTypePinned;
  ap.poolProps.location.type = hipMemLocationTypeDevice;
  ap.poolProps.location.id = 0;
  ap.bytesize = 3 * G;
  mi("start");
  SHOW(hipGraphAddMemAllocNode(&na, g, 0, 0, &ap));
  mi("addAllocNode");
  SHOW(hipGraphAddMemFreeNode(&nf, g, &na, 1, ap.dptr));
  SHOW(hipGraphInstantiate(&x, g, 0, 0, 0));
  mi("instantiate");
  SHOW(hipGraphLaunch(x, s));
  SHOW(hipStreamSynchronize(s));
  mi("launch");
  SHOW(hipGraphExecDestroy(x));
  SHOW(hipGraphDestroy(g));
  mi("destroy");
  SHOW(hipDeviceGraphMemTrim(0));
  mi("graphMemTrim");
}
#endif
static void vmm(void) {
  hipMemAllocationProp pr;
  memset(&pr, 0, sizeof pr);
  pr.type = hipMemAllocationTypePinned;
  pr.location.type = hipMemLocationTypeDevice;
  size_t gran = 0;
  SHOW(hipMemGetAllocationGranularity(&gran, &pr, hipMemAllocationGranularityMinimum));
  printf("  granularity %zu\n", gran);
  hipMemGenericAllocationHandle_t h;
  void *va = 0;
  mi("start");
  SHOW(hipMemAddressReserve(&va, 2 * G, 0, 0, 0));
  mi("reserve");
  SHOW(hipMemCreate(&h, 2 * G, &pr, 0));
  mi("create 2G");
  SHOW(hipMemMap(va, 2 * G, 0, h, 0));
  hipMemAccessDesc d = {pr.location, hipMemAccessFlagsProtReadWrite};
  SHOW(hipMemSetAccess(va, 2 * G, &d, 1));
  SHOW(hipMemUnmap(va, 2 * G));
  SHOW(hipMemRelease(h));
  mi("release");
  SHOW(hipMemAddressFree(va, 2 * G));
}
static void cumask(void) {
  hipStream_t s;
  uint32_t m[10] = {0xffff, 0, 0xff}, r[10] = {0};
  SHOW(hipExtStreamCreateWithCUMask(&s, 3, m));
  SHOW(hipExtStreamGetCUMask(s, 10, r));
  for (int i = 9; i >= 0; i--) printf("%08x", r[i]);
  printf("\n");
  SHOW(hipStreamSynchronize(s));
}
static void ipcsrv(void) {
  char *p, b[64];
  hipIpcMemHandle_t h;
  SHOW(hipMalloc((void **)&p, 1 * G));
  SHOW(hipIpcGetMemHandle(&h, p));
  FILE *f = fopen("/dev/shm/softkfd-ipc.tmp", "w");
  fwrite(&h, sizeof h, 1, f);
  fclose(f);
  rename("/dev/shm/softkfd-ipc.tmp", "/dev/shm/softkfd-ipc");
  sleep(4);
  SHOW(hipMemcpy(b, p, sizeof b, hipMemcpyDeviceToHost));
}
static void ipccli(void) {
  void *p;
  hipIpcMemHandle_t h;
  FILE *f = fopen("/dev/shm/softkfd-ipc", "r");
  if (!f || fread(&h, sizeof h, 1, f) != 1) return;
  mi("before open");
  SHOW(hipIpcOpenMemHandle(&p, h, hipIpcMemLazyEnablePeerAccess));
  mi("after open");
  SHOW(hipIpcCloseMemHandle(p));
}
int main(int c, char **v) {
  for (int i = 1; i < c; i++) {
    printf("== %s\n", v[i]);
    if (!strcmp(v[i], "info")) info();
    if (!strcmp(v[i], "mem")) mem();
    if (!strcmp(v[i], "oom")) oom();
    if (!strcmp(v[i], "streams")) streams(1);
    if (!strcmp(v[i], "streams6")) streams(6);
    if (!strcmp(v[i], "work")) work();
    if (!strcmp(v[i], "async")) async();
    if (!strcmp(v[i], "graph")) graph();
    if (!strcmp(v[i], "vmm")) vmm();
    if (!strcmp(v[i], "cumask")) cumask();
    if (!strcmp(v[i], "ipcsrv")) ipcsrv();
    if (!strcmp(v[i], "ipccli")) ipccli();
    if (!strcmp(v[i], "dev1")) SHOW(hipSetDevice(1));
    if (!strcmp(v[i], "hold")) { void *p; SHOW(hipMalloc(&p, 50 * G)); mi("holding"); sleep(5); }
  }
  printf("done\n");
  return 0;
}
