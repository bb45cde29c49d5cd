/* Copy and compare short byte strings without a function call.
 *
 * Topics and small messages have tens of bytes; a call of memcpy or memcmp costs
 * more than the work. Blocks of fixed size become single instructions. The last
 * block overlaps the one before it, so no byte beyond `size` is touched.
 */
#ifndef POLYBUS_BYTES_INLINE_H
#define POLYBUS_BYTES_INLINE_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline uint64_t polybus_load8(const unsigned char *at) {
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
}

static inline uint32_t polybus_load4(const unsigned char *at) {
    uint32_t word;
    memcpy(&word, at, 4);
    return word;
}

/* `out` and `in` do not overlap. */
static inline void polybus_copy(unsigned char *out, const unsigned char *in, size_t size) {
    if (size > 64) {
        memcpy(out, in, size);
    } else if (size >= 32) {
        memcpy(out, in, 32);
        memcpy(out + size - 32, in + size - 32, 32);
    } else if (size >= 16) {
        memcpy(out, in, 16);
        memcpy(out + size - 16, in + size - 16, 16);
    } else if (size >= 8) {
        memcpy(out, in, 8);
        memcpy(out + size - 8, in + size - 8, 8);
    } else {
        while (size--) *out++ = *in++;
    }
}

static inline int polybus_same(const unsigned char *a, const unsigned char *b, size_t size) {
    size_t at;
    if (size >= 8) {
        for (at = 0; at + 8 < size; at += 8)
            if (polybus_load8(a + at) != polybus_load8(b + at)) return 0;
        return polybus_load8(a + size - 8) == polybus_load8(b + size - 8);
    }
    if (size >= 4)
        return polybus_load4(a) == polybus_load4(b)
            && polybus_load4(a + size - 4) == polybus_load4(b + size - 4);
    for (at = 0; at < size; at++)
        if (a[at] != b[at]) return 0;
    return 1;
}

#endif
