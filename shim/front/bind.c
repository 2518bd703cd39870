/* Puts the functions of calls.c in the place of the runtime's, in this process, without exporting a single hip name.
 *
 * Two kinds of callers. Those whose addresses were resolved before we came: their import slots (GOT) hold the runtime's
 * address, and are exchanged. Those that resolve later, by the dynamic linker, dlsym, dlvsym, ctypes or hipGetProcAddress:
 * all of them read the runtime's own dynamic symbol table, so its entries are exchanged, in this process's private copy of
 * that page. Nobody who asks for another name notices anything, nor does a process without HIP.
 *
 * What is not reached: addresses that a program fetched and kept before the runtime opened its first file (its libnuma
 * does so while it is being loaded), a second runtime in the same process, another namespace (dlmopen, and so LD_AUDIT),
 * a kernel or SELinux policy that refuses to make the pages writable. There the gate alone holds. */
#include <elf.h>
#include <link.h>
#include <sys/mman.h>

#include "front.h"

#include "../src/environ.h"
#include "../src/next.h"
#include "../src/os.h"
#include "../src/process.h"

#if defined(__x86_64__)
#define IS_SLOT(type) ((type) == R_X86_64_JUMP_SLOT || (type) == R_X86_64_GLOB_DAT || (type) == R_X86_64_64)
#define IS_LAZY(type) ((type) == R_X86_64_JUMP_SLOT)
#elif defined(__aarch64__)
#define IS_SLOT(type) ((type) == R_AARCH64_JUMP_SLOT || (type) == R_AARCH64_GLOB_DAT || (type) == R_AARCH64_ABS64)
#define IS_LAZY(type) ((type) == R_AARCH64_JUMP_SLOT)
#endif
#define PAGE_MASK 65535UL /* the largest page size there is: whole such pages of a segment are changed and changed back */

void *front_real[FRONT_NAMES];

static const char *const names[FRONT_NAMES] = {
#define HIP(name) [F_##name] = #name,
#define USES(name) [F_##name] = #name,
#include "names.h"
#undef HIP
#undef USES
};

static int busy;                        /* a thread is in here; another need not wait: it was told in time, or is early */
static int off;                         /* no slice here, or switched off */
static unsigned long long loads_seen;   /* dlpi_adds at the last look */
static ElfW(Addr) runtime;              /* where the runtime that we are bound to is; 0: none */

/* ----------------------------------------------------------------------------------------------- writing to a page */

/* The page that is writable for us at this moment, and what it was. Neighbouring words are written one after the other, so
 * it stays open until another page is wanted. */
static struct { ElfW(Addr) page; long length; int protection; } opened;

static void close_page(void) {
    if (opened.length) AVG_SYS(mprotect, opened.page, opened.length, opened.protection, 0);
    opened.length = 0;
}

static int open_page(ElfW(Addr) at, int protection) {
    if (opened.length && at - opened.page < (ElfW(Addr))opened.length) return 0;
    close_page();
    opened.page = at & ~4095UL, opened.length = 4096; /* the start of a page of 4 KiB; with larger pages the kernel says EINVAL ... */
    if (!AVG_SYS(mprotect, opened.page, opened.length, protection | PROT_WRITE, 0)) return opened.protection = protection, 0;
    opened.page = at & ~PAGE_MASK, opened.length = PAGE_MASK + 1; /* ... and this is one of theirs */
    if (!AVG_SYS(mprotect, opened.page, opened.length, protection | PROT_WRITE, 0)) return opened.protection = protection, 0;
    opened.length = 0;
    return -1;
}

/* Store a word of `object`, in a read-only page or not. Aligned, so whole for whoever reads it meanwhile. */
static int store(const struct dl_phdr_info *object, ElfW(Addr) *at, ElfW(Addr) value) {
    ElfW(Addr) here = (ElfW(Addr))at;
    int protection = -1;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &object->dlpi_phdr[i];
        ElfW(Addr) start = object->dlpi_addr + part->p_vaddr;
        if (here - start >= part->p_memsz) continue;
        if (part->p_type == PT_LOAD && protection < 0)
            protection = (part->p_flags & PF_R ? PROT_READ : 0) | (part->p_flags & PF_W ? PROT_WRITE : 0) | (part->p_flags & PF_X ? PROT_EXEC : 0);
        if (part->p_type == PT_GNU_RELRO) protection = PROT_READ;
    }
    if (protection < 0 || (!(protection & PROT_WRITE) && open_page(here, protection))) return -1;
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
    return 0;
}

