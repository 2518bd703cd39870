/* What the front answers in the runtime's place. Each function here is called by the program instead of the runtime's own
 * of that name, decides, and mostly calls it. Layouts and values are those of the public headers of HIP 5.2 to 7.2, which
 * agree in all that is used here but for the place of two fields (props).
 *
 * A refusal needs to be certain: what is refused must not fit even if the runtime gave back everything it keeps (a request
 * that cached memory can serve passes). What is not certain passes, and the gate decides later at the KFD. */
#include "front.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>

#include "../src/environ.h"
#include "../src/kfd.h"
#include "../src/os.h"
#include "../src/process.h"
#include "../src/standalone.h"

enum { SUCCESS = 0, OUT_OF_MEMORY = 2, TOO_LARGE = 720 };
#define MULTIPROCESSORS 63          /* hipDeviceAttributeMultiprocessorCount, the same in all four */
#define POOL_RESERVED 5             /* hipMemPoolAttrReservedMemCurrent */
#define POOL_USED 7                 /* hipMemPoolAttrUsedMemCurrent */
#define GRAPH_USED 0                /* hipGraphMemAttrUsedMemCurrent */
#define GRAPH_RESERVED 2            /* hipGraphMemAttrReservedMemCurrent */
#define NODE_GRAPH 4                /* hipGraphNodeTypeGraph: a child graph */
#define NODE_ALLOC 10               /* hipGraphNodeTypeMemAlloc */
#define NODE_FREE 11                /* hipGraphNodeTypeMemFree */
#define CUS_BEFORE_6 336            /* offset of multiProcessorCount in the structure of before 6.0 ... */
#define CUS_FROM_6 388              /* ... and in that of 6.0 (R0600) */
#define MAX_DEVICES 64
#define MAX_DEPTH 8                 /* child graphs in child graphs that are looked at (guessed) */
#define MAX_GRAPHS 256              /* graphs with memory that are remembered; of others, launches are not checked */

struct dim3 { uint32_t x, y, z; };
struct alloc_node { uint32_t alloc_type, handle_types, location_type; int device; uint64_t pool_rest[9]; const void *access; size_t access_count, bytes; void *pointer; };
struct node_params { int type, reserved[3]; struct alloc_node alloc; };
struct launch { const void *function; struct dim3 grid, block; void **arguments; size_t shared; void *stream; };
struct module_launch { void *function; struct dim3 grid, block; uint32_t shared; void *stream; void **parameters; };
_Static_assert(sizeof(struct alloc_node) == 120 && offsetof(struct alloc_node, bytes) == 104, "hipMemAllocNodeParams");
_Static_assert(offsetof(struct node_params, alloc) == 16, "hipGraphNodeParams");
_Static_assert(sizeof(struct launch) == 56 && sizeof(struct module_launch) == 56, "hipLaunchParams, hipFunctionLaunchParams");

/* Call the runtime's own function of that name. */
#define REAL(name, ...) ((int (*)(__VA_ARGS__))front_real[F_##name])

/* --------------------------------------------------------------------------------- what a device is, and has left */

/* A HIP device in the KFD's terms. HIP names a PCI function; a GPU cut into partitions has several nodes under it, so
 * there may be several candidates: then only what holds for each is acted upon. */
struct place { int known, count; uint32_t gpu_id[AVG_MAX_GPUS]; };
static struct place places[MAX_DEVICES];

static uint64_t hex(const char **text) {
    uint64_t value = 0;
    for (;; ++*text) {
        char c = **text;
        int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
        if (digit < 0) return value;
        value = value << 4 | (uint64_t)digit;
    }
}

/* domain << 32 | bus << 8 | device << 3 of KFD node `node`; UINT64_MAX where that cannot be read. */
static uint64_t address_of_node(uint32_t node) {
    char text[4096];
    if (avg_read_node(node, "properties", text, sizeof text) <= 0) return UINT64_MAX;
    return avg_field(text, "domain") << 32 | (avg_field(text, "location_id") & ~7ULL);
}

