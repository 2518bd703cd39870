/* The definition of a function that the program would have used without us: the next one in load order.
 *
 * Not by dlsym, whose symbol version (GLIBC_2.34) would keep the gate out of every older image and which takes locks;
 * by the dynamic symbol tables themselves. */
#ifndef AMDVGPU_NEXT_H
#define AMDVGPU_NEXT_H

#include <link.h>

/* Address of `name` in the first object after ours that defines it, or NULL. */
void *avg_next(const char *name);

/* What the dynamic symbol table of `object` says of function `name`, by its default version; NULL: it defines none. */
const ElfW(Sym) *avg_symbol_in(const struct dl_phdr_info *object, const char *name);

/* The same of an object that is loaded at `base` and whose dynamic section is `dynamic`. */
const ElfW(Sym) *avg_symbol_at(ElfW(Addr) base, const ElfW(Dyn) *dynamic, const char *name);

#endif
