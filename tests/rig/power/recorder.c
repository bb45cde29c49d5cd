/* Records what a process does to the files below one folder, in the order it happened.
 *
 * Preloaded (LD_PRELOAD), with POLYBUS_POWERCUT_FOLDER and POLYBUS_POWERCUT_LOG set, it
 * stands before the C library's calls: it does what was asked, and then appends a record
 * of it to the log. powercut.py reads the log, and knows the same numbers.
 *
 * What is in the log must be no stronger than what a disk has promised:
 * - A write is logged when it has returned. A sync that another thread began before that
 *   may have missed it, so syncs are logged twice: begun, and done. A sync covers what
 *   stands before its beginning, from its end on; one that failed has no end.
 * - Names are changed by records of their own: a file can be on disk without its name.
 * - Ways of writing that leave no record here (a shared writable map, copying inside the
 *   system) are logged as unseen, and make the record worthless. LMDB's table of readers
 *   is such a map; it is nothing that outlives a process, and is left alone.
 *
 * Files are known by handles: an opened file gets a number that is never used again, as
 * its descriptor is, and as its path is after a rename.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAX_FD 65536
#define MAX_PATH 4096
#define MAX_PARTS 1024
#define READERS_TABLE "lock.mdb"

enum kind {
    OPENED = 1, /* handle, flags; path */
    WRITTEN,    /* handle, offset; bytes */
    CUT,        /* handle, offset: the new length */
    SYNCING,    /* handle, offset: the number of this sync */
    SYNCED,     /* handle, offset: the same number */
    RENAMED,    /* old path, zero byte, new path */
    REMOVED,    /* path */
    FOLDER,     /* path */
    MARK,       /* what the test says */
    UNSEEN,     /* the name of the call */
};

