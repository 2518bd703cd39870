/* The definition of a function that the program would have used without us: the next one in load order.
 *
 * Not by dlsym, whose symbol version (GLIBC_2.34) would keep the gate out of every older image and which takes locks;
 * by the dynamic symbol tables themselves. */
#ifndef AMDVGPU_NEXT_H
#define AMDVGPU_NEXT_H

/* Address of `name` in the first object after ours that defines it, or NULL. */
void *avg_next(const char *name);

#endif
