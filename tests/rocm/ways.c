/* Every way in which a HIP program comes by VRAM, asks how much there is, or gets a queue: each is a word on the command
 * line, done in order; each answer is a line of JSON. What it really took is for the simulated KFD to say, not for us.
 *
 *   take:WAY:MIB[:COUNT]   COUNT times (64) MIB by WAY (see the table at the end), until refused; prints the last answer
 *   drop                   give back what the last `take` took
 *   copy:MIB               that much to the GPU and back by one request each way: whether it is what it was
 *   questions              what each question about capacity answers, for each device
 *   streams:N              N streams on each device, each made to work
 *   mask:HEX               a stream with a CU mask, lowest 32 bits last; on each device
 *   priority               a stream of lowest, one of highest priority
 *   device:N               hipSetDevice
 *   setenv:A=B, unsetenv:A of this process
 *   fork                   the rest is done by a child; its end is waited for
 *   quit                   end without the runtime's own end
 *   exec                   the rest is done by a new image of this program
 *   wait                   for a line on standard input; prints that it waits
 *   export / import:FILE   an IPC handle of 256 MiB written to, and read from, FILE
 *   cooperative:HOW:BLOCKS a cooperative launch with that grid, by HOW (see the table): of a kernel of a module, or by
 *                          the address of a host function as compilers do, on the current device or on all
 *   occupancy              blocks per multiprocessor times multiprocessors
 *   late:HOW:MIB:TAKEN     a graph that allocates MIB (HOW: plain, spt: launched by the _spt form, child: in a child graph), made
 *                          ready; TAKEN MIB taken; launched; TAKEN given back; launched
 *   proc:HOW               multiprocessors asked by way of dlsym (on a handle), default (RTLD_DEFAULT), hip (hipGetProcAddress) */
#include <dlfcn.h>
#include <fcntl.h>
#include <hip/hip_runtime_api.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define HV (HIP_VERSION_MAJOR * 100 + HIP_VERSION_MINOR)
#define MIB ((size_t)1 << 20)
#define MOST 256

static void *taken[MOST];
static int takes;
static hipStream_t stream;
static void (*give_back)(void *);

static void say(const char *op, hipError_t error) {
  printf("{\"op\":\"%s\",\"error\":\"%s\"}\n", op, hipGetErrorName(error));
  fflush(stdout);
}

/* ------------------------------------------------------------------------------------------------------ taking VRAM */

static hipStream_t a_stream(void) {
  if (!stream && hipStreamCreate(&stream)) stream = NULL;
  return stream;
}
static int device(void) {
  int n = 0;
  (void)hipGetDevice(&n);
  return n;
}
/* Rows of 4 KiB: a GiB is 4 KiB x 262144. Images have limits of 16384 a side: 16384 texels of 16 bytes are 256 KiB a row. */
static const struct hipChannelFormatDesc texel = {32, 32, 32, 32, hipChannelFormatKindFloat};

static void by_free(void *p) { (void)hipFree(p); }
static void by_host_free(void *p) { (void)hipHostFree(p); }
static void by_free_array(void *p) { (void)hipFreeArray(p); }
static void by_array_destroy(void *p) { (void)hipArrayDestroy(p); }
static void by_free_async(void *p) { (void)hipFreeAsync(p, a_stream()); (void)hipStreamSynchronize(a_stream()); }
static void by_mipmap_free(void *p) { (void)hipFreeMipmappedArray(p); }
static void by_mipmap_destroy(void *p) { (void)hipMipmappedArrayDestroy(p); }
static void by_nothing(void *p) { (void)p; }