struct record {
    uint32_t kind;
    uint32_t flags;
    uint64_t handle;
    uint64_t offset;
    uint64_t length; /* of what follows */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t handles[MAX_FD]; /* by descriptor; 0: none of ours */
static uint64_t last_handle, last_sync;
static char folder[MAX_PATH];
static size_t folder_length;
static int log_fd = -1;

#define REAL(result, name, ...)                                      \
    static result (*real_##name)(__VA_ARGS__);                       \
    if (!real_##name)                                                \
        real_##name = (result (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

static void
fail(const char *why)
{
    fprintf(stderr, "powercut: %s: %s\n", why, strerror(errno));
    abort();
}

__attribute__((constructor)) static void
start(void)
{
    const char *where = getenv("POLYBUS_POWERCUT_FOLDER");
    const char *log_path = getenv("POLYBUS_POWERCUT_LOG");
    REAL(int, open, const char *, int, ...);

    if (!where || !log_path)
        return;
    if (!realpath(where, folder))
        fail("the folder to watch");
    folder_length = strlen(folder);
    log_fd = real_open(log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (log_fd < 0)
        fail("the log");
}

/* --- the log */

/* One record, whole; the caller holds the lock. */
static void
append(struct record record, const struct iovec *parts, int count)
{
    struct iovec all[MAX_PARTS + 1];
    ssize_t length = sizeof record;
    REAL(ssize_t, writev, int, const struct iovec *, int);

    record.length = 0;
    for (int i = 0; i < count; i++) {
        all[i + 1] = parts[i];
        record.length += parts[i].iov_len;
    }
    length += record.length;
    all[0] = (struct iovec){&record, sizeof record};
    if (real_writev(log_fd, all, count + 1) != length)
        fail("writing the log");
}

static void
note(struct record record, const void *data, size_t length)
{
    struct iovec part = {(void *)data, length};
    int before = errno;

    pthread_mutex_lock(&lock);
    append(record, &part, 1);
    pthread_mutex_unlock(&lock);
    errno = before;
}

void
powercut_mark(const char *data, size_t length)
{
    if (log_fd >= 0)
        note((struct record){.kind = MARK}, data, length);
}

static void
unseen(const char *call)
{
    note((struct record){.kind = UNSEEN}, call, strlen(call));
}

/* --- which files are ours */

static int
below(const char *path)
{
    return log_fd >= 0 && !strncmp(path, folder, folder_length) &&
           (path[folder_length] == '/' || !path[folder_length]);
}

static uint64_t
handle_of(int fd)
{
    return log_fd >= 0 && fd >= 0 && fd < MAX_FD ? handles[fd] : 0;
}

/* Where a descriptor leads, by the system's own words; an empty text if nowhere. */
static void
path_of(int fd, char *path)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, MAX_PATH - 1);
    path[length < 0 ? 0 : length] = 0;
}

/* A path as the system would take it, with its folder resolved but not its last name. */
static void
absolute(int at, const char *given, char *path)
{
    char start[MAX_PATH] = "", joined[2 * MAX_PATH], parent[MAX_PATH];

    if (given[0] != '/') {
        if (at == AT_FDCWD) {
            if (!getcwd(start, sizeof start))
                start[0] = 0;
        } else {
            path_of(at, start);
        }
    }
    snprintf(joined, sizeof joined, "%s/%s", start, given);
    char *name = strrchr(joined, '/');
    *name++ = 0;
    if (!realpath(joined[0] ? joined : "/", parent))
        parent[0] = 0;
    snprintf(path, MAX_PATH, "%.2000s/%.2000s", parent, name);
}

static int
opened(int fd, int flags)
{
    char path[MAX_PATH];
    int before = errno;

    if (fd < 0 || fd >= MAX_FD || log_fd < 0 || fd == log_fd)
        return fd;
    path_of(fd, path);
    if (below(path)) {
        struct iovec part = {path, strlen(path)};
        pthread_mutex_lock(&lock);
        handles[fd] = ++last_handle;
        append((struct record){.kind = OPENED, .flags = flags, .handle = last_handle}, &part, 1);
        pthread_mutex_unlock(&lock);
    } else {
        handles[fd] = 0;
    }
    errno = before;
    return fd;
}

/* --- opening and closing */

static mode_t
mode_in(int flags, va_list more)
{
    return flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;
}

#define OPEN(name)                                            \
    int name(const char *path, int flags, ...)                \
    {                                                         \
        va_list more;                                         \
        REAL(int, name, const char *, int, ...);              \
        va_start(more, flags);                                \
        mode_t mode = mode_in(flags, more);                   \
        va_end(more);                                         \
        return opened(real_##name(path, flags, mode), flags); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                              \
    int name(int at, const char *path, int flags, ...)            \
    {                                                             \
        va_list more;                                             \
        REAL(int, name, int, const char *, int, ...);             \
        va_start(more, flags);                                    \
        mode_t mode = mode_in(flags, more);                       \
        va_end(more);                                             \
        return opened(real_##name(at, path, flags, mode), flags); \
    }
OPENAT(openat)
OPENAT(openat64)

int
__open_2(const char *path, int flags)
{
    return open(path, flags);
}

int
__open64_2(const char *path, int flags)
{
    return open64(path, flags);
}

int
close(int fd)
{
    REAL(int, close, int);
    if (handle_of(fd))
        handles[fd] = 0;
    return real_close(fd);
}

/* --- writing */

static void
written(int fd, uint64_t offset, const struct iovec *parts, int count, ssize_t done)
{
    struct iovec kept[MAX_PARTS];
    int used = 0, before = errno;
    uint64_t handle = handle_of(fd);

    if (!handle || done <= 0)
        return;
    if (count > MAX_PARTS)
        fail("a write of too many parts");
    for (size_t left = done; used < count && left; used++) {
        kept[used] = parts[used];
        if (kept[used].iov_len > left)
            kept[used].iov_len = left;
        left -= kept[used].iov_len;
    }
    pthread_mutex_lock(&lock);
    append((struct record){.kind = WRITTEN, .handle = handle, .offset = offset}, kept, used);
    pthread_mutex_unlock(&lock);
    errno = before;
}

ssize_t
write(int fd, const void *data, size_t length)
{
    REAL(ssize_t, write, int, const void *, size_t);
    ssize_t done = real_write(fd, data, length);
    if (handle_of(fd) && done > 0) {
        struct iovec part = {(void *)data, length};
        written(fd, lseek(fd, 0, SEEK_CUR) - done, &part, 1, done);
    }
    return done;
}

ssize_t
writev(int fd, const struct iovec *parts, int count)
{
    REAL(ssize_t, writev, int, const struct iovec *, int);
    ssize_t done = real_writev(fd, parts, count);
    if (handle_of(fd) && done > 0)
        written(fd, lseek(fd, 0, SEEK_CUR) - done, parts, count, done);
    return done;
}

#define PWRITE(name)                                                      \
    ssize_t name(int fd, const void *data, size_t length, off64_t offset) \
    {                                                                     \
        REAL(ssize_t, name, int, const void *, size_t, off64_t);          \
        ssize_t done = real_##name(fd, data, length, offset);             \
        struct iovec part = {(void *)data, length};                       \
        written(fd, offset, &part, 1, done);                              \
        return done;                                                      \
    }
PWRITE(pwrite)
PWRITE(pwrite64)

#define PWRITEV(name)                                                        \
    ssize_t name(int fd, const struct iovec *parts, int count, off64_t offset) \
    {                                                                        \
        REAL(ssize_t, name, int, const struct iovec *, int, off64_t);        \
        ssize_t done = real_##name(fd, parts, count, offset);                \
        written(fd, offset, parts, count, done);                             \
        return done;                                                         \
    }
PWRITEV(pwritev)
PWRITEV(pwritev64)

/* Its flags can make it safer than it is taken for, never less so. */
#define PWRITEV2(name)                                                                    \
    ssize_t name(int fd, const struct iovec *parts, int count, off64_t offset, int flags) \
    {                                                                                     \
        REAL(ssize_t, name, int, const struct iovec *, int, off64_t, int);                \
        ssize_t done = real_##name(fd, parts, count, offset, flags);                      \
        written(fd, offset, parts, count, done);                                          \
        return done;                                                                      \
    }
PWRITEV2(pwritev2)
PWRITEV2(pwritev64v2)

static int
cut(int done, int fd, off64_t length)
{
    if (!done && handle_of(fd))
        note((struct record){.kind = CUT, .handle = handle_of(fd), .offset = length}, "", 0);
    return done;
}

#define FTRUNCATE(name)                              \
    int name(int fd, off64_t length)                 \
    {                                                \
        REAL(int, name, int, off64_t);               \
        return cut(real_##name(fd, length), fd, length); \
    }
FTRUNCATE(ftruncate)
FTRUNCATE(ftruncate64)

/* --- syncing */

static int
synced(int (*real)(int), int fd)
{
    uint64_t handle = handle_of(fd), number = 0;

    if (!handle)
        return real(fd);
    number = __atomic_add_fetch(&last_sync, 1, __ATOMIC_SEQ_CST);
    note((struct record){.kind = SYNCING, .handle = handle, .offset = number}, "", 0);
    int result = real(fd);
    if (!result)
        note((struct record){.kind = SYNCED, .handle = handle, .offset = number}, "", 0);
    return result;
}

int
fsync(int fd)
{
    REAL(int, fsync, int);
    return synced(real_fsync, fd);
}

int
fdatasync(int fd)
{
    REAL(int, fdatasync, int);
    return synced(real_fdatasync, fd);
}

/* --- names */

static void
renamed(int from, const char *old, int to, const char *new)
{
    char paths[2][MAX_PATH];

    absolute(from, old, paths[0]);
    absolute(to, new, paths[1]);
    if (below(paths[0]) || below(paths[1])) {
        struct iovec parts[] = {{paths[0], strlen(paths[0]) + 1}, {paths[1], strlen(paths[1])}};
        pthread_mutex_lock(&lock);
        append((struct record){.kind = RENAMED}, parts, 2);
        pthread_mutex_unlock(&lock);
    }
}

static int
named(int result, enum kind kind, int at, const char *path)
{
    char full[MAX_PATH];

    if (!result && log_fd >= 0) {
        absolute(at, path, full);
        if (below(full))
            note((struct record){.kind = kind}, full, strlen(full));
    }
    return result;
}

int
rename(const char *old, const char *new)
{
    REAL(int, rename, const char *, const char *);
    int result = real_rename(old, new);
    if (!result && log_fd >= 0)
        renamed(AT_FDCWD, old, AT_FDCWD, new);
    return result;
}

int
renameat(int from, const char *old, int to, const char *new)
{
    REAL(int, renameat, int, const char *, int, const char *);
    int result = real_renameat(from, old, to, new);
    if (!result && log_fd >= 0)
        renamed(from, old, to, new);
    return result;
}

int
unlink(const char *path)
{
    REAL(int, unlink, const char *);
    return named(real_unlink(path), REMOVED, AT_FDCWD, path);
}

int
unlinkat(int at, const char *path, int flags)
{
    REAL(int, unlinkat, int, const char *, int);
    return named(real_unlinkat(at, path, flags), REMOVED, at, path);
}

int
rmdir(const char *path)
{
    REAL(int, rmdir, const char *);
    return named(real_rmdir(path), REMOVED, AT_FDCWD, path);
}

int
mkdir(const char *path, mode_t mode)
{
    REAL(int, mkdir, const char *, mode_t);
    return named(real_mkdir(path, mode), FOLDER, AT_FDCWD, path);
}

int
mkdirat(int at, const char *path, mode_t mode)
{
    REAL(int, mkdirat, int, const char *, mode_t);
    return named(real_mkdirat(at, path, mode), FOLDER, at, path);
}

/* --- what leaves no record */

static void
mapped(int fd, int protection, int flags)
{
    char path[MAX_PATH];

    if (!handle_of(fd) || !(protection & PROT_WRITE) || !(flags & MAP_SHARED))
        return;
    path_of(fd, path);
    if (!strstr(path, READERS_TABLE))
        unseen("mmap");
}

#define MMAP(name)                                                                       \
    void *name(void *at, size_t length, int protection, int flags, int fd, off64_t offset) \
    {                                                                                    \
        REAL(void *, name, void *, size_t, int, int, int, off64_t);                      \
        mapped(fd, protection, flags);                                                   \
        return real_##name(at, length, protection, flags, fd, offset);                   \
    }
MMAP(mmap)
MMAP(mmap64)

#define SECRET(result, name, fd, parameters, arguments) \
    result name parameters                              \
    {                                                   \
        REAL(result, name, );                           \
        if (handle_of(fd))                              \
            unseen(#name);                              \
        return ((result(*) parameters)real_##name)arguments; \
    }
SECRET(ssize_t, sendfile, out, (int out, int in, off64_t *at, size_t n), (out, in, at, n))
SECRET(ssize_t, sendfile64, out, (int out, int in, off64_t *at, size_t n), (out, in, at, n))
SECRET(ssize_t, copy_file_range, out,
       (int in, off64_t *from, int out, off64_t *to, size_t n, unsigned flags),
       (in, from, out, to, n, flags))
SECRET(int, fallocate, fd, (int fd, int mode, off64_t at, off64_t n), (fd, mode, at, n))
SECRET(int, posix_fallocate, fd, (int fd, off64_t at, off64_t n), (fd, at, n))

int
link(const char *old, const char *new)
{
    char path[MAX_PATH];
    REAL(int, link, const char *, const char *);
    absolute(AT_FDCWD, new, path);
    if (below(path))
        unseen("link");
    return real_link(old, new);
}
