/* Finds the frames that an rqueue client sends to the server.
 *
 * A frame is `payload_length u32 | type u8 | payload`, big-endian. PUBLISH holds one whole
 * NOTIFICATION or PART frame, which is what subscribers get, byte for byte: so `raw` is the
 * payload of PUBLISH, and relaying is one copy.
 *
 * The scanner stops at the first bad byte that is certain. It judges the length and the type
 * from the header alone, before the payload has come and before anything is allocated for it.
 */
#ifndef POLYBUS_RQUEUE_FRAMING_H
#define POLYBUS_RQUEUE_FRAMING_H

#include <stdint.h>
#include <string.h>

#include "framing.h"

enum {
    PB_RQUEUE_HEADER = 5,
    PB_RQUEUE_PART_HEADER = 20 /* message id 16, index 2, count 2 */
};

typedef enum pb_rqueue_type {
    PB_RQUEUE_PUBLISH = 0,
    PB_RQUEUE_SUBSCRIBE = 1,
    PB_RQUEUE_REMOVE = 2,
    PB_RQUEUE_DEREGISTER = 5,
    PB_RQUEUE_NOTIFICATION = 7,
    PB_RQUEUE_PART = 8
} pb_rqueue_type;

/* REASONS in rqueue_framing.pyx names these, in this order. */
typedef enum pb_rqueue_reason {
    PB_RQUEUE_PAYLOAD_TOO_LARGE,
    PB_RQUEUE_UNKNOWN_TYPE,
    PB_RQUEUE_NOT_FOR_SERVER,
    PB_RQUEUE_INNER_LENGTH,
    PB_RQUEUE_INNER_TYPE,
    PB_RQUEUE_TOPIC_LENGTH,
    PB_RQUEUE_TRAILING_BYTES,
    PB_RQUEUE_DEREGISTER_NOT_EMPTY,
    PB_RQUEUE_PART_LENGTH,
    PB_RQUEUE_PART_INDEX
} pb_rqueue_reason;

typedef struct pb_rqueue_framing {
    pb_framing framing;
    ssize_t max_payload;
} pb_rqueue_framing;

static inline uint32_t pb_load_u32_be(const unsigned char *at) {
    uint32_t word;
    memcpy(&word, at, 4);
    return __builtin_bswap32(word);
}

static inline uint16_t pb_load_u16_be(const unsigned char *at) {
    return (uint16_t)(at[0] << 8 | at[1]);
}

/* Reads PUBLISH's payload of `length` bytes: a NOTIFICATION or a PART. */
static inline pb_frame_kind pb_rqueue_publish(
    const unsigned char *at, ssize_t length, pb_frame *frame) {
    ssize_t inner = length - PB_RQUEUE_HEADER;
    ssize_t topic_size;
    if (inner < 0 || (ssize_t)pb_load_u32_be(at) != inner)
        return pb_bad_frame(frame, PB_RQUEUE_INNER_LENGTH);
    if (at[4] != PB_RQUEUE_NOTIFICATION && at[4] != PB_RQUEUE_PART)
        return pb_bad_frame(frame, PB_RQUEUE_INNER_TYPE);
    if (inner < 2) return pb_bad_frame(frame, PB_RQUEUE_TOPIC_LENGTH);
    topic_size = at[5];
    if (topic_size == 0 || topic_size > inner - 1)
        return pb_bad_frame(frame, PB_RQUEUE_TOPIC_LENGTH);
    frame->kind = PB_MESSAGE;
    frame->raw = at;
    frame->raw_size = length;
    frame->topic = at + 6;
    frame->topic_size = topic_size;
    frame->body = at + 6 + topic_size;
    frame->body_size = inner - 1 - topic_size;
    if (at[4] == PB_RQUEUE_NOTIFICATION) return PB_MESSAGE;
    frame->kind = PB_FRAGMENT;
    if (frame->body_size < PB_RQUEUE_PART_HEADER)
        return pb_bad_frame(frame, PB_RQUEUE_PART_LENGTH);
    if (pb_load_u16_be(frame->body + 16) >= pb_load_u16_be(frame->body + 18))
        return pb_bad_frame(frame, PB_RQUEUE_PART_INDEX);
    return PB_FRAGMENT;
}

/* Reads the payload of SUBSCRIBE and REMOVE: a topic and nothing else. */
static inline pb_frame_kind pb_rqueue_topic_alone(
    const unsigned char *at, ssize_t length, pb_frame *frame) {
    if (length < 2 || at[0] == 0 || at[0] > length - 1)
        return pb_bad_frame(frame, PB_RQUEUE_TOPIC_LENGTH);
    if (at[0] != length - 1) return pb_bad_frame(frame, PB_RQUEUE_TRAILING_BYTES);
    frame->topic = at + 1;
    frame->topic_size = at[0];
    return PB_CONTROL;
}

static inline pb_frame_kind pb_rqueue_next(
    const pb_framing *self, const unsigned char *at, ssize_t left, pb_frame *frame) {
    ssize_t length;
    int kind;
    frame->kind = PB_INCOMPLETE;
    if (left < PB_RQUEUE_HEADER) return PB_INCOMPLETE;
    length = (ssize_t)pb_load_u32_be(at);
    kind = at[4];
    if (length > ((const pb_rqueue_framing *)self)->max_payload)
        return pb_bad_frame(frame, PB_RQUEUE_PAYLOAD_TOO_LARGE);
    if (kind > PB_RQUEUE_PART || kind == 3 || kind == 4 || kind == 6)
        return pb_bad_frame(frame, PB_RQUEUE_UNKNOWN_TYPE);
    if (kind >= PB_RQUEUE_NOTIFICATION) return pb_bad_frame(frame, PB_RQUEUE_NOT_FOR_SERVER);
    /* The original's list numbers DEREGISTER 5, its table 2. A REMOVE is never empty. */
    if (kind == PB_RQUEUE_REMOVE && length == 0) kind = PB_RQUEUE_DEREGISTER;
    if (kind == PB_RQUEUE_DEREGISTER && length != 0)
        return pb_bad_frame(frame, PB_RQUEUE_DEREGISTER_NOT_EMPTY);
    if (left < PB_RQUEUE_HEADER + length) return PB_INCOMPLETE;
    frame->size = PB_RQUEUE_HEADER + length;
    if (kind == PB_RQUEUE_PUBLISH) return pb_rqueue_publish(at + PB_RQUEUE_HEADER, length, frame);
    frame->kind = PB_CONTROL;
    frame->code = kind;
    frame->topic_size = 0;
    if (kind == PB_RQUEUE_DEREGISTER) return PB_CONTROL;
    return pb_rqueue_topic_alone(at + PB_RQUEUE_HEADER, length, frame);
}

#endif
