/* Requests on render nodes: as much of DRM and amdgpu as libdrm, ROCr and amd-smi ask (amdgpu_drm.h, drm.h). */
#include <stdlib.h>

#include "softkfd.h"

static void copy_text(char *to, size_t *length, const char *text) {
  size_t n = strlen(text);
  if (to && *length) memcpy(to, text, n < *length ? n : *length);
  *length = n;
}

static int version(struct drm_version *v) {
  v->version_major = 3, v->version_minor = 61, v->version_patchlevel = 0;
  copy_text(v->name, &v->name_len, "amdgpu");
  copy_text(v->date, &v->date_len, "20150101");
  copy_text(v->desc, &v->desc_len, "AMD GPU");
  return 0;
}

/* Readers know shorter and longer forms of the same answer. */
static int answer(const struct drm_amdgpu_info *i, const void *what, size_t size) {
  memset((void *)i->return_pointer, 0, i->return_size);
  memcpy((void *)i->return_pointer, what, size < i->return_size ? size : i->return_size);
  return 0;
}

static int device_info(const struct soft_gpu *g, const struct drm_amdgpu_info *i) {
  struct drm_amdgpu_info_device d = {
      .device_id = g->device_id, .pci_rev = g->rev, .family = g->family, .num_shader_engines = g->ses,
      .num_shader_arrays_per_engine = g->sa_per_se, .gpu_counter_freq = g->counter_khz, .max_engine_clock = g->sclk,
      .max_memory_clock = g->mclk, .cu_active_number = g->cus, .virtual_address_offset = 1 << 21,
      .virtual_address_max = (1ull << 47) - (1 << 21), .virtual_address_alignment = 4096, .pte_fragment_size = 1 << 21,
      .gart_page_size = 4096, .vram_type = g->vram_type, .vram_bit_width = g->width, .wave_front_size = g->wave,
      .high_va_offset = 0xffff800000000000ull, .high_va_max = 0xffffffffffe00000ull, .num_hw_gfx_contexts = 8,
      .num_rb_pipes = 16, .enabled_rb_pipes_mask = 0xffff, .num_cu_per_sh = 10, .pcie_gen = 5, .pcie_num_lanes = 16};
  return answer(i, &d, sizeof d);
}

static int memory_info(const struct soft_gpu *g, const struct drm_amdgpu_info *i) {
  struct drm_amdgpu_memory_info m = {0};
  m.vram.total_heap_size = m.vram.usable_heap_size = m.vram.max_allocation = g->vram;
  m.gtt.total_heap_size = m.gtt.usable_heap_size = m.gtt.max_allocation = g->gtt;
  soft_used(g, &m.vram.heap_usage, &m.gtt.heap_usage);
  m.cpu_accessible_vram = m.vram;
  return answer(i, &m, sizeof m);
}

static int vbios_info(const struct drm_amdgpu_info *i) {
  struct drm_amdgpu_info_vbios v = {.version = 1};
  if (i->vbios_info.type != AMDGPU_INFO_VBIOS_INFO) return EINVAL;
  strcpy((char *)v.name, "SOFTKFD VBIOS"), strcpy((char *)v.vbios_pn, "113-SOFTKFD-000");
  strcpy((char *)v.vbios_ver_str, "000.000.000.000.000001"), strcpy((char *)v.date, "2025/01/01 00:00");
  return answer(i, &v, sizeof v);
}

static int amdgpu_info(const struct soft_gpu *g, const struct drm_amdgpu_info *i) {
  uint32_t one = 1;
  uint64_t number = 0, other;
  soft_log("\"op\":\"AMDGPU_INFO\",\"gpu\":%u,\"query\":\"0x%x\",\"size\":%u", g->gpu_id, i->query, i->return_size);
  switch (i->query) {
  case AMDGPU_INFO_ACCEL_WORKING: return answer(i, &one, sizeof one);
  case AMDGPU_INFO_TIMESTAMP: number = soft_gpu_clock(); return answer(i, &number, sizeof number);
  case AMDGPU_INFO_READ_MMR_REG: return answer(i, &number, sizeof number);
  case AMDGPU_INFO_DEV_INFO: return device_info(g, i);
  case AMDGPU_INFO_MEMORY: return memory_info(g, i);
  case AMDGPU_INFO_VRAM_USAGE: soft_used(g, &number, &other); return answer(i, &number, sizeof number);
  case AMDGPU_INFO_VRAM_GTT: {
    struct drm_amdgpu_info_vram_gtt v = {g->vram, g->vram, g->gtt};
    return answer(i, &v, sizeof v);
  }
  case AMDGPU_INFO_FW_VERSION: {
    struct drm_amdgpu_info_firmware f = {.ver = 100, .feature = 1};
    return answer(i, &f, sizeof f);
  }
  case AMDGPU_INFO_VBIOS: return vbios_info(i);
  default: return EINVAL;
  }
}

static int gem_op(struct drm_amdgpu_gem_op *a) {
  struct drm_amdgpu_gem_create_in *c = (void *)a->value;
  uint64_t size = 0;
  if (a->op != AMDGPU_GEM_OP_GET_GEM_CREATE_INFO || soft_gem_size(a->handle, &size)) return EINVAL;
  *c = (struct drm_amdgpu_gem_create_in){.bo_size = size, .alignment = 4096, .domains = AMDGPU_GEM_DOMAIN_VRAM};
  return 0;
}

static int gem_va(const struct soft_gpu *g, struct drm_amdgpu_gem_va *a) {
  int error = soft_gem_va(a);
  soft_log("\"op\":\"GEM_VA\",\"gpu\":%u,\"kind\":%u,\"va\":\"%llx\",\"size\":%llu,\"err\":%d", g->gpu_id, a->operation,
           (unsigned long long)a->va_address, (unsigned long long)a->map_size, error);
  return error;
}

int soft_drm_ioctl(struct soft_gpu *g, bool is_card, unsigned long request, void *arg) {
  switch (_IOC_NR(request)) {
  case 0x00: return version(arg);
  case 0x05: ((struct drm_client *)arg)->auth = 1; return 0;
  case 0x09: return soft_gem_close(*(uint32_t *)arg);
  case 0x0c: ((struct drm_get_cap *)arg)->value = 0; return 0;
  case 0x2d: {
    struct drm_prime_handle *a = arg;
    return soft_gem_to_fd(a->handle, &a->fd);
  }
  case 0x2e: {
    struct drm_prime_handle *a = arg;
    int error = soft_gem_of_fd(a->fd, &a->handle);
    soft_log("\"op\":\"PRIME_FD_TO_HANDLE\",\"gpu\":%u,\"gem\":%u", g->gpu_id, a->handle);
    return error;
  }
  case 0x40: return soft_gem_create(g, arg);
  case 0x41: {
    union drm_amdgpu_gem_mmap *a = arg;
    return soft_gem_offset(a->in.handle, (uint64_t *)&a->out.addr_ptr);
  }
  case 0x45: return amdgpu_info(g, arg);
  case 0x46: {
    struct drm_amdgpu_gem_metadata *a = arg;
    memset(&a->data, 0, sizeof a->data);
    return 0;
  }
  case 0x48: return gem_va(g, arg);
  case 0x50: return gem_op(arg);
  default:
    soft_log("\"op\":\"DRM_UNHANDLED\",\"nr\":\"0x%lx\",\"gpu\":%u,\"card\":%d", (unsigned long)_IOC_NR(request),
             g->gpu_id, is_card);
    return EINVAL;
  }
}
