"""A ROUTER socket whose messages are received many at a time.

pyzmq creates several objects for each frame, and a pirate request has nine frames. Here a frame
is one bytes object. The functions are those of the libzmq that pyzmq has loaded: they are looked
up in pyzmq's own module, so the process has one libzmq, and a socket that pyzmq opened can be
used here.

No call blocks. The socket must be open; after it is closed no method may be called.
"""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.errno cimport EAGAIN, EINTR

cdef extern from "<dlfcn.h>" nogil:
    void* dlopen(const char* path, int flags)
    void* dlsym(void* handle, const char* name)
    enum:
        RTLD_LAZY
        RTLD_NOLOAD

cdef extern from *:
    """
    typedef union { unsigned char bytes[64]; void* aligned; } pb_zmq_msg_t;
    """
    ctypedef struct zmq_msg_t "pb_zmq_msg_t":
        pass

ctypedef int (*MsgInit)(zmq_msg_t*) noexcept nogil
ctypedef int (*MsgReceive)(zmq_msg_t*, void*, int) noexcept nogil
ctypedef void* (*MsgData)(zmq_msg_t*) noexcept nogil
ctypedef size_t (*MsgSize)(zmq_msg_t*) noexcept nogil
ctypedef int (*MsgGet)(zmq_msg_t*, int) noexcept nogil
ctypedef const char* (*MsgGets)(zmq_msg_t*, const char*) noexcept nogil
ctypedef int (*Send)(void*, const void*, size_t, int) noexcept nogil
ctypedef int (*Errno)() noexcept nogil

cdef int DONTWAIT = 1, SNDMORE = 2  # zmq.h
# Head of a short and of a long ZMTP frame, and the bytes that CURVE adds to a frame.
cdef int HEAD_BYTES = 2, LONG_HEAD_BYTES = 9, SHORT_BYTES = 255, SEALED_BYTES = 33
cdef int MORE = 1, SRCFD = 2  # properties of a message