static hipError_t t_malloc(void **p, size_t n) { return hipMalloc(p, n); }
static hipError_t t_ext(void **p, size_t n) { return hipExtMallocWithFlags(p, n, hipDeviceMallocDefault); }
static hipError_t t_fine(void **p, size_t n) { return hipExtMallocWithFlags(p, n, hipDeviceMallocFinegrained); }
static hipError_t t_uncached(void **p, size_t n) { return hipExtMallocWithFlags(p, n, 3); }
static hipError_t t_pitch(void **p, size_t n) {
  size_t pitch;
  return hipMallocPitch(p, &pitch, 4096, n / 4096);
}
static hipError_t t_mem_pitch(void **p, size_t n) {
  size_t pitch;
  return hipMemAllocPitch((hipDeviceptr_t *)p, &pitch, 4096, n / 4096, 16);
}
static hipError_t t_3d(void **p, size_t n) {
  hipPitchedPtr got;
  hipError_t e = hipMalloc3D(&got, (hipExtent){4096, 256, n / MIB});
  *p = got.ptr;
  return e;
}
static hipError_t t_array(void **p, size_t n) { return hipMallocArray((hipArray_t *)p, &texel, 16384, n / (16384 * 16), 0); }
static hipError_t t_array3(void **p, size_t n) {
  return hipMalloc3DArray((hipArray_t *)p, &texel, (hipExtent){256, 256, n / MIB}, 0);
}
static hipError_t t_array_create(void **p, size_t n) {
  HIP_ARRAY_DESCRIPTOR d = {16384, n / (16384 * 16), HIP_AD_FORMAT_FLOAT, 4};
  return hipArrayCreate((hipArray_t *)p, &d);
}
static hipError_t t_array3_create(void **p, size_t n) {
  HIP_ARRAY3D_DESCRIPTOR d = {256, 256, n / MIB, HIP_AD_FORMAT_FLOAT, 4, 0};
  return hipArray3DCreate((hipArray_t *)p, &d);
}
static hipError_t t_mipmap(void **p, size_t n) {
  return hipMallocMipmappedArray((hipMipmappedArray_t *)p, &texel, (hipExtent){16384, n / (16384 * 16), 0}, 1, 0);
}
static hipError_t t_mipmap_create(void **p, size_t n) {
  HIP_ARRAY3D_DESCRIPTOR d = {16384, n / (16384 * 16), 0, HIP_AD_FORMAT_FLOAT, 4, 0};
  return hipMipmappedArrayCreate((hipMipmappedArray_t *)p, &d, 1);
}
static hipError_t t_managed(void **p, size_t n) { return hipMallocManaged(p, n, hipMemAttachGlobal); }
static hipError_t t_host(void **p, size_t n) { return hipHostMalloc(p, n, 0); }
static hipError_t t_async(void **p, size_t n) {
  hipError_t e = hipMallocAsync(p, n, a_stream());
  return e ? e : hipStreamSynchronize(a_stream());
}
static hipError_t t_pool(void **p, size_t n) {
  static hipMemPool_t pool;
  if (!pool) {
    hipMemPoolProps want = {.allocType = hipMemAllocationTypePinned, .location = {hipMemLocationTypeDevice, device()}};
    hipError_t e = hipMemPoolCreate(&pool, &want);
    if (e) return e;
  }
  hipError_t e = hipMallocFromPoolAsync(p, n, pool, a_stream());
  return e ? e : hipStreamSynchronize(a_stream());
}
#if HV >= 503
static hipMemAllocationProp on_device(void) {
  return (hipMemAllocationProp){.type = hipMemAllocationTypePinned, .location = {hipMemLocationTypeDevice, device()}};
}
static hipError_t t_create(void **p, size_t n) {
  hipMemAllocationProp want = on_device();
  return hipMemCreate((hipMemGenericAllocationHandle_t *)p, n, &want, 0);
}
static void by_release(void *p) { (void)hipMemRelease((hipMemGenericAllocationHandle_t)p); }
static hipError_t t_map(void **p, size_t n) { /* created, mapped, and released at once: held by the mapping alone */
  hipMemAllocationProp want = on_device();
  hipMemGenericAllocationHandle_t h;
  hipError_t e = hipMemAddressReserve(p, n, 0, 0, 0);
  if (e) return e;
  e = hipMemCreate(&h, n, &want, 0);
  if (e) {
    (void)hipMemAddressFree(*p, n);
    return e;
  }
  e = hipMemMap(*p, n, 0, h, 0);
  hipMemAccessDesc access = {want.location, hipMemAccessFlagsProtReadWrite};
  if (!e) e = hipMemSetAccess(*p, n, &access, 1);
  (void)hipMemRelease(h);
  return e;
}
static size_t mapped_bytes;
static void by_unmap(void *p) {
  (void)hipMemUnmap(p, mapped_bytes);
  (void)hipMemAddressFree(p, mapped_bytes);
}
static hipMemAllocNodeParams alloc_node(size_t n) {
  hipMemAllocNodeParams want;
  memset(&want, 0, sizeof want);
  want.poolProps.allocType = hipMemAllocationTypePinned;
  want.poolProps.location = (hipMemLocation){hipMemLocationTypeDevice, device()};
  want.bytesize = n;
  return want;
}
static hipError_t launch(hipGraph_t g) {
  hipGraphExec_t x;
  hipError_t e = hipGraphInstantiate(&x, g, 0, 0, 0);
  if (!e) e = hipGraphLaunch(x, a_stream());
  return e ? e : hipStreamSynchronize(a_stream());
}
static hipError_t t_graph(void **p, size_t n) {
  hipGraph_t g;
  hipGraphNode_t node;
  hipMemAllocNodeParams want = alloc_node(n);
  if (!a_stream()) return hipErrorUnknown;
  hipError_t e = hipGraphCreate(&g, 0);
  if (!e) e = hipGraphAddMemAllocNode(&node, g, 0, 0, &want);
  *p = want.dptr;
  return e ? e : launch(g);
}
static void *library(void);
/* Made ready while there is room for it, launched when there is none. */
static void launch_late(const char *how, size_t graph_bytes, size_t taken_bytes) {
  hipGraph_t g, inner;
  hipGraphExec_t x;
  hipGraphNode_t node, freed;
  hipMemAllocNodeParams want = alloc_node(graph_bytes);
  hipError_t (*start)(hipGraphExec_t, hipStream_t) = hipGraphLaunch;
  int spt = !strcmp(how, "spt");
  if (spt) start = (hipError_t(*)(hipGraphExec_t, hipStream_t))dlsym(library(), "hipGraphLaunch_spt");
  void *p = NULL;
  hipError_t e = a_stream() && start ? hipGraphCreate(&g, 0) : hipErrorUnknown, f;
  if (!e) e = hipGraphAddMemAllocNode(&node, g, 0, 0, &want);
  if (!e) e = hipGraphAddMemFreeNode(&freed, g, &node, 1, want.dptr);
  if (!e && !strcmp(how, "child")) {
    inner = g;
    e = hipGraphCreate(&g, 0);
    if (!e) e = hipGraphAddChildGraphNode(&node, g, 0, 0, inner);
    say("child", e);
  }
  if (!e) e = hipGraphInstantiate(&x, g, 0, 0, 0);
  if (!e) e = hipMalloc(&p, taken_bytes);
  say("ready", e);
  f = start(x, a_stream());
  if (!f) f = hipStreamSynchronize(a_stream());
  say("launch", f);
  e = hipFree(p);
  f = start(x, a_stream());
  if (!f) f = hipStreamSynchronize(a_stream());
  say("launch", e ? e : f);
  e = hipMalloc(&p, taken_bytes);
  say("taken", e);
  f = start(x, a_stream());
  if (!f) f = hipStreamSynchronize(a_stream());
  say("launch", f);
}
static hipError_t t_captured(void **p, size_t n) {
  hipGraph_t g = NULL;
  hipError_t e = hipStreamBeginCapture(a_stream(), hipStreamCaptureModeGlobal), end;
  if (!e) e = hipMallocAsync(p, n, a_stream());
  end = hipStreamEndCapture(a_stream(), &g);
  if (!e) e = end;
  return e ? e : launch(g);
}
#endif
#if HV >= 600
static hipError_t t_graph_node(void **p, size_t n) {
  hipGraph_t g;
  hipGraphNode_t node;
  hipGraphNodeParams want;
  if (!a_stream()) return hipErrorUnknown;
  memset(&want, 0, sizeof want);
  want.type = hipGraphNodeTypeMemAlloc;
  want.alloc = alloc_node(n);
  hipError_t e = hipGraphCreate(&g, 0);
  if (!e) e = hipGraphAddNode(&node, g, 0, 0, &want);
  *p = want.alloc.dptr;
  return e ? e : launch(g);
}
#endif
static hipError_t t_register(void **p, size_t n) { return posix_memalign(p, 4096, n) ? hipErrorUnknown : hipHostRegister(*p, n, 0); }
static hipError_t t_stream(void **p, size_t n) { /* n: nothing; queues and what the runtime takes for them */
  (void)n;
  hipError_t e = hipStreamCreate((hipStream_t *)p);
  return e ? e : hipStreamSynchronize(*p);
}
static hipError_t t_module(void **p, size_t n) { /* a code object with a variable of 64 MiB; its file is in CODE_OBJECT */
  (void)n;
  const char *path = getenv("CODE_OBJECT");
  return path ? hipModuleLoad((hipModule_t *)p, path) : hipErrorUnknown;
}
static void by_unload(void *p) { (void)hipModuleUnload(p); }
static void by_stream_destroy(void *p) { (void)hipStreamDestroy(p); }

