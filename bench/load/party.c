/* Connections: connect on loopback, say hello, wait for the answer; send, receive, check.
 *
 * Any fault ends the program with one line: a measurement that lost a byte is not a measurement.
 * Sockets have a timeout, so a server that hangs is a fault too and not an endless wait.
 */
#include "plan.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define STALL_S 15       /* no progress for so long is a fault; real pauses are far below */
#define SILENCE_MS 20    /* how long we wait for bytes that were not requested */
#define HELLO_LIMIT 4096 /* longest answer to a hello that is searched in one piece */

void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    exit(1);
}

double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static double connected_cpu_s; /* CPU time when all connections were ready */

static double cpu_s(void) {
    struct timespec used;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return (double)used.tv_sec + (double)used.tv_nsec * 1e-9;
}

double cpu_since_connect_s(void) {
    return cpu_s() - connected_cpu_s;
}

static const char *reason(void) {
    return errno == EAGAIN ? "no progress for 15 s" : strerror(errno);
}

void send_all(int socket, const char *data, size_t size) {
    while (size) {
        ssize_t sent = send(socket, data, size, MSG_NOSIGNAL);
        if (sent <= 0)
            fail("cannot send: %s", reason());
        data += sent;
        size -= (size_t)sent;
    }
}

size_t receive_some(int socket, char *data, size_t size) {
    ssize_t got = recv(socket, data, size, 0);
    if (got == 0)
        fail("the server closed a connection");
    if (got < 0)
        fail("cannot receive: %s", reason());
    return (size_t)got;
}

static int connect_to(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((unsigned short)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int one = 1, handle = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct timeval stall = {.tv_sec = STALL_S};
    setsockopt(handle, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(handle, SOL_SOCKET, SO_RCVTIMEO, &stall, sizeof stall);
    setsockopt(handle, SOL_SOCKET, SO_SNDTIMEO, &stall, sizeof stall);
    if (connect(handle, (struct sockaddr *)&address, sizeof address))
        fail("cannot connect to port %d: %s", port, strerror(errno));
    return handle;
}

static void skip_bytes(int socket, size_t size) {
    char dropped[HELLO_LIMIT];
    while (size)
        size -= receive_some(socket, dropped, size < sizeof dropped ? size : sizeof dropped);
}

/* Reads byte by byte, so that nothing after the awaited bytes is taken away. */
static void wait_for(int socket, Bytes until) {
    char tail[HELLO_LIMIT];
    size_t have = 0;
    if (until.size > sizeof tail)
        fail("an awaited answer is too long");
    while (have < until.size || memcmp(tail + have - until.size, until.data, until.size)) {
        if (have == sizeof tail) {
            memmove(tail, tail + have - until.size, until.size);
            have = until.size;
        }
        have += receive_some(socket, tail + have, 1);
    }
}

static void connect_party(Party *party) {
    party->socket = connect_to(party->port);
    send_all(party->socket, party->hello.data, party->hello.size);
    skip_bytes(party->socket, party->skip);
    send_all(party->socket, party->then.data, party->then.size);
    if (party->until.size)
        wait_for(party->socket, party->until);
}

/* Subscribers first: when the first publisher sends, every subscription is in force. */
void connect_all(Plan *plan) {
    for (int i = 0; i < plan->subscriber_count; ++i)
        connect_party(&plan->subscribers[i]);
    for (int i = 0; i < plan->publisher_count; ++i)
        connect_party(&plan->publishers[i]);
    connected_cpu_s = cpu_s();
}

static size_t same_prefix(const char *left, const char *right, size_t size) {
    size_t same = 0;
    while (same < size && left[same] == right[same])
        ++same;
    return same;
}

/* Compares received bytes with the subscriber's cyclic stream; asides of the server are skipped. */
void check_bytes(Reader *reader, const char *data, size_t size) {
    const Bytes stream = reader->party->stream, aside = *reader->asides;
    while (size) {
        size_t run = stream.size - reader->at;
        run = run < size ? run : size;
        if (reader->aside) {
            if (*data != aside.data[reader->aside])
                fail("wrong byte after %lld right ones", reader->received);
            reader->aside = (reader->aside + 1) % aside.size;
            run = 1;
        } else {
            if (memcmp(data, stream.data + reader->at, run))
                run = same_prefix(data, stream.data + reader->at, run);
            reader->at = (reader->at + run) % stream.size;
            reader->received += (long long)run;
            if (run == 0) {
                if (aside.size < 2 || *data != aside.data[0])
                    fail("wrong byte after %lld right ones", reader->received);
                reader->aside = run = 1;
            }
        }
        data += run;
        size -= run;
    }
}

/* After the last byte there is silence: one more would be a message delivered twice. */
void check_silence(const Plan *plan) {
    struct pollfd polled[MAX_PARTIES];
    for (int i = 0; i < plan->subscriber_count; ++i)
        polled[i] = (struct pollfd){.fd = plan->subscribers[i].socket, .events = POLLIN};
    if (poll(polled, (nfds_t)plan->subscriber_count, SILENCE_MS) <= 0)
        return;
    for (int i = 0; i < plan->subscriber_count; ++i) {
        char extra[HELLO_LIMIT];
        size_t size = polled[i].revents ? receive_some(polled[i].fd, extra, sizeof extra) : 0;
        if (size && (size != plan->aside.size || memcmp(extra, plan->aside.data, size)))
            fail("subscriber %d got more than was sent", i);
    }
}
