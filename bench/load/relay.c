/* The raw relay: the physical limit of one process that passes bytes from one socket to n others.
 *
 * It knows no messages: it receives into one buffer and sends the buffer to each subscriber. A
 * client says its role with its first byte, `S` or `P`, and gets `K` back. The publisher comes
 * last; when it has closed its connection, all are closed and the next group is waited for. The
 * listening port is printed on standard output.
 */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#define MAX_SUBSCRIBERS 64
#define BUFFER (256 * 1024)

static int subscribers[MAX_SUBSCRIBERS], count;
static char buffer[BUFFER];

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

static void relay(int publisher) {
    ssize_t size;
    while ((size = recv(publisher, buffer, sizeof buffer, 0)) > 0)
        for (int i = 0; i < count; ++i)
            if (!send_all(subscribers[i], buffer, (size_t)size))
                return;
}

static void end_group(int publisher) {
    close(publisher);
    while (count)
        close(subscribers[--count]);
}

static void welcome(int handle) {
    char role;
    int one = 1;
    setsockopt(handle, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (recv(handle, &role, 1, 0) != 1 || count == MAX_SUBSCRIBERS || !send_all(handle, "K", 1)) {
        close(handle);
    } else if (role == 'S') {
        subscribers[count++] = handle;
    } else {
        relay(handle);
        end_group(handle);
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
