/* Narrowing a CU mask: pure, so that it can be tested by itself.
 *
 * What a queue runs with is the caller's mask AND the slice's. Three results of that would be worse than the slice's
 * own mask, which then stands instead: none at all (a queue without a CU may hang), an XCC without a CU (the hardware
 * waits for it: a hang that resets every tenant's GPU), and half a WGP (the driver refuses it on gfx10 and later). */
#ifndef AMDVGPU_MASK_H
#define AMDVGPU_MASK_H

#include <amdvgpu/abi.h>

struct avg_mask { uint64_t word[AVG_MASK_WORDS]; };

/* What one GPU's slice allows: the mask with the shape it has to keep. */
struct avg_mask_rule {
    struct avg_mask mask;
    uint32_t cu_count, xcc_count;
    int wgp;
};

/* Bits that go to the driver: the CU count, in whole 32-bit words, at most 1024. One size per GPU makes the comparison
 * with the last mask sent trivial. */
static inline uint32_t avg_mask_bits(const struct avg_mask_rule *rule) {
    uint32_t bits = (rule->cu_count + 31) / 32 * 32;
    return bits > AVG_MASK_WORDS * 64 ? AVG_MASK_WORDS * 64 : bits;
}

static inline int avg_mask_bit(const struct avg_mask *mask, uint32_t bit) {
    return mask->word[bit / 64] >> bit % 64 & 1;
}

/* Whether a queue may be given `mask` on a GPU of this shape. */
static inline int avg_mask_sound(const struct avg_mask_rule *rule, const struct avg_mask *mask) {
    uint32_t limit = avg_mask_bits(rule), xccs = rule->xcc_count ? rule->xcc_count : 1;
    for (uint32_t xcc = 0; xcc < xccs; xcc++) {
        uint32_t bit = xcc;
        while (bit < limit && !avg_mask_bit(mask, bit)) bit += xccs;
        if (bit >= limit) return 0;
    }
    if (rule->wgp)
        for (int i = 0; i < AVG_MASK_WORDS; i++)
            if ((mask->word[i] ^ mask->word[i] >> 1) & 0x5555555555555555ULL) return 0;
    return 1;
}

/* The mask to set where `asked` was asked for: never a bit that the slice lacks. */
static inline struct avg_mask avg_mask_narrow(const struct avg_mask_rule *rule, const struct avg_mask *asked) {
    struct avg_mask both;
    for (int i = 0; i < AVG_MASK_WORDS; i++) both.word[i] = rule->mask.word[i] & asked->word[i];
    return avg_mask_sound(rule, &both) ? both : rule->mask;
}

/* Whether what was asked for can be had within the rule: else avg_mask_narrow answers the rule's own mask. */
static inline int avg_mask_narrows(const struct avg_mask_rule *rule, const struct avg_mask *asked) {
    struct avg_mask both;
    for (int i = 0; i < AVG_MASK_WORDS; i++) both.word[i] = rule->mask.word[i] & asked->word[i];
    return avg_mask_sound(rule, &both);
}

static inline int avg_mask_equal(const struct avg_mask *a, const struct avg_mask *b) {
    uint64_t differs = 0;
    for (int i = 0; i < AVG_MASK_WORDS; i++) differs |= a->word[i] ^ b->word[i];
    return !differs;
}

#endif