/* ------------------------------------------------------------------------------------------------------- an object */

struct dynamic {
    const ElfW(Sym) *symbols;
    const char *strings;
    const ElfW(Rela) *tables[2]; /* of the GOT at large, and of lazy calls */
    size_t bytes[2];
    const uint32_t *hash;
};

static const void *absolute(const struct dl_phdr_info *object, ElfW(Addr) address) {
    return (const void *)(address < object->dlpi_addr ? object->dlpi_addr + address : address);
}

static int read_dynamic(const struct dl_phdr_info *object, struct dynamic *found) {
    const ElfW(Dyn) *entry = NULL;
    *found = (struct dynamic){0};
    for (int i = 0; i < object->dlpi_phnum; i++)
        if (object->dlpi_phdr[i].p_type == PT_DYNAMIC) entry = (const ElfW(Dyn) *)(object->dlpi_addr + object->dlpi_phdr[i].p_vaddr);
    for (; entry && entry->d_tag != DT_NULL; entry++) switch (entry->d_tag) {
        case DT_SYMTAB: found->symbols = absolute(object, entry->d_un.d_ptr); break;
        case DT_STRTAB: found->strings = absolute(object, entry->d_un.d_ptr); break;
        case DT_RELA: found->tables[0] = absolute(object, entry->d_un.d_ptr); break;
        case DT_RELASZ: found->bytes[0] = entry->d_un.d_val; break;
        case DT_JMPREL: found->tables[1] = absolute(object, entry->d_un.d_ptr); break;
        case DT_GNU_HASH: found->hash = absolute(object, entry->d_un.d_ptr); break;
        case DT_PLTRELSZ: found->bytes[1] = entry->d_un.d_val; break;
        }
    return found->symbols && found->strings;
}

static int name_of(const char *text) {
    if (text[0] != 'h' || text[1] != 'i' || text[2] != 'p') return -1;
    for (int i = 0; i < FRONT_NAMES; i++)
        if (front_ours[i] && avg_equal(names[i], text)) return i;
    return -1;
}

/* Whether `address` lies in the program text of `object`: an import slot that was never used points back to it. */
static int in_text(const struct dl_phdr_info *object, ElfW(Addr) address) {
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &object->dlpi_phdr[i];
        if (part->p_type == PT_LOAD && part->p_flags & PF_X && address - (object->dlpi_addr + part->p_vaddr) < part->p_memsz) return 1;
    }
    return 0;
}

/* Whether an object may import one of our names. What it imports stands in its symbol table before the first hashed symbol, so
 * a compiler's library with half a million relocations is passed over by a look at its few hundred imports. But a program at
 * a fixed place may hash an import: its own stub is then that function's address for all. */
static int may_import(const struct dl_phdr_info *object, const struct dynamic *parts) {
    if (!parts->hash || !object->dlpi_addr) return 1;
    for (uint32_t i = 1; i < parts->hash[1]; i++)
        if (name_of(parts->strings + parts->symbols[i].st_name) >= 0) return 1;
    return object->dlpi_addr == runtime;
}

/* Exchange the import slots of one object. A slot that holds anything but the runtime's address, or the object's own
 * stub, is left alone: another interposer's, or of an object that is just being loaded, which will find ours by itself.
 * The runtime's own calls to itself go on to its own functions. */
