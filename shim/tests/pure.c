/* The gate's pure parts as a library, so that Python's property tests can call them. */
#include "../src/mask.h"
#include "../src/text.h"

void pure_narrow(const struct avg_mask_rule *rule, const struct avg_mask *asked, struct avg_mask *out) { *out = avg_mask_narrow(rule, asked); }
int pure_sound(const struct avg_mask_rule *rule, const struct avg_mask *mask) { return avg_mask_sound(rule, mask); }
uint32_t pure_bits(const struct avg_mask_rule *rule) { return avg_mask_bits(rule); }
uint64_t pure_size(const char *text) { return avg_parse_size(text); }
int pure_cus(const char *text, struct avg_mask *out) { return avg_parse_cus(text, out); }
