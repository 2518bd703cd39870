"""Write the C source of the extension module ``amdvgpud._abi`` from the shared header.

The declarations come out of ``include/amdvgpu/abi.h`` itself (the text between its two "cffi" lines), so there is no
second copy of the layout to go stale; API mode then lets the C compiler decide sizes and offsets. Run by CMake:
``abi_build.py HEADER OUTPUT``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import cffi

EXTRA = """
uint64_t avg_text_hash(const char *text, size_t length);
size_t avg_slot_bytes(uint32_t gpu_count);
size_t avg_ledger_bytes(uint32_t gpu_count);
void avg_store(void *at, uint64_t value);
int64_t avg_reclaim_guarded(void *ledger, uint32_t gpu_count, uint32_t index, uint64_t dead, uint32_t ns, uint32_t pid);
"""

SOURCE = """
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include "src/slot.h"

/* Live fields change by one whole store. Python's own writes into a mapping give no such promise, hence this.
 * `at` must be 8-byte aligned. */
static void avg_store(void *at, uint64_t value) { AVG_STORE((uint64_t *)at, value); }

/* A slot changes hands by compare-and-swap, which takes a mapping; a guest that cuts its ledger short at that moment
 * would kill whoever touches the mapping by SIGBUS, which must not be the daemon. So the few touches here happen with a
 * handler in place, in one thread at a time; the signal is synchronous, so it comes to the thread that caused it. */
static pthread_mutex_t guard_lock = PTHREAD_MUTEX_INITIALIZER;
static sigjmp_buf guard_exit;
static pthread_t guard_thread;
static struct sigaction guard_before;

static void guard_signal(int number, siginfo_t *info, void *context) {
    (void)info;
    (void)context;
    if (pthread_equal(guard_thread, pthread_self())) siglongjmp(guard_exit, 1);
    sigaction(number, &guard_before, 0); /* another thread's own trouble: it meets it again, as if we were not here */
}

/* avg_slot_reclaim on a mapped ledger: the bytes given back, or -1 where the file ended under our hands. */
static int64_t avg_reclaim_guarded(void *ledger, uint32_t gpu_count, uint32_t index, uint64_t dead, uint32_t ns,
                                   uint32_t pid) {
    volatile int64_t bytes = -1;
    struct sigaction action = {.sa_sigaction = guard_signal, .sa_flags = SA_SIGINFO};
    sigemptyset(&action.sa_mask);
    pthread_mutex_lock(&guard_lock);
    guard_thread = pthread_self();
    sigaction(SIGBUS, &action, &guard_before);
    if (!sigsetjmp(guard_exit, 1)) {
        uint64_t given = avg_slot_reclaim(ledger, gpu_count, index, dead, ns, pid);
        bytes = given > INT64_MAX ? INT64_MAX : (int64_t)given; /* the guest wrote the number */
    }
    sigaction(SIGBUS, &guard_before, 0);
    pthread_mutex_unlock(&guard_lock);
    return bytes;
}
"""


def declarations(header: str) -> str:
    """The part of ``header`` meant for cffi, without comments and number suffixes, which its parser does not take."""
    found = re.search(r"/\* cffi: begin \*/(.*)/\* cffi: end \*/", header, re.DOTALL)
    if found is None:
        raise SystemExit("abi.h has lost its 'cffi: begin' and 'cffi: end' lines")
    text = re.sub(r"/\*.*?\*/", "", found[1], flags=re.DOTALL)
    return re.sub(r"\b(0x[0-9a-fA-F]+|\d+)ULL\b", r"\1", text)


def main() -> None:
    header, output = map(Path, sys.argv[1:])
    ffi = cffi.FFI()
    ffi.cdef(declarations(header.read_text()) + EXTRA)
    ffi.set_source("amdvgpud._abi", SOURCE)
    ffi.emit_c_code(str(output))


if __name__ == "__main__":
    main()