static void exchange_slots(const struct dl_phdr_info *object) {
    struct dynamic parts;
    if (!read_dynamic(object, &parts) || !may_import(object, &parts)) return;
    int own = object->dlpi_addr == runtime;
    for (int t = 0; t < 2; t++)
        for (size_t i = 0; parts.tables[t] && i < parts.bytes[t] / sizeof(ElfW(Rela)); i++) {
            const ElfW(Rela) *entry = &parts.tables[t][i];
            uint32_t type = ELF64_R_TYPE(entry->r_info);
            if (!IS_SLOT(type) || !ELF64_R_SYM(entry->r_info) || entry->r_addend) continue;
            int name = name_of(parts.strings + parts.symbols[ELF64_R_SYM(entry->r_info)].st_name);
            if (name < 0 || !front_real[name]) continue;
            ElfW(Addr) *slot = (ElfW(Addr) *)(object->dlpi_addr + entry->r_offset), real = (ElfW(Addr))front_real[name];
            ElfW(Addr) now = __atomic_load_n(slot, __ATOMIC_ACQUIRE);
            if (IS_LAZY(type) && now != real && in_text(object, now) && !own) store(object, slot, (ElfW(Addr))front_ours[name]);
            else if (IS_LAZY(type) && now != real && own && in_text(object, now)) store(object, slot, real);
            else if (now == real && !own) store(object, slot, (ElfW(Addr))front_ours[name]);
        }
}

/* Exchange what the runtime's symbol table says. st_value is counted from where the object is: it may wrap around. */
static void exchange_symbols(const struct dl_phdr_info *object) {
    for (int i = 0; i < FRONT_NAMES; i++) {
        if (!front_ours[i] || !front_real[i]) continue;
        ElfW(Sym) *symbol = (ElfW(Sym) *)avg_symbol_in(object, names[i]);
        if (symbol) store(object, &symbol->st_value, (ElfW(Addr))front_ours[i] - object->dlpi_addr);
    }
}

/* --------------------------------------------------------------------------------------------------------- looking */

static int is_runtime(const struct dl_phdr_info *object) {
    const char *name = object->dlpi_name, *file = name;
    for (; name && *name; name++)
        if (*name == '/') file = name + 1;
    /* Wheels bring copies by other names; all keep this part. */
    for (; file && *file; file++)
        if (avg_starts(file, "amdhip64")) return 1;
    return 0;
}

static int first_object(struct dl_phdr_info *object, size_t bytes, void *loads) {
    *(unsigned long long *)loads = bytes >= offsetof(struct dl_phdr_info, dlpi_adds) + sizeof object->dlpi_adds ? object->dlpi_adds : 0;
    return 1;
}

static int still_there(struct dl_phdr_info *object, size_t bytes, void *there) {
    (void)bytes;
    if (object->dlpi_addr == runtime && is_runtime(object)) *(int *)there = 1;
    return *(int *)there;
}

static int wanted(void) {
    const char *word = avg_env("AMDVGPU_HIP_FRONT");
    return !word || !(avg_equal(word, "0") || avg_equal(word, "off"));
}

static int find_runtime(struct dl_phdr_info *object, size_t bytes, void *found) {
    (void)bytes;
    if (!is_runtime(object) || !avg_symbol_in(object, "hipMalloc")) return 0;
    if (wanted() && avg_process_has_slices()) {
        for (int i = 0; i < FRONT_NAMES; i++) {
            const ElfW(Sym) *symbol = avg_symbol_in(object, names[i]);
            front_real[i] = symbol ? (void *)(object->dlpi_addr + symbol->st_value) : NULL;
        }
        runtime = object->dlpi_addr;
        exchange_symbols(object);
    }
    *(int *)found = 1;
    return 1;
}

static int visit(struct dl_phdr_info *object, size_t bytes, void *data) {
    (void)bytes, (void)data;
    exchange_slots(object);
    return 0;
}

void avg_front_look(void) {
    unsigned long long loads = 0;
    if (off || __atomic_exchange_n(&busy, 1, __ATOMIC_ACQUIRE)) return;
    dl_iterate_phdr(first_object, &loads);
    if (!loads || loads != loads_seen) {
        loads_seen = loads;
        int there = 0, found = 0;
        if (runtime) dl_iterate_phdr(still_there, &there);
        if (!there) {
            runtime = 0;
            dl_iterate_phdr(find_runtime, &found);
            if (found && !runtime) off = 1; /* neither will change its mind */
            if (runtime) dl_iterate_phdr(visit, NULL);
            close_page();
        }
    }
    __atomic_store_n(&busy, 0, __ATOMIC_RELEASE);
}