@cython.final
cdef class Router:
    """`library` is the file of pyzmq's module, `socket` the address of an open socket."""

    cdef void* socket
    cdef zmq_msg_t frame
    cdef MsgReceive msg_recv
    cdef MsgData msg_data
    cdef MsgSize msg_size
    cdef MsgGet msg_get
    cdef MsgGets msg_gets
    cdef MsgInit msg_close
    cdef Send zmq_send
    cdef Errno zmq_errno

    def __init__(self, str library not None, size_t socket):
        cdef bytes path = library.encode()
        cdef void* handle = dlopen(path, RTLD_LAZY | RTLD_NOLOAD)
        if handle == NULL:
            raise OSError(f"{library} is not loaded")
        self.socket = <void*> socket
        self.msg_recv = <MsgReceive> lookup(handle, b"zmq_msg_recv")
        self.msg_data = <MsgData> lookup(handle, b"zmq_msg_data")
        self.msg_size = <MsgSize> lookup(handle, b"zmq_msg_size")
        self.msg_get = <MsgGet> lookup(handle, b"zmq_msg_get")
        self.msg_gets = <MsgGets> lookup(handle, b"zmq_msg_gets")
        self.msg_close = <MsgInit> lookup(handle, b"zmq_msg_close")
        self.zmq_send = <Send> lookup(handle, b"zmq_send")
        self.zmq_errno = <Errno> lookup(handle, b"zmq_errno")
        (<MsgInit> lookup(handle, b"zmq_msg_init"))(&self.frame)

    def __dealloc__(self):
        if self.msg_close != NULL:
            self.msg_close(&self.frame)

    def receive(self, int most, Py_ssize_t most_bytes, int max_frames, bint with_user=False):
        """Return queued messages as (descriptor, user or None, bytes, frames).

        Returns at most `most` messages, and stops after `most_bytes`. Frames after the first
        `max_frames` of a message are dropped. `bytes` is the size of all frames on the wire,
        without the routing id, which the socket adds. `user` is the User-Id of a peer with CURVE.
        """
        cdef list messages = []
        cdef Py_ssize_t size, total = 0
        cdef int descriptor
        cdef object user
        while len(messages) < most and total < most_bytes and self._next(DONTWAIT):
            descriptor = self.msg_get(&self.frame, SRCFD)
            user = self._user() if with_user else None
            frames = []
            size = self._rest(frames, max_frames, SEALED_BYTES if with_user else 0)
            messages.append((descriptor, user, size, frames))
            total += size
        return messages

    def send(self, list envelope not None, list frames not None, Py_ssize_t most):
        """Send one message: the envelope, an empty frame, and `frames`.

        Returns its approximate size on the wire; 0, with nothing sent, if that is over `most`;
        or a negative errno if the first frame was refused.
        """
        cdef Py_ssize_t size = HEAD_BYTES + measured(envelope) + measured(frames)
        cdef bint begun
        if size > most:
            return 0
        begun = self._give_all(envelope, False)
        if not begun and envelope:
            return -self.zmq_errno()
        if not self._give(b"", DONTWAIT | SNDMORE) or not self._give_all(frames, True):
            raise OSError(self.zmq_errno(), "a message was sent only in part")
        return size

    cdef bint _next(self, int flags) except -1:
        """Receive the next frame into `frame`. Returns False if there is none."""
        cdef int error
        while self.msg_recv(&self.frame, self.socket, flags) < 0:
            error = self.zmq_errno()
            if error == EAGAIN:
                return False
            if error != EINTR:
                raise OSError(error, "receiving failed")
        return True

    cdef Py_ssize_t _rest(self, list frames, int max_frames, int sealed) except -1:
        """Receive the rest of a message. Returns the size of its frames on the wire."""
        cdef Py_ssize_t size = 0, length
        while True:
            length = <Py_ssize_t> self.msg_size(&self.frame)
            if len(frames) < max_frames:
                frames.append(
                    PyBytes_FromStringAndSize(<char*> self.msg_data(&self.frame), length)
                )
            if not self.msg_get(&self.frame, MORE):
                return size + on_wire(length, sealed) if len(frames) > 1 else size
            if len(frames) > 1:
                size += on_wire(length, sealed)
            if not self._next(DONTWAIT):
                raise OSError(EAGAIN, "received an incomplete message")

    cdef object _user(self):
        cdef const char* name = self.msg_gets(&self.frame, b"User-Id")
        return None if name == NULL else name.decode("latin-1")

    cdef bint _give_all(self, list frames, bint ending) except -1:
        cdef Py_ssize_t at, last = len(frames) - 1
        for at in range(last + 1):
            if not self._give(<bytes>frames[at], DONTWAIT | (0 if ending and at == last else SNDMORE)):
                if at == 0:
                    return False
                raise OSError(self.zmq_errno(), "a message was sent only in part")
        return True

    cdef bint _give(self, bytes frame, int flags) except -1:
        cdef const char* data = PyBytes_AS_STRING(frame)
        cdef size_t size = <size_t> PyBytes_GET_SIZE(frame)
        while self.zmq_send(self.socket, data, size, flags) < 0:
            if self.zmq_errno() != EINTR:
                return False
        return True


cdef inline Py_ssize_t on_wire(Py_ssize_t length, int sealed) noexcept:
    length += sealed
    return length + (HEAD_BYTES if length <= SHORT_BYTES else LONG_HEAD_BYTES)


cdef Py_ssize_t measured(list frames) except -1:
    """Return the approximate size of frames on the wire (the longer heads are ignored)."""
    cdef Py_ssize_t size = 0
    for frame in frames:
        if type(frame) is not bytes:  # checked before the first frame is sent
            raise TypeError(f"a frame must be bytes, got {type(frame).__name__}")
        size += PyBytes_GET_SIZE(frame) + HEAD_BYTES
    return size


cdef void* lookup(void* handle, const char* name) except NULL:
    cdef void* function = dlsym(handle, name)
    if function == NULL:
        raise OSError(f"libzmq has no {name.decode()}")
    return function