static const struct place *place_of(int device) {
    static const struct place nowhere;
    char text[64];
    if (device < 0 || device >= MAX_DEVICES) return &nowhere;
    struct place *place = &places[device];
    if (__atomic_load_n(&place->known, __ATOMIC_ACQUIRE)) return place;
    if (!front_real[F_hipDeviceGetPCIBusId] || REAL(hipDeviceGetPCIBusId, char *, int, int)(text, sizeof text, device)) return &nowhere;
    const char *at = text;
    uint64_t domain = hex(&at);
    if (*at++ != ':') return &nowhere;
    uint64_t bus = hex(&at);
    if (*at++ != ':') return &nowhere;
    uint64_t address = domain << 32 | bus << 8 | hex(&at) << 3;
    struct place found = {.known = 1};
    struct { uint32_t node, gpu_id; } nodes[AVG_MAX_SLICES * AVG_MAX_GPUS];
    int count = 0;
    struct avg_process *process = avg_process_enter(1);
    if (!process) return &nowhere;
    for (int i = 0; i < process->slice_count; i++)
        for (uint32_t gpu = 0; gpu < process->slice[i].gpu_count; gpu++) {
            const struct avg_policy_gpu *entry = &process->slice[i].policy->gpu[gpu];
            nodes[count].node = entry->kfd_node, nodes[count++].gpu_id = entry->kfd_gpu_id;
        }
    avg_process_leave(process);
    for (int i = 0; i < count; i++) {
        int twice = 0;
        for (int k = 0; k < found.count; k++) twice |= found.gpu_id[k] == nodes[i].gpu_id;
        if (!twice && found.count < AVG_MAX_GPUS && address_of_node(nodes[i].node) == address) found.gpu_id[found.count++] = nodes[i].gpu_id;
    }
    found.known = 0;
    *place = found; /* two threads write the same */
    __atomic_store_n(&place->known, 1, __ATOMIC_RELEASE);
    return place;
}

/* Bytes that the slice has left on a device; the most of it where the device may be several. UINT64_MAX: not ours to say.
 * The ledger errs high for a moment while a neighbour decides, so it is read a few times where it seems not to fit. */
static uint64_t left_on(int device, uint64_t wanted) {
    const struct place *place = place_of(device);
    uint64_t most = 0;
    if (!place->count) return UINT64_MAX;
    struct avg_process *process = avg_process_enter(1);
    if (!process) return UINT64_MAX;
    for (int tries = 0; !tries || (tries < 4 && most < wanted); tries++)
        for (int k = 0; k < place->count; k++) {
            struct avg_cover covers[AVG_MAX_SLICES];
            int count = avg_covers(process, place->gpu_id[k], covers, AVG_MAX_SLICES);
            uint64_t left = count ? 0 : UINT64_MAX;
            for (int i = 0; i < count; i++) {
                if (covers[i].account->ledger) left = avg_sum(left, avg_less(covers[i].quota, avg_taken(covers[i].account, covers[i].gpu)));
                if (covers[i].entry->flags & AVG_GPU_OVERSUBSCRIBE) left = UINT64_MAX; /* the runtime may be served by the host */
            }
            if (left > most) most = left;
        }
    avg_process_leave(process);
    return most;
}

/* Compute units of the slice on a device of which the runtime says that it has `whole`; `whole` where there is no mask, or
 * no telling. The runtime counts CUs, and from gfx10 on mostly WGPs: told apart by what it says. */
static int units_on(int device, int whole) {
    const struct place *place = place_of(device);
    const char *word = avg_env("AMDVGPU_REPORT_CUS");
    int answer = -1;
    if (!place->count || whole < 1 || (word && (avg_equal(word, "0") || avg_equal(word, "off")))) return whole;
    struct avg_process *process = avg_process_enter(1);
    if (!process) return whole;
    for (int k = 0; k < place->count; k++) {
        struct avg_mask_rule rule;
        int units = whole, set = 0;
        if (avg_mask_rule_of(process, place->gpu_id[k], &rule) == 1) {
            for (uint32_t bit = 0; bit < rule.cu_count && bit < AVG_MASK_WORDS * 64; bit++) set += avg_mask_bit(&rule.mask, bit);
            if ((uint32_t)whole == rule.cu_count) units = set;
            else if (rule.wgp && (uint32_t)whole * 2 == rule.cu_count) units = set / 2;
        }
        if (answer >= 0 && units != answer) units = whole; /* partitions of one GPU with different slices */
        answer = units;
    }
    avg_process_leave(process);
    return answer > 0 ? answer : whole;
}

static int current_device(void) {
    int device = -1;
    return front_real[F_hipGetDevice] && !REAL(hipGetDevice, int *)(&device) ? device : -1;
}

