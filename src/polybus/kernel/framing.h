/* What a dialect's scanner finds in received bytes: one frame at a time. */
#ifndef POLYBUS_FRAMING_H
#define POLYBUS_FRAMING_H

#include <sys/types.h>

typedef enum pb_frame_kind {
    PB_INCOMPLETE, /* more bytes are needed */
    PB_MESSAGE,    /* a complete message for a topic */
    PB_FRAGMENT,   /* a part of a larger message: relayed unchanged, never collected */
    PB_CONTROL,    /* a frame that the session must act on, in order with the messages */
    PB_BAD         /* not a frame of this dialect; the rest of the input cannot be parsed */
} pb_frame_kind;

typedef struct pb_frame {
    pb_frame_kind kind;
    int code;     /* CONTROL: the dialect's own type; BAD: index into the framing's REASONS */
    ssize_t size; /* of the whole frame on the wire */
    const unsigned char *topic;
    ssize_t topic_size;
    const unsigned char *body;
    ssize_t body_size;
    const unsigned char *raw; /* the bytes that readers of the same dialect get */
    ssize_t raw_size;
} pb_frame;

/* A dialect's own structure begins with this one. `next` must not touch bytes past `left`. */
typedef struct pb_framing {
    pb_frame_kind (*next)(
        const struct pb_framing *self, const unsigned char *at, ssize_t left, pb_frame *frame);
} pb_framing;

static inline pb_frame_kind pb_bad_frame(pb_frame *frame, int reason) {
    frame->kind = PB_BAD;
    frame->code = reason;
    return PB_BAD;
}

#endif
