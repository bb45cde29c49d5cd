/* Bytes that several outboxes share: written once by the thread that routes a buffer, then
   read-only. The last reference frees them, on any thread. */
#ifndef POLYBUS_CHUNK_H
#define POLYBUS_CHUNK_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>

typedef struct pb_chunk {
    atomic_uint references;
    size_t capacity;
    unsigned char data[];
} pb_chunk;

/* Returns NULL without memory. The caller has one reference. */
static inline pb_chunk *pb_chunk_new(size_t capacity) {
    pb_chunk *chunk = malloc(sizeof(pb_chunk) + capacity);
    if (chunk != NULL) {
        atomic_init(&chunk->references, 1);
        chunk->capacity = capacity;
    }
    return chunk;
}

static inline void pb_chunk_retain(pb_chunk *chunk) {
    atomic_fetch_add_explicit(&chunk->references, 1, memory_order_relaxed);
}

static inline void pb_chunk_release(pb_chunk *chunk) {
    /* Acquire and release: the thread that frees must see the reads of all others as done. */
    if (atomic_fetch_sub_explicit(&chunk->references, 1, memory_order_acq_rel) == 1)
        free(chunk);
}

/* True if the caller has the only reference, so it may write again. */
static inline int pb_chunk_is_unshared(pb_chunk *chunk) {
    return atomic_load_explicit(&chunk->references, memory_order_acquire) == 1;
}

#endif
