/* Nothing, for 32-bit programs: without a library of their kind their dynamic linker prints a line at every start.
 * ROCm has no 32-bit runtime, so there is nothing to hold. Built with -m32 -nostdlib: needs no 32-bit libc. */
extern const char avg_stub32;
const char avg_stub32 = 0;
