/* XXH64, the checksum of blocks, written from the algorithm's published description.
 *
 * Four lanes of eight bytes run side by side, so that the processor's multiplier
 * never waits: several bytes per cycle. No byte beyond `size` is read, and `at`
 * may have any alignment.
 */
#ifndef POLYBUS_XXH64_H
#define POLYBUS_XXH64_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "polybus: blocks are little-endian, and so must be the machine"
#endif

#define POLYBUS_P1 0x9E3779B185EBCA87ULL
#define POLYBUS_P2 0xC2B2AE3D27D4EB4FULL
#define POLYBUS_P3 0x165667B19E3779F9ULL
#define POLYBUS_P4 0x85EBCA77C2B2AE63ULL
#define POLYBUS_P5 0x27D4EB2F165667C5ULL

static inline uint64_t polybus_rotate(uint64_t word, int by) {
    return word << by | word >> (64 - by);
}

static inline uint64_t polybus_word(const unsigned char *at) {
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
}

static inline uint64_t polybus_round(uint64_t lane, uint64_t word) {
    return polybus_rotate(lane + word * POLYBUS_P2, 31) * POLYBUS_P1;
}

static inline uint64_t polybus_merge(uint64_t hash, uint64_t lane) {
    return (hash ^ polybus_round(0, lane)) * POLYBUS_P1 + POLYBUS_P4;
}

static inline uint64_t polybus_xxh64_tail(uint64_t hash, const unsigned char *at, size_t left) {
    uint32_t half;
    for (; left >= 8; at += 8, left -= 8)
        hash = polybus_rotate(hash ^ polybus_round(0, polybus_word(at)), 27) * POLYBUS_P1
            + POLYBUS_P4;
    if (left >= 4) {
        memcpy(&half, at, 4);
        hash = polybus_rotate(hash ^ half * POLYBUS_P1, 23) * POLYBUS_P2 + POLYBUS_P3;
        at += 4;
        left -= 4;
    }
    for (; left; at++, left--)
        hash = polybus_rotate(hash ^ *at * POLYBUS_P5, 11) * POLYBUS_P1;
    hash = (hash ^ hash >> 33) * POLYBUS_P2;
    hash = (hash ^ hash >> 29) * POLYBUS_P3;
    return hash ^ hash >> 32;
}

typedef struct {
    uint64_t a, b, c, d;
} polybus_lanes;

static inline void polybus_mix(polybus_lanes *lanes, const unsigned char *at) {
    lanes->a = polybus_round(lanes->a, polybus_word(at));
    lanes->b = polybus_round(lanes->b, polybus_word(at + 8));
    lanes->c = polybus_round(lanes->c, polybus_word(at + 16));
    lanes->d = polybus_round(lanes->d, polybus_word(at + 24));
}

/* Hashes all bytes and copies those from `from` to `to` to `out` in the same pass.
 *
 * The lanes are bound by the latency of their multiplications, so storing the loaded
 * words costs almost nothing, and memory is read once. */
static inline uint64_t polybus_xxh64_copying(
    const unsigned char *start, size_t size, uint64_t seed, size_t from, size_t to,
    unsigned char *out
) {
    polybus_lanes lanes = {
        seed + POLYBUS_P1 + POLYBUS_P2, seed + POLYBUS_P2, seed, seed - POLYBUS_P1
    };
    const unsigned char *at = start, *end = start + size / 32 * 32;
    const unsigned char *copied = start + (from + 31) / 32 * 32, *copied_end = start + to / 32 * 32;
    uint64_t hash;
    if (copied >= copied_end) { /* not even one stripe lies within */
        if (to > from) memcpy(out, start + from, to - from);
        copied = copied_end = end;
    } else {
        memcpy(out, start + from, copied - (start + from));
        memcpy(out + (copied_end - (start + from)), copied_end, start + to - copied_end);
    }
    if (size < 32) return polybus_xxh64_tail(seed + POLYBUS_P5 + size, at, size);
    for (; at < copied; at += 32) polybus_mix(&lanes, at);
    for (; at < copied_end; at += 32) {
        memcpy(out + (at - start - from), at, 32);
        polybus_mix(&lanes, at);
    }
    for (; at < end; at += 32) polybus_mix(&lanes, at);
    hash = polybus_rotate(lanes.a, 1) + polybus_rotate(lanes.b, 7) + polybus_rotate(lanes.c, 12)
        + polybus_rotate(lanes.d, 18);
    hash = polybus_merge(hash, lanes.a);
    hash = polybus_merge(hash, lanes.b);
    hash = polybus_merge(hash, lanes.c);
    hash = polybus_merge(hash, lanes.d);
    return polybus_xxh64_tail(hash + size, at, size % 32);
}

static inline uint64_t polybus_xxh64(const unsigned char *at, size_t size, uint64_t seed) {
    return polybus_xxh64_copying(at, size, seed, 0, 0, NULL);
}

#endif
