#include "next.h"

#include <elf.h>
#include <link.h>

#include "os.h"

struct search {
    const char *name;
    uint32_t gnu_hash;
    int past_ours;
    void *found;
};

static uint32_t gnu_hash_of(const char *name) {
    uint32_t hash = 5381;
    for (; *name; name++) hash = hash * 33 + (unsigned char)*name;
    return hash;
}

/* glibc writes the addresses of a dynamic section into it, musl leaves them as offsets; the vDSO's are offsets too. */
static const void *absolute(const struct dl_phdr_info *object, ElfW(Addr) address) {
    return (const void *)(address < object->dlpi_addr ? object->dlpi_addr + address : address);
}

static const ElfW(Sym) *look(const struct search *search, const ElfW(Sym) *symbol, const char *strings) {
    int type = ELF64_ST_TYPE(symbol->st_info), bind = ELF64_ST_BIND(symbol->st_info);
    if (symbol->st_shndx == SHN_UNDEF || type != STT_FUNC || (bind != STB_GLOBAL && bind != STB_WEAK)) return NULL;
    return avg_equal(strings + symbol->st_name, search->name) ? symbol : NULL;
}

static const ElfW(Sym) *by_gnu_hash(const struct search *search, const uint32_t *table, const ElfW(Sym) *symbols,
                                    const char *strings, const uint16_t *versions) {
    uint32_t bucket_count = table[0], first = table[1], bloom_words = table[2];
    const uint32_t *buckets = table + 4 + bloom_words * (sizeof(ElfW(Addr)) / 4), *chain = buckets + bucket_count;
    if (!bucket_count) return NULL;
    uint32_t index = buckets[search->gnu_hash % bucket_count];
    if (index < first) return NULL;
    for (;; index++) {
        uint32_t hash = chain[index - first];
        if ((hash | 1) == (search->gnu_hash | 1)) {
            const ElfW(Sym) *symbol = look(search, symbols + index, strings);
            if (symbol && !(versions && versions[index] & 0x8000)) return symbol; /* hidden: not the default version */
        }
        if (hash & 1) return NULL;
    }
}

static const ElfW(Sym) *by_sysv_hash(const struct search *search, const uint32_t *table, const ElfW(Sym) *symbols,
                                     const char *strings) {
    for (uint32_t index = 1; index < table[1]; index++) { /* in order: once a process, not worth a second hash function */
        const ElfW(Sym) *symbol = look(search, symbols + index, strings);
        if (symbol) return symbol;
    }
    return NULL;
}

static const ElfW(Sym) *symbol_in(const struct search *search, const struct dl_phdr_info *object, const ElfW(Dyn) *dynamic) {
    const ElfW(Sym) *symbols = NULL;
    const char *strings = NULL;
    const uint32_t *gnu = NULL, *sysv = NULL;
    const uint16_t *versions = NULL;
    for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++) {
        const void *at = absolute(object, dynamic->d_un.d_ptr);
        if (dynamic->d_tag == DT_SYMTAB) symbols = at;
        if (dynamic->d_tag == DT_STRTAB) strings = at;
        if (dynamic->d_tag == DT_GNU_HASH) gnu = at;
        if (dynamic->d_tag == DT_HASH) sysv = at;
        if (dynamic->d_tag == DT_VERSYM) versions = at;
    }
    if (!symbols || !strings) return NULL;
    return gnu ? by_gnu_hash(search, gnu, symbols, strings, versions) : sysv ? by_sysv_hash(search, sysv, symbols, strings) : NULL;
}

static int visit(struct dl_phdr_info *object, size_t bytes, void *data) {
    struct search *search = data;
    (void)bytes;
    const ElfW(Dyn) *dynamic = NULL;
    int ours = 0;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &object->dlpi_phdr[i];
        ElfW(Addr) start = object->dlpi_addr + part->p_vaddr;
        if (part->p_type == PT_DYNAMIC) dynamic = (const ElfW(Dyn) *)start;
        if (part->p_type == PT_LOAD && (ElfW(Addr))&visit - start < part->p_memsz) ours = 1;
    }
    if (ours) {
        search->past_ours = 1;
        return 0;
    }
    if (!search->past_ours) return 0;
    const ElfW(Sym) *symbol = symbol_in(search, object, dynamic);
    if (!symbol) return 0;
    search->found = (void *)(object->dlpi_addr + symbol->st_value);
    return 1;
}

const ElfW(Sym) *avg_symbol_in(const struct dl_phdr_info *object, const char *name) {
    struct search search = {.name = name, .gnu_hash = gnu_hash_of(name)};
    for (int i = 0; i < object->dlpi_phnum; i++)
        if (object->dlpi_phdr[i].p_type == PT_DYNAMIC)
            return symbol_in(&search, object, (const ElfW(Dyn) *)(object->dlpi_addr + object->dlpi_phdr[i].p_vaddr));
    return NULL;
}

const ElfW(Sym) *avg_symbol_at(ElfW(Addr) base, const ElfW(Dyn) *dynamic, const char *name) {
    struct search search = {.name = name, .gnu_hash = gnu_hash_of(name)};
    struct dl_phdr_info object = {.dlpi_addr = base};
    return symbol_in(&search, &object, dynamic);
}

void *avg_next(const char *name) {
    struct search search = {.name = name, .gnu_hash = gnu_hash_of(name)};
    dl_iterate_phdr(visit, &search);
    return search.found;
}
