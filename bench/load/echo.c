/* The raw echo: about the fastest that one process can answer on a Unix socket.
 *
 *   echo PATH REQUEST ANSWER [REQUEST ANSWER …]
 *
 * It knows no messages, only sizes: it receives REQUEST bytes, answers with ANSWER bytes (the
 * request's own, over and over), then takes the next pair of sizes, and after the last the first
 * again. One client at a time, with blocking calls. When it listens it prints `ready`.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define LARGEST (64 * 1024)
#define MAX_PAIRS 8

static char buffer[2 * LARGEST];
static size_t sizes[MAX_PAIRS][2];

static int receive_all(int handle, size_t size) {
    size_t have = 0;
    while (have < size) {
        ssize_t got = recv(handle, buffer + have, size - have, 0);
        if (got <= 0)
            return 0;
        have += (size_t)got;
    }
    return 1;
}

static int answer(int handle, size_t request, size_t size) {
    for (size_t have = request; have < size; have += request) /* room for one too many */
        memcpy(buffer + have, buffer, request);
    return send(handle, buffer, size, MSG_NOSIGNAL) == (ssize_t)size;
}

static void serve(int handle, int pairs) {
    for (int i = 0; receive_all(handle, sizes[i][0]); i = (i + 1) % pairs)
        if (!answer(handle, sizes[i][0], sizes[i][1]))
            break;
    close(handle);
}

static int read_sizes(int count, char **texts) {
    for (int i = 0; i < count; ++i) {
        long size = i < 2 * MAX_PAIRS ? atol(texts[i]) : 0;
        if (size < 1 || size > LARGEST)
            return 0;
        sizes[i / 2][i % 2] = (size_t)size;
    }
    return count % 2 ? 0 : count / 2;
}

int main(int count, char **texts) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), handle;
    int pairs = count > 2 ? read_sizes(count - 2, texts + 2) : 0;
    if (!pairs || strlen(texts[1]) >= sizeof address.sun_path) {
        fprintf(stderr, "usage: echo PATH REQUEST ANSWER [REQUEST ANSWER ...]\n");
        return 2;
    }
    strcpy(address.sun_path, texts[1]);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 8)) {
        perror("echo");
        return 1;
    }
    puts("ready");
    fflush(stdout);
    while ((handle = accept(listener, NULL, NULL)) >= 0)
        serve(handle, pairs);
    return 0;
}