static int device_of(void *stream) {
    int device = -1;
    if ((uintptr_t)stream > 2) { /* 0, 1 and 2 are names for the default streams */
        if (front_real[F_hipStreamGetDevice] && !REAL(hipStreamGetDevice, void *, int *)(stream, &device)) return device;
        if (front_real[F_hipGetStreamDeviceId]) return REAL(hipGetStreamDeviceId, void *)(stream);
    }
    return current_device();
}

/* ------------------------------------------------------------------------------------------------------- refusing */

/* As the runtime would refuse: its own way sets what hipGetLastError tells, so it is asked for more than any GPU has, which
 * it refuses by itself. Not while a stream is captured: that request would end the capture. */
static int refuse(void *captured) {
    void *none;
    int status = 0;
    if (captured && front_real[F_hipStreamIsCapturing] && REAL(hipStreamIsCapturing, void *, int *)(captured, &status)) status = 1;
    if (!status && front_real[F_hipMalloc]) REAL(hipMalloc, void **, size_t)(&none, (size_t)1 << 62);
    return OUT_OF_MEMORY;
}

static uint64_t cached_in_pool(void *pool) {
    uint64_t reserved = 0, used = 0;
    if (!pool || !front_real[F_hipMemPoolGetAttribute]) return 0;
    if (REAL(hipMemPoolGetAttribute, void *, int, void *)(pool, POOL_RESERVED, &reserved)) return 0;
    if (REAL(hipMemPoolGetAttribute, void *, int, void *)(pool, POOL_USED, &used)) return reserved; /* may all be free */
    return avg_less(reserved, used);
}

static uint64_t cached_for_graphs(int device) {
    uint64_t reserved = 0, used = 0;
    if (!front_real[F_hipDeviceGetGraphMemAttribute]) return 0;
    if (REAL(hipDeviceGetGraphMemAttribute, int, int, void *)(device, GRAPH_RESERVED, &reserved)) return 0;
    if (REAL(hipDeviceGetGraphMemAttribute, int, int, void *)(device, GRAPH_USED, &used)) return reserved;
    return avg_less(reserved, used);
}

static int fits(int device, uint64_t bytes, uint64_t cached) {
    if (bytes <= cached) return 1;
    return left_on(device, bytes - cached) >= bytes - cached;
}

static int captures(void *stream) {
    int status = 0;
    return front_real[F_hipStreamIsCapturing] && !REAL(hipStreamIsCapturing, void *, int *)(stream, &status) && status == 1;
}

/* Pools of 7 grow in pieces of 32 MiB and, where the last piece of a request does not come, keep the others for good: the
 * next requests fail as well, and the exit crashes. They grow by the whole of what is asked, whatever is free in them, and by
 * one piece more now and then: so near the quota a piece is refused that might not have been needed. Older pools give back
 * what they keep before they fail, and fail cleanly. */
#define PIECE (32ULL << 20)

/* 70253211 and the like: major, two digits of minor, patch. */
static int is_from(int major) {
    int version = 0;
    return front_real[F_hipRuntimeGetVersion] && !REAL(hipRuntimeGetVersion, int *)(&version) && version >= major * 10000000;
}

static int async_fits(uint64_t bytes, void *pool, void *stream) {
    int device = device_of(stream);
    if (!place_of(device)->count) return 1;
    if (captures(stream)) return fits(device, bytes, cached_for_graphs(device));
    if (!pool && front_real[F_hipDeviceGetMemPool]) REAL(hipDeviceGetMemPool, void **, int)(&pool, device);
    uint64_t cached = cached_in_pool(pool);
    if (bytes <= cached || bytes > (uint64_t)1 << 60 || !is_from(7)) return fits(device, bytes, cached);
    return fits(device, (bytes + PIECE - 1) / PIECE * PIECE + (bytes > PIECE ? PIECE : 0), 0);
}

static int ours_hipMallocAsync(void **at, size_t bytes, void *stream) {
    if (!async_fits(bytes, NULL, stream)) return refuse(stream);
    return REAL(hipMallocAsync, void **, size_t, void *)(at, bytes, stream);
}

static int ours_hipMallocFromPoolAsync(void **at, size_t bytes, void *pool, void *stream) {
    if (!async_fits(bytes, pool, stream)) return refuse(stream);
    return REAL(hipMallocFromPoolAsync, void **, size_t, void *, void *)(at, bytes, pool, stream);
}

/* ------------------------------------------------------------------------------------------ arrays: success is checked */

