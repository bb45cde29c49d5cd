/* The raw relay: the physical limit of one process that passes bytes from one socket to n others.
 *
 * It knows no topics: it receives into one buffer and sends the buffer to each subscriber. A
 * subscriber says its role with the byte `S`, a publisher with `P` and a byte for the number of
 * publishers in its group; both get `K` back. The publishers come last. When all of them have
 * closed their connections, the group's are closed and the next group is waited for. The listening
 * port is printed on standard output.
 *
 * One publisher is relayed with two system calls, recv and send, which no server of several
 * connections can do. With several publishers it waits with epoll, receives once from each that is
 * ready, and sends all of that at once. Frames must stay whole where bytes of different publishers
 * meet, so only then are the frames' lengths read: 4 bytes in front of a kind and the payload.
 */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define MAX_PARTIES 64
#define BUFFER (256 * 1024)
#define HEAD 5                       /* bytes of a frame before its payload */
#define SHARE (BUFFER / MAX_PARTIES) /* of one publisher among several; its frames are shorter */

static int subscribers[MAX_PARTIES], subscriber_count;
static int publishers[MAX_PARTIES], publisher_count;
static char buffer[BUFFER];

/* The beginning of a publisher's next frame, when one recv ended inside of it. */
static struct {
    char data[SHARE];
    size_t size;
} rests[MAX_PARTIES];

static int send_all(int handle, const char *data, size_t size) {
    while (size) {
        ssize_t sent = send(handle, data, size, MSG_NOSIGNAL);
        if (sent <= 0)
            return 0;
        data += sent;
        size -= (size_t)sent;
    }
    return 1;
}

static int send_to_all(size_t size) {
    for (int i = 0; i < subscriber_count; ++i)
        if (!send_all(subscribers[i], buffer, size))
            return 0;
    return 1;
}

/* Receives once and sends it to all; 0 when the publisher or a subscriber has closed. */
static int relay_bytes(int publisher) {
    ssize_t size = recv(publisher, buffer, sizeof buffer, 0);
    return size > 0 && send_to_all((size_t)size);
}

static size_t whole_frames(const char *data, size_t size) {
    size_t at = 0;
    while (size - at >= HEAD) {
        uint32_t payload;
        memcpy(&payload, data + at, sizeof payload);
        size_t frame = HEAD + (size_t)ntohl(payload);
        if (frame > size - at)
            break;
        at += frame;
    }
    return at;
}

/* Receives once from one of several, behind `at` bytes of others; -1 when it has closed. */
static ssize_t gather(int number, size_t at) {
    char *data = buffer + at;
    size_t had = rests[number].size;
    memcpy(data, rests[number].data, had);
    ssize_t got = recv(publishers[number], data + had, SHARE - had, 0);
    if (got <= 0)
        return -1;
    size_t size = had + (size_t)got, whole = whole_frames(data, size);
    rests[number].size = size - whole;
    memcpy(rests[number].data, data + whole, rests[number].size);
    return (ssize_t)whole;
}

static void relay_many(void) {
    struct epoll_event events[MAX_PARTIES];
    int epoll = epoll_create1(EPOLL_CLOEXEC), open = publisher_count;
    for (int i = 0; i < publisher_count; ++i) {
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = (uint32_t)i};
        rests[i].size = 0;
        epoll_ctl(epoll, EPOLL_CTL_ADD, publishers[i], &event);
    }
    while (open) {
        int ready = epoll_wait(epoll, events, MAX_PARTIES, -1);
        size_t size = 0;
        for (int i = 0; i < ready; ++i) {
            int number = (int)events[i].data.u32;
            ssize_t gathered = gather(number, size);
            if (gathered >= 0) {
                size += (size_t)gathered;
            } else {
                epoll_ctl(epoll, EPOLL_CTL_DEL, publishers[number], NULL);
                --open;
            }
        }
        if (!send_to_all(size))
            break;
    }
    close(epoll);
}

static void relay_group(void) {
    if (publisher_count > 1)
        relay_many();
    else
        while (relay_bytes(publishers[0]))
            ;
    while (publisher_count)
        close(publishers[--publisher_count]);
    while (subscriber_count)
        close(subscribers[--subscriber_count]);
}

static int read_byte(int handle) {
    unsigned char byte;
    return recv(handle, &byte, 1, 0) == 1 ? byte : -1;
}

static void welcome(int handle) {
    int one = 1, role, group = 0;
    setsockopt(handle, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    role = read_byte(handle);
    if (role == 'P')
        group = read_byte(handle);
    if ((role != 'S' && group < 1) || group > MAX_PARTIES || subscriber_count == MAX_PARTIES
        || !send_all(handle, "K", 1)) {
        close(handle);
    } else if (role == 'S') {
        subscribers[subscriber_count++] = handle;
    } else {
        publishers[publisher_count++] = handle;
        if (publisher_count >= group)
            relay_group();
    }
}

int main(void) {
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), handle;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 128)
        || getsockname(listener, (struct sockaddr *)&address, &size)) {
        perror("relay");
        return 1;
    }
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    while ((handle = accept(listener, NULL, NULL)) >= 0)
        welcome(handle);
    return 0;
}
