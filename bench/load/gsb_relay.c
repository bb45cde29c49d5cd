/* The limit of a GSB bus: a relay in C with the same four hops, between the same ends.
 *
 * It speaks as much of nng's SP and of GSB's packets as the clients need: greetings, pings, and
 * one registration, whose connection is the service. A call becomes a CallRequest, as on any bus,
 * and goes to the service; what the service replies goes to the last caller, as it is. It knows no
 * names, no deadlines, no rules and no limits, and gives endless credit where its argument is
 * "credit". One thread, blocking sends. The listening port is printed on standard output.
 */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define BUFFER (1024 * 1024)
#define MAX_HANDLES 1024
#define GREETING_BYTES 8
#define LENGTH_BYTES 8

enum { HELLO = 0x0A, REGISTER = 0x12, CALL = 0x32, REPLY = 0x3A, PING = 0x72 };

static const unsigned char greeting[GREETING_BYTES] = {0, 'S', 'P', 0, 0, 16, 0, 0};
static const unsigned char registered[] = {0, 0, 0, 0, 0, 0, 0, 2, 0x1A, 0};
static const char who[] = "local:0";

struct party {
    int handle, greeted;
    size_t filled;
    size_t passing; /* bytes of a reply that are still to come, and go on as they are */
    unsigned char buffer[BUFFER];
};

static struct party *parties[MAX_HANDLES];
static unsigned char out[2 * BUFFER];
static size_t out_bytes;
static int service = -1, caller = -1, gives_credit;

static void send_all(int handle, const unsigned char *data, size_t size) {
    while (size) {
        ssize_t sent = send(handle, data, size, MSG_NOSIGNAL);
        if (sent <= 0)
            return;
        data += sent;
        size -= (size_t)sent;
    }
}

static uint64_t load_length(const unsigned char *at) {
    uint64_t value = 0;
    for (int i = 0; i < LENGTH_BYTES; ++i)
        value = value << 8 | at[i];
    return value;
}

static void store_length(unsigned char *at, uint64_t value) {
    for (int i = 0; i < LENGTH_BYTES; ++i)
        at[i] = (unsigned char)(value >> (56 - 8 * i));
}

static size_t load_varint(const unsigned char **at) {
    size_t value = 0;
    for (int shift = 0;; shift += 7) {
        unsigned char byte = *(*at)++;
        value |= (size_t)(byte & 0x7F) << shift;
        if (!(byte & 0x80))
            return value;
    }
}

static unsigned char *store_varint(unsigned char *at, size_t value) {
    for (; value >= 0x80; value >>= 7)
        *at++ = (unsigned char)(value | 0x80);
    *at++ = (unsigned char)value;
    return at;
}

static unsigned char *store_field(unsigned char *at, int tag, const void *data, size_t size) {
    *at++ = (unsigned char)tag;
    at = store_varint(at, size);
    memcpy(at, data, size);
    return at + size;
}

static void flush_to(int handle) {
    if (out_bytes)
        send_all(handle, out, out_bytes);
    out_bytes = 0;
}

/* A frame around a message of one kind, appended to what goes out. */
static void append(int tag_low, int tag_high, const unsigned char *message, size_t size) {
    unsigned char head[16], *at = head;
    *at++ = (unsigned char)tag_low;
    if (tag_high)
        *at++ = (unsigned char)tag_high;
    at = store_varint(at, size);
    store_length(out + out_bytes, (size_t)(at - head) + size);
    out_bytes += LENGTH_BYTES;
    memcpy(out + out_bytes, head, (size_t)(at - head));
    out_bytes += (size_t)(at - head);
    memcpy(out + out_bytes, message, size);
    out_bytes += size;
}

static void call(const unsigned char *packet, const unsigned char *end) {
    static unsigned char message[BUFFER];
    const unsigned char *fields[4] = {0};
    size_t sizes[4] = {0};
    const unsigned char *at = packet + 1;
    load_varint(&at);
    while (at < end) {
        int field = (*at++ >> 3) & 3; /* address, request id, data */
        sizes[field] = load_varint(&at);
        fields[field] = at;
        at += sizes[field];
    }
    unsigned char *to = store_field(message, 0x0A, fields[2], sizes[2]);
    if (sizes[3])
        to = store_field(to, 0x12, fields[3], sizes[3]);
    to = store_field(to, 0x1A, who, sizeof who - 1);
    to = store_field(to, 0x22, fields[1], sizes[1]);
    append(0x82, 0x01, message, (size_t)(to - message));
    if (gives_credit) {
        to = store_field(message, 0x0A, fields[2], sizes[2]);
        *to++ = 0x10;
        to = store_varint(to, 0x7FFFFFFF);
        append(0x92, 0x01, message, (size_t)(to - message));
    }
}

