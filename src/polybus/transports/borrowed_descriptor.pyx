"""System calls that open a descriptor, each under a soft limit of its own.

`limits` is (the limit during the call, the limit afterwards, the hard limit). Between the two
changes of the limit other threads can open descriptors below it, and a thread of libzmq tries
so all the time. In Python the changes and the call are some ten microseconds apart, and such a
thread would nearly always be first; here it is a tenth of a microsecond.
"""

from libc.errno cimport errno
from libc.string cimport strerror

cdef extern from "<sys/resource.h>" nogil:
    ctypedef unsigned long rlim_t
    cdef struct rlimit:
        rlim_t rlim_cur
        rlim_t rlim_max
    int RLIMIT_NOFILE
    int setrlimit(int resource, const rlimit* limit)

cdef extern from "<fcntl.h>" nogil:
    int openat(int folder, const char* path, int flags, ...)

cdef extern from "<sys/socket.h>" nogil:
    ctypedef unsigned int socklen_t
    int SOCK_CLOEXEC, SOCK_NONBLOCK, SOL_SOCKET
    int accept4(int listener, void* address, void* size, int flags)
    int getsockopt(int descriptor, int level, int option, void* value, socklen_t* size)


cdef class _Limits:
    cdef rlimit during
    cdef rlimit after

    def __cinit__(self, tuple limits):
        self.during.rlim_cur, self.after.rlim_cur = limits[0], limits[1]
        self.during.rlim_max = self.after.rlim_max = limits[2]


def accept_connection(limits, int listener):
    """Accept a pending connection. Returns its descriptor, which does not block."""
    cdef _Limits own = _Limits(limits)
    cdef int opened, error
    setrlimit(RLIMIT_NOFILE, &own.during)
    opened = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)
    error = errno
    setrlimit(RLIMIT_NOFILE, &own.after)
    return _checked(opened, error)


def open_file(limits, bytes path not None, int flags, int folder):
    cdef _Limits own = _Limits(limits)
    cdef const char* name = path
    cdef int opened, error
    setrlimit(RLIMIT_NOFILE, &own.during)
    opened = openat(folder, name, flags)
    error = errno
    setrlimit(RLIMIT_NOFILE, &own.after)
    return _checked(opened, error)


def open_socket_option(limits, int sock, int option):
    """Return the descriptor that an option of a socket opens, such as SO_PEERPIDFD."""
    cdef _Limits own = _Limits(limits)
    cdef int opened = -1, result, error
    cdef socklen_t size = sizeof(opened)
    setrlimit(RLIMIT_NOFILE, &own.during)
    result = getsockopt(sock, SOL_SOCKET, option, &opened, &size)
    error = errno
    setrlimit(RLIMIT_NOFILE, &own.after)
    return _checked(opened if result == 0 else -1, error)


cdef int _checked(int opened, int error) except -1:
    if opened < 0:
        raise OSError(error, strerror(error).decode())
    return opened