static const struct way {
  const char *name;
  hipError_t (*take)(void **, size_t);
  void (*give)(void *);
} ways[] = {
    {"malloc", t_malloc, by_free}, {"ext", t_ext, by_free}, {"fine", t_fine, by_free}, {"uncached", t_uncached, by_free},
    {"pitch", t_pitch, by_free}, {"mempitch", t_mem_pitch, by_free}, {"3d", t_3d, by_free},
    {"array", t_array, by_free_array}, {"array3d", t_array3, by_free_array}, {"arraycreate", t_array_create, by_array_destroy},
    {"array3dcreate", t_array3_create, by_array_destroy}, {"mipmap", t_mipmap, by_mipmap_free},
    {"mipmapcreate", t_mipmap_create, by_mipmap_destroy}, {"managed", t_managed, by_free}, {"host", t_host, by_host_free},
    {"register", t_register, by_nothing}, {"async", t_async, by_free_async}, {"pool", t_pool, by_free_async},
    {"stream", t_stream, by_stream_destroy}, {"module", t_module, by_unload},
#if HV >= 503
    {"create", t_create, by_release}, {"map", t_map, by_unmap}, {"graph", t_graph, by_nothing}, {"captured", t_captured, by_nothing},
#endif
#if HV >= 600
    {"graphnode", t_graph_node, by_nothing},
#endif
};

