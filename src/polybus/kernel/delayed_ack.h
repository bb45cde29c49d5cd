/* Delayed acknowledgements on a TCP connection that mostly receives.

   The kernel acknowledges every read of a connection on which nothing was sent yet; on loopback
   the acknowledgement costs more than the read. A connection with traffic in both directions
   ("pingpong mode") acknowledges every second small segment instead. Protocols with a greeting are
   in that mode from the beginning; an rqueue publisher never gets a byte. So a busy connection
   enters the mode by TCP_QUICKACK = 0.

   A publisher that uses Nagle's algorithm (no TCP_NODELAY) holds its next small segment back until
   the acknowledgement comes: up to 40 ms later. The kernel then leaves the mode by itself, as
   after any pause of 40 ms. Each time it has done so, four times as many receives pass before the
   mode is entered again; so such a publisher is delayed seven times in its first million. */
#ifndef POLYBUS_DELAYED_ACK_H
#define POLYBUS_DELAYED_ACK_H

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <sys/socket.h>

enum {
    /* A publisher that sends less often gains nothing. */
    PB_ACK_RECEIVES = 64,
    PB_ACK_GROWTH = 4,
    PB_MAX_ACK_RECEIVES = 1 << 24
};

typedef struct pb_delayed_ack {
    uint32_t left; /* receives until the mode is looked at */
    uint32_t interval;
} pb_delayed_ack;

static inline void pb_delayed_ack_init(pb_delayed_ack *ack) {
    ack->left = ack->interval = PB_ACK_RECEIVES;
}

static inline void pb_delayed_ack_check(pb_delayed_ack *ack, int descriptor) {
    int is_immediate = 0, off = 0;
    socklen_t size = sizeof(is_immediate);
    /* Another kind of socket has no such option, and is asked once in a long time. */
    if (getsockopt(descriptor, IPPROTO_TCP, TCP_QUICKACK, &is_immediate, &size) < 0) {
        ack->interval = PB_MAX_ACK_RECEIVES;
    } else if (!is_immediate) {
        if (ack->interval > PB_ACK_RECEIVES)
            ack->interval /= PB_ACK_GROWTH;
    } else {
        setsockopt(descriptor, IPPROTO_TCP, TCP_QUICKACK, &off, sizeof(off));
        if (ack->interval < PB_MAX_ACK_RECEIVES)
            ack->interval *= PB_ACK_GROWTH;
    }
    ack->left = ack->interval;
}

/* To be called after each receive. */
static inline void pb_delayed_ack_received(pb_delayed_ack *ack, int descriptor) {
    if (--ack->left == 0)
        pb_delayed_ack_check(ack, descriptor);
}

#endif