static void packet(struct party *from, const unsigned char *frame, size_t size) {
    const unsigned char *payload = frame + LENGTH_BYTES, *end = payload + size;
    if (*payload == CALL) {
        caller = from->handle;
        call(payload, end);
    } else if (*payload == REGISTER) {
        service = from->handle;
        send_all(from->handle, registered, sizeof registered);
    } else if (*payload == PING) {
        static unsigned char pong[BUFFER];
        memcpy(pong, frame, LENGTH_BYTES + size);
        pong[LENGTH_BYTES] = 0x7A;
        send_all(from->handle, pong, LENGTH_BYTES + size);
    }
}

/* Replies go on as they are: whole frames together, and of a frame that is not whole, its part. */
static size_t replies(struct party *from, size_t at) {
    size_t start = at, whole = at;
    while (from->filled - whole > LENGTH_BYTES && from->buffer[whole + LENGTH_BYTES] == REPLY) {
        size_t frame = LENGTH_BYTES + load_length(from->buffer + whole);
        if (frame > from->filled - whole) {
            from->passing = frame - (from->filled - whole);
            whole = from->filled;
            break;
        }
        whole += frame;
    }
    if (whole > start)
        send_all(caller, from->buffer + start, whole - start);
    return whole;
}

static size_t pass(struct party *from) {
    size_t size = from->passing < from->filled ? from->passing : from->filled;
    send_all(caller, from->buffer, size);
    from->passing -= size;
    return size;
}

static void received(struct party *from) {
    size_t at = from->passing ? pass(from) : 0, size;
    if (!from->greeted && from->filled >= GREETING_BYTES) {
        from->greeted = 1;
        at = GREETING_BYTES;
    }
    while (from->greeted && from->filled - at > LENGTH_BYTES) {
        if (from->buffer[at + LENGTH_BYTES] == REPLY) {
            at = replies(from, at);
            continue;
        }
        size = load_length(from->buffer + at);
        if (from->filled - at < LENGTH_BYTES + size)
            break;
        packet(from, from->buffer + at, size);
        at += LENGTH_BYTES + size;
    }
    flush_to(service);
    memmove(from->buffer, from->buffer + at, from->filled - at);
    from->filled -= at;
}

static void welcome(int poll, int handle) {
    int one = 1;
    struct epoll_event event = {.events = EPOLLIN, .data.fd = handle};
    setsockopt(handle, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    parties[handle] = calloc(1, sizeof(struct party));
    parties[handle]->handle = handle;
    send_all(handle, greeting, sizeof greeting);
    epoll_ctl(poll, EPOLL_CTL_ADD, handle, &event);
}

static void readable(int handle) {
    struct party *from = parties[handle];
    ssize_t size = recv(handle, from->buffer + from->filled, BUFFER - from->filled, 0);
    if (size > 0) {
        from->filled += (size_t)size;
        received(from);
        return;
    }
    close(handle);
    free(from);
    parties[handle] = NULL;
}

int main(int count, char **arguments) {
    struct sockaddr_in address = {.sin_family = AF_INET};
    struct epoll_event events[64], event = {.events = EPOLLIN};
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), poll = epoll_create1(0);
    gives_credit = count > 1 && !strcmp(arguments[1], "credit");
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 128)
        || getsockname(listener, (struct sockaddr *)&address, &size)) {
        perror("gsb_relay");
        return 1;
    }
    event.data.fd = listener;
    epoll_ctl(poll, EPOLL_CTL_ADD, listener, &event);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    for (;;) {
        int ready = epoll_wait(poll, events, 64, -1);
        for (int i = 0; i < ready; ++i) {
            if (events[i].data.fd == listener)
                welcome(poll, accept(listener, NULL, NULL));
            else
                readable(events[i].data.fd);
        }
    }
}