static void take(char *how) {
  char *name = strtok(how, ":"), *mib = strtok(NULL, ":"), *count = strtok(NULL, ":");
  size_t bytes = (mib ? strtoull(mib, NULL, 10) : 0) * MIB;
  int most = count ? atoi(count) : 64;
  takes = 0;
  for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
    if (strcmp(ways[i].name, name)) continue;
    hipError_t e = hipSuccess;
#if HV >= 503
    mapped_bytes = bytes;
#endif
    give_back = ways[i].give;
    while (!e && takes < most && takes < MOST) {
      void *p = NULL;
      e = ways[i].take(&p, bytes);
      if (!e) taken[takes++] = p;
    }
    printf("{\"op\":\"take\",\"way\":\"%s\",\"granted\":%d,\"error\":\"%s\"}\n", name, takes, hipGetErrorName(e));
    fflush(stdout);
    (void)hipGetLastError();
    return;
  }
  printf("{\"op\":\"take\",\"way\":\"%s\",\"granted\":0,\"error\":\"none such\"}\n", name);
}

/* -------------------------------------------------------------------------------------------------------- questions */

static void *library(void) {
  static const char *const names[] = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"};
  void *found = NULL;
  for (int i = 0; i < 3 && !found; i++) found = dlopen(names[i], RTLD_NOW | RTLD_NOLOAD);
  return found;
}

/* The structure of before 6.0, which newer headers no longer describe. */
#define OLD_TOTAL 256
#define OLD_CUS 336
#if HV < 600
_Static_assert(offsetof(hipDeviceProp_t, totalGlobalMem) == OLD_TOTAL && offsetof(hipDeviceProp_t, multiProcessorCount) == OLD_CUS, "");
#endif

static void props(const char *name, int device, size_t total_at, size_t cus_at) {
  static _Alignas(64) char room[16384];
  hipError_t (*get)(void *, int) = (hipError_t(*)(void *, int))dlsym(library(), name);
  uint64_t total = 0;
  int cus = 0;
  if (!get) return;
  memset(room, 0, sizeof room);
  hipError_t e = get(room, device);
  memcpy(&total, room + total_at, sizeof total);
  memcpy(&cus, room + cus_at, sizeof cus);
  printf(",\"%s\":[\"%s\",%lu,%d]", name, hipGetErrorName(e), total, cus);
}

