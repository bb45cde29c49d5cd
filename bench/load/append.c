/* What the disk itself can do: a file that grows, each append made durable before the next.
 *
 *   append PATH < SIZES
 *
 * SIZES are the bytes of each append, one number a line. Prints the seconds that all of them took,
 * from before the first write to after the last fdatasync.
 */
#include "plan.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LARGEST (64 << 20) /* no group of commits is larger */
#define MAX_APPENDS (1 << 20)

static long sizes[MAX_APPENDS];

static int read_sizes(void) {
    int count = 0;
    while (count < MAX_APPENDS && scanf("%ld", &sizes[count]) == 1)
        if (sizes[count] < 1 || sizes[count++] > LARGEST)
            fail("no size of an append: %ld", sizes[count - 1]);
    return count;
}

/* Bytes that neither the file system nor the disk can take for zeros. */
static char *some_bytes(void) {
    char *bytes = malloc(LARGEST);
    unsigned state = 6567;
    for (int i = 0; bytes && i < LARGEST; ++i) {
        state = state * 1664525u + 1013904223u;
        bytes[i] = (char)(state >> 24);
    }
    return bytes;
}

static void append(int file, const char *bytes, long size) {
    while (size > 0) {
        ssize_t written = write(file, bytes, (size_t)size);
        if (written <= 0)
            fail("cannot write: %s", strerror(errno));
        bytes += written;
        size -= written;
    }
    if (fdatasync(file))
        fail("cannot sync: %s", strerror(errno));
}

int main(int count, char **texts) {
    if (count != 2)
        fail("usage: append PATH < SIZES");
    int appends = read_sizes();
    char *bytes = some_bytes();
    int file = open(texts[1], O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
    if (!bytes || file < 0)
        fail("cannot open %s: %s", texts[1], strerror(errno));
    double started = now_s();
    for (int i = 0; i < appends; ++i)
        append(file, bytes, sizes[i]);
    printf("{\"seconds\": %.9f}\n", now_s() - started);
    return 0;
}
