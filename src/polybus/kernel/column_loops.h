/* The loops over columns: short enough for the compiler to vectorise.
 *
 * Columns lie wherever a database put them, so numbers are loaded and stored by
 * memcpy, which is one instruction at any alignment. Bits are Arrow's: number n is
 * bit n % 8, counted from the lowest, of byte n / 8.
 */
#ifndef POLYBUS_COLUMN_LOOPS_H
#define POLYBUS_COLUMN_LOOPS_H
#include <stdint.h>
#include <string.h>

static inline int32_t polybus_i32(const unsigned char *column, int64_t place) {
    int32_t value;
    memcpy(&value, column + place * 4, 4);
    return value;
}

static inline void polybus_set_i32(unsigned char *column, int64_t place, int32_t value) {
    memcpy(column + place * 4, &value, 4);
}

static inline int64_t polybus_i64(const unsigned char *column, int64_t place) {
    int64_t value;
    memcpy(&value, column + place * 8, 8);
    return value;
}

static inline void polybus_set_i64(unsigned char *column, int64_t place, int64_t value) {
    memcpy(column + place * 8, &value, 8);
}

/* Whether none of `count` + 1 offsets is less than the one before it. */
static inline int polybus_ordered(const unsigned char *offsets, int64_t count) {
    int64_t place;
    int32_t wrong = 0;
    for (place = 0; place < count; place++)
        wrong |= polybus_i32(offsets, place) > polybus_i32(offsets, place + 1);
    return !wrong;
}

/* Whether no null message spans anything: its two offsets are the same. */
static inline int polybus_nulls_are_empty(
    const unsigned char *offsets, const unsigned char *bits, int64_t first_bit, int64_t count
) {
    int64_t place, bit;
    int32_t wrong = 0;
    for (place = 0; place < count; place++) {
        bit = first_bit + place;
        if (!(bits[bit >> 3] >> (bit & 7) & 1))
            wrong |= polybus_i32(offsets, place) != polybus_i32(offsets, place + 1);
    }
    return !wrong;
}

/* Copies offsets, each plus `shift`: the data that they index has moved. */
static inline void polybus_rebase(
    unsigned char *out, const unsigned char *in, int64_t count, int32_t shift
) {
    int64_t place;
    for (place = 0; place < count; place++)
        polybus_set_i32(out, place, (int32_t)((uint32_t)polybus_i32(in, place) + (uint32_t)shift));
}

static inline void polybus_repeat_i32(unsigned char *out, int64_t count, int32_t value) {
    int64_t place;
    for (place = 0; place < count; place++) polybus_set_i32(out, place, value);
}

static inline void polybus_repeat_i64(unsigned char *out, int64_t count, int64_t value) {
    int64_t place;
    for (place = 0; place < count; place++) polybus_set_i64(out, place, value);
}

static inline void polybus_count_i64(unsigned char *out, int64_t count, int64_t first) {
    int64_t place;
    for (place = 0; place < count; place++) polybus_set_i64(out, place, first + place);
}

/* How many of `count` bits, from `first` on, are set. */
static inline int64_t polybus_bits_set(const unsigned char *bits, int64_t first, int64_t count) {
    int64_t place = first, end = first + count, found = 0;
    uint64_t word;
    for (; place < end && place & 7; place++) found += bits[place >> 3] >> (place & 7) & 1;
    for (; end - place >= 64; place += 64) {
        memcpy(&word, bits + (place >> 3), 8);
        found += __builtin_popcountll(word);
    }
    for (; place < end; place++) found += bits[place >> 3] >> (place & 7) & 1;
    return found;
}

/* Sets those of `count` bits of `out`, all zero so far, that are set in `in` (NULL: all). */
static inline void polybus_copy_bits(
    unsigned char *out, int64_t out_bit, const unsigned char *in, int64_t in_bit, int64_t count
) {
    int64_t end = out_bit + count;
    unsigned value;
    for (; out_bit < end && out_bit & 7; out_bit++, in_bit++) {
        value = in ? in[in_bit >> 3] >> (in_bit & 7) & 1 : 1;
        out[out_bit >> 3] |= value << (out_bit & 7);
    }
    for (; end - out_bit >= 8; out_bit += 8, in_bit += 8) {
        value = 0xFF;
        if (in && in_bit & 7)
            value = in[in_bit >> 3] >> (in_bit & 7) | in[(in_bit >> 3) + 1] << (8 - (in_bit & 7));
        else if (in)
            value = in[in_bit >> 3];
        out[out_bit >> 3] = (unsigned char)value;
    }
    for (; out_bit < end; out_bit++, in_bit++) {
        value = in ? in[in_bit >> 3] >> (in_bit & 7) & 1 : 1;
        out[out_bit >> 3] |= value << (out_bit & 7);
    }
}

static inline int polybus_continues(unsigned char byte) { return (byte & 0xC0) == 0x80; }

/* The length of the UTF-8 character at `at`, of which `left` bytes are there; 0: none is. */
static inline int64_t polybus_character(const unsigned char *at, int64_t left) {
    unsigned char first = at[0];
    if (first < 0x80) return 1;
    if (first < 0xC2 || first > 0xF4 || left < 2 || !polybus_continues(at[1])) return 0;
    if (first < 0xE0) return 2;
    if (left < 3 || !polybus_continues(at[2])) return 0;
    if (first < 0xF0) {
        if (first == 0xE0 && at[1] < 0xA0) return 0; /* spelt too long */
        if (first == 0xED && at[1] > 0x9F) return 0; /* half of a surrogate pair */
        return 3;
    }
    if (left < 4 || !polybus_continues(at[3])) return 0;
    if (first == 0xF0 && at[1] < 0x90) return 0; /* spelt too long */
    if (first == 0xF4 && at[1] > 0x8F) return 0; /* past the last character */
    return 4;
}

/* Whether all strings are UTF-8: the bytes from `start` to `end` are, with no cut inside a
 * character. */
static inline int polybus_is_utf8(
    const unsigned char *data, int64_t start, int64_t end, const unsigned char *offsets, int64_t count
) {
    int64_t at = start, step, place;
    uint64_t word;
    int plain = 1;
    while (at < end) {
        if (end - at >= 8) {
            memcpy(&word, data + at, 8);
            if (!(word & 0x8080808080808080ULL)) {
                at += 8;
                continue;
            }
        }
        step = polybus_character(data + at, end - at);
        if (!step) return 0;
        plain &= step == 1;
        at += step;
    }
    for (place = 0; !plain && place < count; place++) {
        at = polybus_i32(offsets, place);
        if (at >= start && at < end && polybus_continues(data[at])) return 0;
    }
    return 1;
}

#endif