static void questions(void) {
  int n = 0, was = device();
  (void)hipGetDeviceCount(&n);
  for (int i = 0; i < n; i++) {
    size_t free = 0, total = 0, device_total = 0;
    int cus = 0;
    hipDeviceProp_t p;
    (void)hipSetDevice(i);
    hipError_t e = hipMemGetInfo(&free, &total), f = hipDeviceTotalMem(&device_total, i);
    hipError_t g = hipDeviceGetAttribute(&cus, hipDeviceAttributeMultiprocessorCount, i), h = hipGetDeviceProperties(&p, i);
    printf("{\"op\":\"questions\",\"device\":%d,\"ok\":%d,\"free\":%zu,\"total\":%zu,\"device_total\":%zu,\"attribute_cus\":%d", i,
           !e && !f && !g && !h, free, total, device_total, cus);
    printf(",\"prop_total\":%zu,\"prop_cus\":%d", p.totalGlobalMem, p.multiProcessorCount);
#if HV >= 600
    props("hipGetDevicePropertiesR0600", i, offsetof(hipDeviceProp_tR0600, totalGlobalMem), offsetof(hipDeviceProp_tR0600, multiProcessorCount));
    props("hipGetDevicePropertiesR0000", i, OLD_TOTAL, OLD_CUS);
#endif
    props("hipGetDeviceProperties", i, OLD_TOTAL, OLD_CUS);
    printf("}\n");
    fflush(stdout);
  }
  (void)hipSetDevice(was);
}

/* ----------------------------------------------------------------------------------------------------------- queues */

static void streams(int count) {
  int n = 0;
  (void)hipGetDeviceCount(&n);
  for (int i = 0; i < n; i++) {
    hipError_t e = hipSetDevice(i);
    for (int k = 0; k < count && !e; k++) {
      hipStream_t s;
      e = hipStreamCreate(&s);
      if (!e) e = hipStreamSynchronize(s);
    }
    say("streams", e);
  }
}

static void masked_stream(const char *hex) {
  uint32_t words[32] = {0};
  size_t length = strlen(hex), count = (length + 7) / 8;
  int n = 0;
  for (size_t i = 0; i < count; i++) {
    char word[9] = "";
    size_t from = length > 8 * (i + 1) ? length - 8 * (i + 1) : 0, to = length - 8 * i;
    memcpy(word, hex + from, to - from);
    words[i] = strtoul(word, NULL, 16);
  }
  (void)hipGetDeviceCount(&n);
  for (int i = 0; i < n; i++) {
    hipStream_t s;
    hipError_t e = hipSetDevice(i);
    if (!e) e = hipExtStreamCreateWithCUMask(&s, count, words);
    if (!e) e = hipStreamSynchronize(s);
    say("mask", e);
  }
}

static void priorities(void) {
  int least = 0, greatest = 0;
  hipStream_t s;
  hipError_t e = hipDeviceGetStreamPriorityRange(&least, &greatest);
  if (!e) e = hipStreamCreateWithPriority(&s, 0, least);
  if (!e) e = hipStreamSynchronize(s);
  if (!e) e = hipStreamCreateWithPriority(&s, 0, greatest);
  if (!e) e = hipStreamSynchronize(s);
  say("priority", e);
}

/* ---------------------------------------------------------------------------------------------------------- kernels */

static hipFunction_t kernel(void) {
  static hipModule_t module;
  hipFunction_t found = NULL;
  const char *path = getenv("CODE_OBJECT");
  if (path && !module && hipModuleLoad(&module, path)) return NULL;
  return module && !hipModuleGetFunction(&found, module, "nothing") ? found : NULL;
}

static void *named(const char *name) { return dlsym(library(), name); }

/* What a compiler makes of `__global__ void nothing(void) {}`: a bundle of code objects, and a function of the host whose
 * address stands for the kernel. */
