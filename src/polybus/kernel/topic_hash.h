/* A short seeded hash for topic names.
 *
 * Names come from the network, so the hash is keyed with a random seed: a peer
 * that does not know the seed cannot construct names that collide. Eight bytes
 * per step with a folded 64x64 -> 128 bit multiply. The tail is read byte by
 * byte so that no byte past the name is touched.
 */
#ifndef POLYBUS_TOPIC_HASH_H
#define POLYBUS_TOPIC_HASH_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline uint64_t polybus_mix(uint64_t a, uint64_t b) {
    __uint128_t product = (__uint128_t)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t polybus_topic_hash(const unsigned char *name, size_t size, uint64_t seed) {
    uint64_t hash = seed ^ polybus_mix(size ^ 0xa0761d6478bd642fULL, 0xe7037ed1a0b428dbULL);
    uint64_t word;
    while (size >= 8) {
        memcpy(&word, name, 8);
        hash = polybus_mix(hash ^ word, 0x8ebc6af09c88c6e3ULL);
        name += 8;
        size -= 8;
    }
    word = 0;
    switch (size) {
    case 7: word |= (uint64_t)name[6] << 48; /* fall through */
    case 6: word |= (uint64_t)name[5] << 40; /* fall through */
    case 5: word |= (uint64_t)name[4] << 32; /* fall through */
    case 4: word |= (uint64_t)name[3] << 24; /* fall through */
    case 3: word |= (uint64_t)name[2] << 16; /* fall through */
    case 2: word |= (uint64_t)name[1] << 8; /* fall through */
    case 1: word |= (uint64_t)name[0];
    }
    return polybus_mix(hash ^ word, 0x589965cc75374cc3ULL ^ seed);
}

#endif