/* For an array that gets no VRAM all four runtimes answer success; 6.4.3 was seen to put it into pinned host memory. That is
 * a texture far slower than it should be, and nobody is told. How much VRAM it needs is known only to the runtime (tiling), so it
 * is let run; where the largest piece of VRAM that it asked for on this thread was refused, the array is given back. A slice
 * that may be served by host memory is served by the gate, whose answer is then a yes. */
struct listener { uintptr_t thread; uint64_t bytes; int refused; };
static struct listener listeners[64];
int avg_front_listening;

void avg_front_hear(const struct kfd_alloc_memory *asked, int result) {
    uintptr_t self = avg_thread();
    if (!(asked->flags & KFD_MEMORY_VRAM)) return;
    for (size_t i = 0; i < sizeof listeners / sizeof *listeners; i++) {
        if (__atomic_load_n(&listeners[i].thread, __ATOMIC_RELAXED) != self || asked->bytes < listeners[i].bytes) continue;
        listeners[i].bytes = asked->bytes;
        listeners[i].refused = result != 0;
    }
}

static struct listener *listen_in(void) {
    for (size_t i = 0; i < sizeof listeners / sizeof *listeners; i++) {
        uintptr_t nobody = 0;
        if (!__atomic_compare_exchange_n(&listeners[i].thread, &nobody, avg_thread(), 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) continue;
        listeners[i].refused = 0, listeners[i].bytes = 0;
        __atomic_fetch_add(&avg_front_listening, 1, __ATOMIC_ACQ_REL);
        return &listeners[i];
    }
    return NULL; /* 64 threads at once: the runtime's word stands */
}

static int was_refused(struct listener *listener) {
    if (!listener) return 0;
    int refused = listener->refused;
    __atomic_fetch_sub(&avg_front_listening, 1, __ATOMIC_ACQ_REL);
    __atomic_store_n(&listener->thread, 0, __ATOMIC_RELEASE);
    return refused;
}

#define ARRAY(name, destroy, parameters, ...) \
    static int ours_##name parameters { \
        struct listener *listener = listen_in(); \
        int result = ((int (*) parameters)front_real[F_##name])(__VA_ARGS__); \
        if (!was_refused(listener) || result) return result; \
        if (front_real[F_##destroy]) REAL(destroy, void *)(*array); \
        *array = NULL; \
        return refuse(NULL); \
    }
struct extent { size_t width, height, depth; };
ARRAY(hipMallocArray, hipFreeArray, (void **array, const void *format, size_t width, size_t height, unsigned flags), array, format, width, height, flags)
ARRAY(hipMalloc3DArray, hipFreeArray, (void **array, const void *format, struct extent extent, unsigned flags), array, format, extent, flags)
ARRAY(hipArrayCreate, hipArrayDestroy, (void **array, const void *wanted), array, wanted)
ARRAY(hipArray3DCreate, hipArrayDestroy, (void **array, const void *wanted), array, wanted)
ARRAY(hipMallocMipmappedArray, hipFreeMipmappedArray, (void **array, const void *format, struct extent extent, unsigned levels, unsigned flags), array, format, extent, levels, flags)
ARRAY(hipMipmappedArrayCreate, hipMipmappedArrayDestroy, (void **array, const void *wanted, unsigned levels), array, wanted, levels)

/* ---------------------------------------------------------------------------------------------------------- graphs */

/* A graph's memory is taken when it is launched, and a runtime that does not get it then crashes or says success. So a node
 * that can never fit is refused as it is added, and a launch for which there is no room now, as it is launched. */

static int ours_hipGraphAddMemAllocNode(void **node, void *graph, void *const *before, size_t count, struct alloc_node *wanted) {
    if (wanted && wanted->location_type == 1 && !fits(wanted->device, wanted->bytes, cached_for_graphs(wanted->device))) return refuse(NULL);
    return REAL(hipGraphAddMemAllocNode, void **, void *, void *const *, size_t, struct alloc_node *)(node, graph, before, count, wanted);
}

static int ours_hipGraphAddNode(void **node, void *graph, void *const *before, size_t count, struct node_params *wanted) {
    if (wanted && wanted->type == NODE_ALLOC && wanted->alloc.location_type == 1 &&
        !fits(wanted->alloc.device, wanted->alloc.bytes, cached_for_graphs(wanted->alloc.device)))
        return refuse(NULL);
    return REAL(hipGraphAddNode, void **, void *, void *const *, size_t, struct node_params *)(node, graph, before, count, wanted);
}

/* What a graph that is ready to run needs; written under `graphs_lock`, which is held for a few instructions. */
static struct { void *exec; int device; uint64_t bytes; } graphs[MAX_GRAPHS];
static int graphs_lock;

static void lock_graphs(void) { while (__atomic_exchange_n(&graphs_lock, 1, __ATOMIC_ACQUIRE)) AVG_SYS(sched_yield, 0, 0, 0, 0); }
static void unlock_graphs(void) { __atomic_store_n(&graphs_lock, 0, __ATOMIC_RELEASE); }

static void remember_graph(void *exec, int device, uint64_t bytes) {
    lock_graphs();
    for (int i = 0, left = bytes != 0; i < MAX_GRAPHS; i++) {
        if (graphs[i].exec == exec) graphs[i].exec = NULL;
        if (left && !graphs[i].exec) {
            graphs[i].exec = exec, graphs[i].device = device, graphs[i].bytes = bytes;
            left = 0;
        }
    }
    unlock_graphs();
}

/* The most that the allocations of a graph hold at one time, in the order of its nodes: what was added first is first. */
struct weight { int device; uint64_t held, most; };

static void weigh(struct weight *weight, void *graph, int depth) {
    struct taken { void *pointer; uint64_t bytes; };
    size_t count = 0, takes = 0;
    if (REAL(hipGraphGetNodes, void *, void **, size_t *)(graph, NULL, &count) || !count || count > 1 << 20) return;
    size_t room = count * (sizeof(void *) + sizeof(struct taken));
    void **nodes = avg_map(room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    if (!nodes) return;
    struct taken *taken = (struct taken *)(nodes + count);
    if (REAL(hipGraphGetNodes, void *, void **, size_t *)(graph, nodes, &count)) count = 0;
    for (size_t i = 0; i < count; i++) {
        int type = -1;
        struct alloc_node wanted = {0};
        void *pointer = NULL, *child = NULL;
        if (REAL(hipGraphNodeGetType, void *, int *)(nodes[i], &type)) continue;
        if (type == NODE_ALLOC && !REAL(hipGraphMemAllocNodeGetParams, void *, struct alloc_node *)(nodes[i], &wanted)) {
            if (weight->device >= 0 && wanted.device != weight->device) continue; /* on two devices: the first is weighed */
            weight->device = wanted.device;
            taken[takes++] = (struct taken){wanted.pointer, wanted.bytes};
            weight->held = avg_sum(weight->held, wanted.bytes);
            if (weight->held > weight->most) weight->most = weight->held;
        } else if (type == NODE_FREE && front_real[F_hipGraphMemFreeNodeGetParams] &&
                   !REAL(hipGraphMemFreeNodeGetParams, void *, void *)(nodes[i], &pointer)) {
            for (size_t k = 0; k < takes; k++)
                if (taken[k].pointer == pointer) weight->held -= taken[k].bytes, taken[k].bytes = 0;
        } else if (type == NODE_GRAPH && depth < MAX_DEPTH && front_real[F_hipGraphChildGraphNodeGetGraph] &&
                   !REAL(hipGraphChildGraphNodeGetGraph, void *, void **)(nodes[i], &child) && child)
            weigh(weight, child, depth + 1);
    }
    AVG_SYS(munmap, nodes, room, 0, 0);
}

static void weigh_graph(void *exec, void *graph) {
    struct weight weight = {.device = -1};
    if (!is_from(6)) return; /* 5 takes it when the node is added */
    if (!front_real[F_hipGraphGetNodes] || !front_real[F_hipGraphNodeGetType] || !front_real[F_hipGraphMemAllocNodeGetParams]) return;
    weigh(&weight, graph, 0);
    remember_graph(exec, weight.device, weight.most);
}

static int ours_hipGraphInstantiate(void **exec, void *graph, void **failed, char *log, size_t log_bytes) {
    int result = REAL(hipGraphInstantiate, void **, void *, void **, char *, size_t)(exec, graph, failed, log, log_bytes);
    if (!result && exec) weigh_graph(*exec, graph);
    return result;
}

static int ours_hipGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) {
    int result = REAL(hipGraphInstantiateWithFlags, void **, void *, unsigned long long)(exec, graph, flags);
    if (!result && exec) weigh_graph(*exec, graph);
    return result;
}

static int ours_hipGraphInstantiateWithParams(void **exec, void *graph, void *parameters) {
    int result = REAL(hipGraphInstantiateWithParams, void **, void *, void *)(exec, graph, parameters);
    if (!result && exec) weigh_graph(*exec, graph);
    return result;
}

static int ours_hipGraphExecDestroy(void *exec) {
    remember_graph(exec, -1, 0);
    return REAL(hipGraphExecDestroy, void *)(exec);
}

/* Every launch takes its memory anew: 6 gives back what the last one took some time after it was freed in the graph, 7.2
 * not at all. Both crash where a launch gets none. */
static int graph_fits(void *exec) {
    uint64_t bytes = 0;
    int device = -1;
    lock_graphs();
    for (int i = 0; i < MAX_GRAPHS; i++)
        if (graphs[i].exec == exec) bytes = graphs[i].bytes, device = graphs[i].device;
    unlock_graphs();
    return !bytes || fits(device, bytes, cached_for_graphs(device));
}

static int ours_hipGraphLaunch(void *exec, void *stream) {
    return graph_fits(exec) ? REAL(hipGraphLaunch, void *, void *)(exec, stream) : refuse(stream);
}

static int ours_hipGraphLaunch_spt(void *exec, void *stream) {
    return graph_fits(exec) ? REAL(hipGraphLaunch_spt, void *, void *)(exec, stream) : refuse(stream);
}

/* ------------------------------------------------------------------------------------------------------- reporting */

/* 5.2 computes what is free by itself, from what this process took; later runtimes ask the KFD, and so the gate. */
static int ours_hipMemGetInfo(size_t *free, size_t *total) {
    int result = REAL(hipMemGetInfo, size_t *, size_t *)(free, total);
    if (result || !free) return result;
    uint64_t left = left_on(current_device(), 0);
    if (left < *free) *free = left;
    return result;
}

static int ours_hipDeviceGetAttribute(int *value, int attribute, int device) {
    int result = REAL(hipDeviceGetAttribute, int *, int, int)(value, attribute, device);
    if (!result && value && attribute == MULTIPROCESSORS) *value = units_on(device, *value);
    return result;
}

static int with_units(int result, char *props, size_t offset, int device) {
    if (!result && props) {
        int *count = (int *)(props + offset);
        *count = units_on(device, *count);
    }
    return result;
}

static int ours_hipGetDeviceProperties(char *props, int device) {
    return with_units(REAL(hipGetDeviceProperties, char *, int)(props, device), props, CUS_BEFORE_6, device);
}
static int ours_hipGetDevicePropertiesR0000(char *props, int device) {
    return with_units(REAL(hipGetDevicePropertiesR0000, char *, int)(props, device), props, CUS_BEFORE_6, device);
}
static int ours_hipGetDevicePropertiesR0600(char *props, int device) {
    return with_units(REAL(hipGetDevicePropertiesR0600, char *, int)(props, device), props, CUS_FROM_6, device);
}

/* --------------------------------------------------------------------------------------------- cooperative launches */

/* All blocks of such a grid wait for one another, so all must run at once: in a slice, on its CUs. The runtime checks
 * against the whole GPU, and a grid between the two would wait for ever. Switched off with the reporting. */

static int whole_units(int device) {
    int whole = 0;
    return REAL(hipDeviceGetAttribute, int *, int, int)(&whole, MULTIPROCESSORS, device) ? 0 : whole;
}

/* Whether `blocks` of a kernel run at once on the slice's units of the stream's device. How many do so a unit the runtime
 * tells of its current device, and of a module that is not loaded there it tells by crashing (5.7.1): so that is set meanwhile. */
static int grid_fits(enum front_name ask, const void *kernel, uint64_t blocks, uint64_t threads, size_t shared, void *stream) {
    int device = device_of(stream), current = current_device(), whole = whole_units(device), units = units_on(device, whole), per_unit = 0;
    if (whole < 1 || units == whole || !front_real[ask]) return 1;
    if (device != current && (!front_real[F_hipSetDevice] || REAL(hipSetDevice, int)(device))) return 1;
    int failed = ((int (*)(int *, const void *, int, size_t))front_real[ask])(&per_unit, kernel, (int)threads, shared);
    if (device != current) REAL(hipSetDevice, int)(current);
    return failed || per_unit < 1 || blocks <= (uint64_t)per_unit * (uint64_t)units;
}

static uint64_t volume(struct dim3 size) { return (uint64_t)size.x * size.y * size.z; }

static int function_fits(const void *function, struct dim3 grid, struct dim3 block, size_t shared, void *stream) {
    return grid_fits(F_hipOccupancyMaxActiveBlocksPerMultiprocessor, function, volume(grid), volume(block), shared, stream);
}

static int module_fits(const void *function, struct dim3 grid, struct dim3 block, size_t shared, void *stream) {
    return grid_fits(F_hipModuleOccupancyMaxActiveBlocksPerMultiprocessor, function, volume(grid), volume(block), shared, stream);
}

static int ours_hipLaunchCooperativeKernel(const void *function, struct dim3 grid, struct dim3 block, void **arguments, unsigned shared, void *stream) {
    if (!function_fits(function, grid, block, shared, stream)) return TOO_LARGE;
    return REAL(hipLaunchCooperativeKernel, const void *, struct dim3, struct dim3, void **, unsigned, void *)(function, grid, block, arguments, shared, stream);
}

static int ours_hipLaunchCooperativeKernel_spt(const void *function, struct dim3 grid, struct dim3 block, void **arguments, unsigned shared, void *stream) {
    if (!function_fits(function, grid, block, shared, stream)) return TOO_LARGE;
    return REAL(hipLaunchCooperativeKernel_spt, const void *, struct dim3, struct dim3, void **, unsigned, void *)(function, grid, block, arguments, shared, stream);
}

static int ours_hipLaunchCooperativeKernelMultiDevice(struct launch *list, int count, unsigned flags) {
    for (int i = 0; list && i < count; i++)
        if (!function_fits(list[i].function, list[i].grid, list[i].block, list[i].shared, list[i].stream)) return TOO_LARGE;
    return REAL(hipLaunchCooperativeKernelMultiDevice, struct launch *, int, unsigned)(list, count, flags);
}

static int ours_hipModuleLaunchCooperativeKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                                                 unsigned shared, void *stream, void **parameters) {
    if (!module_fits(function, (struct dim3){gx, gy, gz}, (struct dim3){bx, by, bz}, shared, stream)) return TOO_LARGE;
    return REAL(hipModuleLaunchCooperativeKernel, void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **)(
        function, gx, gy, gz, bx, by, bz, shared, stream, parameters);
}

static int ours_hipModuleLaunchCooperativeKernelMultiDevice(struct module_launch *list, unsigned count, unsigned flags) {
    for (unsigned i = 0; list && i < count; i++)
        if (!module_fits(list[i].function, list[i].grid, list[i].block, list[i].shared, list[i].stream)) return TOO_LARGE;
    return REAL(hipModuleLaunchCooperativeKernelMultiDevice, struct module_launch *, unsigned, unsigned)(list, count, flags);
}

/* The grid that fills the device: of the slice's units. Blocks per unit stay what they are. */
static int for_the_slice(int result, int *grid) {
    int device = current_device(), whole = whole_units(device);
    if (!result && grid && whole > 0) {
        int units = units_on(device, whole);
        if (*grid % whole == 0) *grid = *grid / whole * units;
        else if (*grid > units) *grid = (int)((int64_t)*grid * units / whole);
    }
    return result;
}

static int ours_hipOccupancyMaxPotentialBlockSize(int *grid, int *block, const void *function, size_t shared, int limit) {
    return for_the_slice(REAL(hipOccupancyMaxPotentialBlockSize, int *, int *, const void *, size_t, int)(grid, block, function, shared, limit), grid);
}
static int ours_hipModuleOccupancyMaxPotentialBlockSize(int *grid, int *block, void *function, size_t shared, int limit) {
    return for_the_slice(REAL(hipModuleOccupancyMaxPotentialBlockSize, int *, int *, void *, size_t, int)(grid, block, function, shared, limit), grid);
}
static int ours_hipModuleOccupancyMaxPotentialBlockSizeWithFlags(int *grid, int *block, void *function, size_t shared, int limit, unsigned flags) {
    return for_the_slice(
        REAL(hipModuleOccupancyMaxPotentialBlockSizeWithFlags, int *, int *, void *, size_t, int, unsigned)(grid, block, function, shared, limit, flags), grid);
}

void *const front_ours[FRONT_NAMES] = {
#define HIP(name) [F_##name] = (void *)ours_##name,
#define USES(name)
#include "names.h"
#undef HIP
#undef USES
};