static void nothing_on_the_host(void) {}
static int registered(void) {
  static struct { uint32_t magic, version; void *bundle, *unused; } wrapper = {0x48495046, 1, NULL, NULL};
  static const char host[] = "host-x86_64-unknown-linux--", gpu[] = "hipv4-amdgcn-amd-amdhsa--gfx90a";
  void **(*add)(const void *) = (void **(*)(const void *))named("__hipRegisterFatBinary");
  void (*name)(void **, const void *, char *, const char *, unsigned, void *, void *, void *, void *, int *) =
      (void (*)(void **, const void *, char *, const char *, unsigned, void *, void *, void *, void *, int *))named("__hipRegisterFunction");
  const char *path = getenv("CODE_OBJECT");
  if (wrapper.bundle) return 1;
  FILE *f = path ? fopen(path, "r") : NULL;
  if (!f || !add || !name || fseek(f, 0, SEEK_END)) return 0;
  uint64_t size = ftell(f), words[] = {2, 4096, 0, sizeof host - 1, 4096, size, sizeof gpu - 1};
  char *bundle = aligned_alloc(4096, 4096 + (size + 4095) / 4096 * 4096), *at = bundle;
  rewind(f);
  if (!bundle || fread(bundle + 4096, 1, size, f) != size) return 0;
  fclose(f);
  at = mempcpy(at, "__CLANG_OFFLOAD_BUNDLE__", 24);
  at = mempcpy(at, words, 32);
  at = mempcpy(at, host, sizeof host - 1);
  at = mempcpy(at, words + 4, 24);
  mempcpy(at, gpu, sizeof gpu - 1);
  wrapper.bundle = bundle;
  name(add(&wrapper), (void *)nothing_on_the_host, "nothing", "nothing", -1, NULL, NULL, NULL, NULL, NULL);
  return 1;
}

static const dim3 sixty_four = {64, 1, 1};
static void *no_arguments[1];

static hipError_t l_module(unsigned blocks) {
  hipFunction_t f = kernel();
  hipError_t (*go)(hipFunction_t, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, hipStream_t, void **) =
      (void *)named("hipModuleLaunchCooperativeKernel");
  return f && go ? go(f, blocks, 1, 1, 64, 1, 1, 0, a_stream(), no_arguments) : hipErrorUnknown;
}
static hipError_t by_address(const char *name, unsigned blocks) {
  hipError_t (*go)(const void *, dim3, dim3, void **, unsigned, hipStream_t) = (void *)named(name);
  return registered() && go ? go((void *)nothing_on_the_host, (dim3){blocks, 1, 1}, sixty_four, no_arguments, 0, a_stream()) : hipErrorUnknown;
}
static hipError_t l_host(unsigned blocks) { return by_address("hipLaunchCooperativeKernel", blocks); }
static hipError_t l_host_spt(unsigned blocks) { return by_address("hipLaunchCooperativeKernel_spt", blocks); }
static hipError_t l_plain(unsigned blocks) { return by_address("hipLaunchKernel", blocks); }

/* On every device there is, a stream each; the current device stays. */
static hipStream_t stream_on(int index) {
  static hipStream_t streams[16];
  int was = device();
  (void)hipSetDevice(index);
  if (!streams[index] && hipStreamCreate(&streams[index])) streams[index] = NULL;
  (void)hipSetDevice(was);
  return streams[index];
}
static hipError_t on_all(const char *name, unsigned blocks) {
  hipLaunchParams list[16] = {0};
  hipError_t (*go)(hipLaunchParams *, int, unsigned) = (void *)named(name);
  int n = 0;
  (void)hipGetDeviceCount(&n);
  for (int i = 0; i < n; i++) {
    list[i].func = (void *)nothing_on_the_host, list[i].gridDim = (dim3){blocks, 1, 1}, list[i].blockDim = sixty_four;
    list[i].args = no_arguments, list[i].sharedMem = 0, list[i].stream = stream_on(i);
  }
  return registered() && go ? go(list, n, 0) : hipErrorUnknown;
}
static hipError_t l_multi(unsigned blocks) { return on_all("hipLaunchCooperativeKernelMultiDevice", blocks); }
static hipError_t l_ext_multi(unsigned blocks) { return on_all("hipExtLaunchMultiKernelMultiDevice", blocks); }
#if HV >= 503
static hipError_t l_module_multi(unsigned blocks) {
  hipFunctionLaunchParams list[16] = {0};
  hipError_t (*go)(hipFunctionLaunchParams *, unsigned, unsigned) = (void *)named("hipModuleLaunchCooperativeKernelMultiDevice");
  int n = 0;
  (void)hipGetDeviceCount(&n);
  for (int i = 0; i < n; i++) {
    hipModule_t module;
    list[i].hStream = stream_on(i);
    (void)hipSetDevice(i);
    if (hipModuleLoad(&module, getenv("CODE_OBJECT")) || hipModuleGetFunction(&list[i].function, module, "nothing")) return hipErrorUnknown;
    list[i].gridDimX = blocks, list[i].gridDimY = list[i].gridDimZ = 1;
    list[i].blockDimX = 64, list[i].blockDimY = list[i].blockDimZ = 1, list[i].kernelParams = no_arguments;
  }
  (void)hipSetDevice(0);
  return go ? go(list, n, 0) : hipErrorUnknown;
}
#endif

