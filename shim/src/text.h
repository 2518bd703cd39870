/* AMDVGPU_VRAM and AMDVGPU_CUS: what a user may write to take less than the slice has. Pure parsers.
 *
 * Sizes follow the grammar of amdvgpud/core/sizes.py (a test compares the two), CU lists are "0-37,40,44-47". A text
 * that is not understood is an error and never a limit of zero or none. */
#ifndef AMDVGPU_TEXT_H
#define AMDVGPU_TEXT_H

#include "mask.h"
#include "os.h"

/* Bytes of `text`, 1 to 2^63-1; 0 where it is no size. */
static inline uint64_t avg_parse_size(const char *text) {
    while (*text == ' ' || (*text >= '\t' && *text <= '\r')) text++;
    if (*text < '0' || *text > '9') return 0;
    uint64_t whole = avg_number(&text), fraction = 0, scale = 1, unit = 1;
    if (*text == '.') {
        text++;
        if (*text < '0' || *text > '9') return 0;
        for (; *text >= '0' && *text <= '9'; text++) {
            if (*text == '0') { /* zeros count only if something follows */
                const char *rest = text;
                while (*rest == '0') rest++;
                if (*rest < '0' || *rest > '9') { text = rest; break; }
            }
            if (scale > UINT64_MAX / 10 / 10) return 0; /* more digits than any size needs */
            scale *= 10;
            fraction = fraction * 10 + (uint64_t)(*text - '0');
        }
    }
    while (*text == ' ' || (*text >= '\t' && *text <= '\r')) text++;
    char letter = *text | 0x20;
    int power = letter == 'k' ? 1 : letter == 'm' ? 2 : letter == 'g' ? 3 : letter == 't' ? 4 : 0;
    if (power) text++;
    uint64_t base = 1000;
    if (power && (*text | 0x20) == 'i') base = 1024, text++;
    for (int i = 0; i < power; i++) unit *= base;
    if ((*text | 0x20) == 'b') text++;
    while (*text == ' ' || (*text >= '\t' && *text <= '\r')) text++;
    if (*text) return 0;
    unsigned __int128 bytes = (unsigned __int128)whole * unit, part = (unsigned __int128)fraction * unit;
    if (part % scale) return 0;
    bytes += part / scale;
    return bytes >> 63 ? 0 : (uint64_t)bytes;
}

/* Bytes of a whole number with at most K, M, G or T, all powers of 1024 (HIP_DEVICE_MEMORY_LIMIT); 0 where it is none. */
static inline uint64_t avg_parse_binary_size(const char *text) {
    if (*text < '0' || *text > '9') return 0;
    uint64_t bytes = avg_number(&text);
    char letter = *text | 0x20;
    int power = letter == 'k' ? 1 : letter == 'm' ? 2 : letter == 'g' ? 3 : letter == 't' ? 4 : 0;
    if (power) text++;
    if (power && (*text | 0x20) == 'i') text++;
    if ((*text | 0x20) == 'b') text++;
    return *text || bytes > (UINT64_MAX >> 1) >> power * 10 ? 0 : bytes << power * 10;
}

/* The CU list `text` as a mask; 0 where it is none. */
static inline int avg_parse_cus(const char *text, struct avg_mask *mask) {
    *mask = (struct avg_mask){{0}};
    for (;;) {
        if (*text < '0' || *text > '9') return 0;
        uint64_t first = avg_number(&text), last = first;
        if (*text == '-') {
            text++;
            if (*text < '0' || *text > '9') return 0;
            last = avg_number(&text);
        }
        if (last < first || last >= AVG_MASK_WORDS * 64) return 0;
        for (; first <= last; first++) mask->word[first / 64] |= 1ULL << first % 64;
        if (!*text) return 1;
        if (*text++ != ',') return 0;
    }
}

#endif