static const struct { const char *name; hipError_t (*go)(unsigned); } launches[] = {
    {"module", l_module}, {"host", l_host}, {"spt", l_host_spt}, {"multi", l_multi},
#if HV >= 503
    {"modulemulti", l_module_multi},
#endif
    /* and two that are not cooperative: whose blocks wait for nobody */
    {"plain", l_plain}, {"extmulti", l_ext_multi},
};

static void cooperative(const char *how) {
  const char *colon = strchr(how, ':');
  unsigned blocks = colon ? atoi(colon + 1) : 0;
  hipError_t e = hipErrorNotSupported;
  for (size_t i = 0; colon && i < sizeof launches / sizeof *launches; i++)
    if (!strncmp(how, launches[i].name, colon - how) && !launches[i].name[colon - how]) e = launches[i].go(blocks);
  printf("{\"op\":\"cooperative\",\"how\":\"%.*s\",\"blocks\":%u,\"error\":\"%s\"}\n", colon ? (int)(colon - how) : 0, how, blocks, hipGetErrorName(e));
  fflush(stdout);
  (void)hipGetLastError();
}

static void occupancy(void) {
  int per = 0, grid = 0, block = 0;
  hipFunction_t f = kernel();
  hipError_t e = f ? hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(&per, f, 64, 0) : hipErrorUnknown;
  if (!e) e = hipModuleOccupancyMaxPotentialBlockSize(&grid, &block, f, 0, 64);
  printf("{\"op\":\"occupancy\",\"error\":\"%s\",\"per\":%d,\"grid\":%d,\"block\":%d}\n", hipGetErrorName(e), per, grid, block);
  fflush(stdout);
}

/* ------------------------------------------------------------------------------------------------- other processes */

static void export_to(const char *path) {
  hipIpcMemHandle_t h;
  void *p;
  hipError_t e = hipMalloc(&p, 256 * MIB);
  if (!e) e = hipIpcGetMemHandle(&h, p);
  char other[4096];
  snprintf(other, sizeof other, "%s.new", path);
  FILE *f = fopen(other, "w");
  if (!f || fwrite(&h, sizeof h, 1, f) != 1 || fclose(f) || rename(other, path)) e = hipErrorUnknown;
  say("export", e);
}

#if HV < 503
static void launch_late(const char *how, size_t graph_bytes, size_t taken_bytes) {
  (void)how, (void)graph_bytes, (void)taken_bytes;
  say("ready", hipErrorNotSupported);
}
#endif

/* Of host memory as malloc gives it, on a stream: the runtime's way to a single copy of the whole. */
static void copy(size_t bytes) {
  uint32_t *out = malloc(bytes), *back = calloc(1, bytes);
  void *there = NULL;
  for (size_t i = 0; i < bytes / sizeof *out; i++) out[i] = i * 2654435761u;
  hipError_t e = hipMalloc(&there, bytes);
  if (!e) e = hipMemcpyAsync(there, out, bytes, hipMemcpyHostToDevice, a_stream());
  if (!e) e = hipMemcpyAsync(back, there, bytes, hipMemcpyDeviceToHost, a_stream());
  if (!e) e = hipStreamSynchronize(a_stream());
  size_t same = 0;
  while (same < bytes / sizeof *out && out[same] == back[same]) same++;
  printf("{\"op\":\"copy\",\"error\":\"%s\",\"same\":%zu}\n", hipGetErrorName(e), same * sizeof *out);
  fflush(stdout);
  (void)hipFree(there);
  free(out), free(back);
}

static void import_from(const char *path) {
  hipIpcMemHandle_t h;
  void *p;
  FILE *f = fopen(path, "r");
  hipError_t e = f && fread(&h, sizeof h, 1, f) == 1 ? hipIpcOpenMemHandle(&p, h, hipIpcMemLazyEnablePeerAccess) : hipErrorUnknown;
  say("import", e);
}

/* Multiprocessors of device 0, asked through an address that was come by in another way than by linking. */
static void by_name(const char *how) {
  hipError_t (*get)(int *, hipDeviceAttribute_t, int) = NULL;
  int cus = -1;
  if (!strcmp(how, "dlsym")) get = (hipError_t(*)(int *, hipDeviceAttribute_t, int))dlsym(library(), "hipDeviceGetAttribute");
  else if (!strcmp(how, "default")) get = (hipError_t(*)(int *, hipDeviceAttribute_t, int))dlsym(RTLD_DEFAULT, "hipDeviceGetAttribute");
#if HV >= 602
  else {
    hipDriverProcAddressQueryResult found;
    (void)hipGetProcAddress("hipDeviceGetAttribute", (void **)&get, HIP_VERSION_MAJOR * 100 + HIP_VERSION_MINOR, 0, &found);
  }
#endif
  hipError_t e = get ? get(&cus, hipDeviceAttributeMultiprocessorCount, 0) : hipErrorNotSupported;
  printf("{\"op\":\"proc\",\"error\":\"%s\",\"cus\":%d}\n", hipGetErrorName(e), cus);
  fflush(stdout);
}

int main(int argc, char **argv) {
  for (int i = 1; i < argc; i++) {
    char word[1024], *rest;
    snprintf(word, sizeof word, "%s", argv[i]);
    rest = strchr(word, ':');
    if (rest) *rest++ = 0;
    else rest = word + strlen(word);
    if (!strcmp(word, "take")) take(rest);
    else if (!strcmp(word, "drop")) for (; takes; takes--) give_back(taken[takes - 1]);
    else if (!strcmp(word, "copy")) copy(strtoull(rest, NULL, 10) * MIB);
    else if (!strcmp(word, "quit")) fflush(stdout), _exit(0);
    else if (!strcmp(word, "questions")) questions();
    else if (!strcmp(word, "streams")) streams(atoi(rest));
    else if (!strcmp(word, "mask")) masked_stream(rest);
    else if (!strcmp(word, "priority")) priorities();
    else if (!strcmp(word, "device")) say("device", hipSetDevice(atoi(rest)));
    else if (!strcmp(word, "unsetenv")) unsetenv(rest);
    else if (!strcmp(word, "setenv")) putenv(strdup(rest));
    else if (!strcmp(word, "export")) export_to(rest);
    else if (!strcmp(word, "import")) import_from(rest);
    else if (!strcmp(word, "cooperative")) cooperative(rest);
    else if (!strcmp(word, "occupancy")) occupancy();
    else if (!strcmp(word, "proc")) by_name(rest);
    else if (!strcmp(word, "late")) {
      char *how = strtok(rest, ":"), *mib = strtok(NULL, ":"), *taken = strtok(NULL, ":");
      if (how && mib && taken) launch_late(how, strtoull(mib, NULL, 10) * MIB, strtoull(taken, NULL, 10) * MIB);
    }
    else if (!strcmp(word, "exec")) {
      argv[i] = argv[0];
      execv("/proc/self/exe", argv + i);
      return 4;
    } else if (!strcmp(word, "fork")) {
      pid_t child = fork();
      if (child) {
        int status = 0;
        waitpid(child, &status, 0);
        printf("{\"op\":\"child\",\"status\":%d}\n", WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
        fflush(stdout);
        return 0;
      }
    } else if (!strcmp(word, "wait")) {
      char line[64];
      printf("{\"op\":\"wait\"}\n");
      fflush(stdout);
      if (!fgets(line, sizeof line, stdin)) continue;
    } else return fprintf(stderr, "ways: unknown word %s\n", argv[i]), 2;
  }
  printf("{\"op\":\"end\"}\n");
  return 0;
}
