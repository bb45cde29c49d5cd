"""The fast path of PUT: from frames to commits, and from commit results to replies.

A PUT takes a parse of nine frames, a hash, a block, a commit and later a reply, which in Python
was most of its cost. The fast path handles the usual PUT: one body frame, a loaded client with
no request before it, a topic with one shard and no byte limit. For any other message `take`
returns False with nothing changed, and the slow path (session.py, put_handler.py) handles it.
Refusals and waiting requests exist only there.

    take         turns the frames of one message into a Put and its commit
    take_batch   returns the Puts and the commits of a turn, which go to the store together
    answer       answers committed Puts, and gives the rest to the slow path
"""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize
from cpython.bytes cimport PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint64_t
from libc.string cimport memcmp

from polybus.kernel.blocks import build

cdef extern from "<endian.h>" nogil:
    uint64_t htobe64(uint64_t)
    uint64_t be64toh(uint64_t)

cdef enum:
    HEAD_FRAMES = 6  # version, op, client, epoch, counter, topic; then the body
    NUMBER_BYTES = 8
    # Larger envelopes are rare and left to the slow path.
    MAX_ENVELOPE_FRAMES = 8
    MAX_ENVELOPE_FRAME_BYTES = 255

cdef bytes PUT = b"PUT", OK = b"OK", EMPTY = b""
cdef object new = tuple.__new__  # makes a named tuple without calling its constructor


cdef class ClientState:
    """The state that decides whether a client's next request may run now."""

    cdef readonly bytes id
    cdef readonly str producer
    cdef public int64_t epoch  # < 0 before the first HELLO
    cdef public uint64_t counter  # the highest stored counter
    cdef public Py_ssize_t in_flight  # concurrent requests
    cdef public bint alone  # an exclusive request is running
    cdef public object waiting

    def __init__(self, bytes client_id not None, str producer not None, int64_t epoch):
        self.id = client_id
        self.producer = producer
        self.epoch = epoch


@cython.final
cdef class Target:
    """A topic with one shard and no byte limit. `hashed` has the digest's fixed prefix."""

    cdef readonly object topic
    cdef object name, number, shard, hashed
    cdef uint64_t turn  # in which `is_open` was last True

    def __init__(self, topic, shard, hashed):
        self.topic = topic
        self.name = topic.name
        self.number = topic.number
        self.shard = shard
        self.hashed = hashed


cdef class Put:
    """A PUT in flight."""

    cdef readonly ClientState client
    cdef readonly uint64_t counter
    cdef readonly str topic
    cdef readonly object then, stamp, block
    cdef public object bounded  # the topic, if it has a byte limit

    def __init__(self, ClientState client not None, uint64_t counter, str topic, then, stamp, block):
        self.client = client
        self.counter = counter
        self.topic = topic
        self.then = then
        self.stamp = stamp
        self.block = block


@cython.final
cdef class Reply:
    """The reply of a PUT. Calling it with a result sends the reply."""

    cdef object session, peer
    cdef list frames
    cdef Py_ssize_t end, size

    def __call__(self, result):
        cdef uint64_t counter = 0
        number(self.frames, self.end + 5, &counter)
        envelope = self.frames[: self.end]
        self.session.answer(self.peer, envelope, PUT, counter, self.size, result)

    cdef int send_ok(self, uint64_t message_id) except -1:
        cdef bytes number = PyBytes_FromStringAndSize(NULL, NUMBER_BYTES)
        cdef list envelope = self.frames[: self.end]
        (<uint64_t*>PyBytes_AS_STRING(number))[0] = htobe64(message_id)
        self.session.on_put_committed(self.size)
        self.peer.send(envelope, [OK, self.frames[self.end + 5], number])
        return 0


@cython.final
cdef class PutRequest:
    """The frames of a plain PUT."""

    cdef bytes client, topic, body
    cdef uint64_t epoch, counter
    cdef Py_ssize_t end  # of the envelope

    cdef bint read(self, list frames):
        """Parse the frames. Returns False if they are not a plain PUT."""
        cdef Py_ssize_t end = envelope_end(frames)
        if end < 0 or PyList_GET_SIZE(frames) != end + HEAD_FRAMES + 2:
            return False
        if not is_frame(frames, end + 1, b"PIR1", 4) or not is_frame(frames, end + 2, b"PUT", 3):
            return False
        if not number(frames, end + 4, &self.epoch) or not number(frames, end + 5, &self.counter):
            return False
        self.client = <bytes>PyList_GET_ITEM(frames, end + 3)
        self.topic = <bytes>PyList_GET_ITEM(frames, end + 6)
        self.body = <bytes>PyList_GET_ITEM(frames, end + 7)
        self.end = end
        return self.counter > 0 and self.epoch <= <uint64_t>INT64_MAX


@cython.final
cdef class PutFastPath:
    """`kinds` are the named tuples Block, Append, Commit and Stamp; `wall_ns` is the clock.

    `find_client(id)` returns a loaded client or None. `is_open(topic)` must return True only if
    the topic is still the one that was learned and no rule restricts PUTs to it.
    """

    cdef dict targets
    cdef object find_client, is_open, wall_ns, block, append, commit, stamp
    cdef Py_ssize_t max_body, max_targets
    cdef public Py_ssize_t uncommitted_bytes, max_uncommitted
    cdef list puts, commits
    cdef uint64_t turn

    def __init__(
        self,
        find_client,
        tuple kinds not None,
        is_open,
        wall_ns,
        Py_ssize_t max_body,
        Py_ssize_t max_uncommitted,
        Py_ssize_t max_targets,
    ):
        self.find_client = find_client
        self.targets = {}
        self.block, self.append, self.commit, self.stamp = kinds
        self.is_open = is_open
        self.wall_ns = wall_ns
        self.max_body = max_body
        self.max_uncommitted = max_uncommitted
        self.max_targets = max_targets
        self.puts, self.commits = [], []
        self.turn = 1

    def learn(self, bytes name not None, Target target not None):
        """Enable the fast path for a topic."""
        if len(self.targets) >= self.max_targets:
            self.targets.clear()
        self.targets[name] = target

    def take(self, session, peer, list frames not None, bytes own_id=None) -> bool:
        """Take a message if it is a plain PUT. Returns False, with nothing changed, if not.

        `own_id` is the client id that the peer must use, or None.
        """
        cdef PutRequest request = PutRequest.__new__(PutRequest)
        cdef ClientState client
        cdef Target target
        cdef Py_ssize_t size
        if not request.read(frames) or (own_id is not None and own_id != request.client):
            return False
        client = self.find_client(request.client)
        target = self.targets.get(request.topic)
        size = PyBytes_GET_SIZE(request.body)
        if client is None or target is None or size > self.max_body:
            return False
        if client.alone or client.waiting or <uint64_t>client.epoch != request.epoch:
            return False
        if client.epoch < 0:
            return False
        # Once per turn is enough, since nothing else runs on the loop within a turn.
        if target.turn != self.turn:
            if not self.is_open(target.topic):
                return False
            target.turn = self.turn
        return self.enqueue(session, peer, frames, request, client, target)

    cdef bint enqueue(
        self, session, peer, list frames, PutRequest request, ClientState client, Target target
    ) except -1:
        """Add the PUT and its commit to this turn. Returns False if the bytes are too many."""
        cdef bytes offsets = PyBytes_FromStringAndSize(NULL, 8)
        cdef int32_t* bounds = <int32_t*>PyBytes_AS_STRING(offsets)
        cdef object data
        cdef Reply then
        bounds[0] = 0
        bounds[1] = <int32_t>PyBytes_GET_SIZE(request.body)
        data = build(self.wall_ns() // 1000000, request.body, offsets)
        if self.uncommitted_bytes + <Py_ssize_t>len(data) > self.max_uncommitted:
            return False
        hashed = target.hashed.copy()
        hashed.update(request.body)
        stamp = new(
            self.stamp, (client.producer, request.epoch, request.counter, hashed.digest())
        )
        block = new(self.block, (data, 1))
        append = new(self.append, (target.number, target.shard, block))
        then = Reply.__new__(Reply)
        then.session, then.peer, then.frames = session, peer, frames
        then.end, then.size = request.end, PyBytes_GET_SIZE(request.body)
        self.add(
            Put(client, request.counter, target.name, then, stamp, block),
            new(self.commit, ((append,), (), (), stamp, EMPTY)),
        )
        return True

    def add(self, Put put not None, commit):
        """Add a PUT of either path to the commits of this turn."""
        put.client.in_flight += 1
        self.uncommitted_bytes += len(put.block.data)
        self.puts.append(put)
        self.commits.append(commit)

    def has_waiting(self) -> bool:
        return bool(self.puts)

    def take_batch(self) -> tuple:
        """Return the PUTs of this turn and their commits, and begin a new turn."""
        cdef list puts = self.puts, commits = self.commits
        self.turn += 1
        self.puts, self.commits = [], []
        return puts, commits

    @staticmethod
    def outcomes(list futures not None, error_from_future) -> tuple:
        """Return a result or an error for each future, and the next id of each topic."""
        cdef list results = []
        cdef dict next_ids = {}
        for future in futures:
            try:
                result = future.result()
            except Exception:
                results.append(error_from_future(future))
                continue
            results.append(result)
            for topic, _, _, first_id, count in result.spans:
                next_id, known = first_id + count, next_ids.get(topic)
                if known is None or next_id > known:
                    next_ids[topic] = next_id
        return results, next_ids

    def answer(self, list puts not None, list results not None, slow_path, run_queued):
        """Answer committed PUTs. Calls `slow_path(put, result)` for any other result.

        `results` has a CommitResult or an error for each PUT. `run_queued(client)` must run the
        waiting requests of a client.
        """
        cdef Put put
        cdef Py_ssize_t at
        for at in range(len(puts)):
            put = <Put?>puts[at]
            result = results[at]
            if type(put.then) is not Reply or not is_plain(result):
                slow_path(put, result)
                continue
            self.uncommitted_bytes -= len(put.block.data)
            (<Reply>put.then).send_ok(result.spans[0].first_id)
            put.client.in_flight -= 1
            if put.counter > put.client.counter:
                put.client.counter = put.counter
            if put.client.waiting:
                run_queued(put.client)


cdef bint is_plain(result):
    """Return True if the result is that of a committed message: one span, no note."""
    return isinstance(result, tuple) and len(result.spans) == 1 and not result.note


cdef Py_ssize_t envelope_end(list frames):
    """Return the index of the first empty frame, or -1 if the envelope is unusual."""
    cdef Py_ssize_t at, size
    cdef object frame
    for at in range(min(PyList_GET_SIZE(frames), MAX_ENVELOPE_FRAMES + 1)):
        frame = <object>PyList_GET_ITEM(frames, at)
        if not PyBytes_CheckExact(frame):
            return -1
        size = PyBytes_GET_SIZE(frame)
        if size == 0:
            return at
        if size > MAX_ENVELOPE_FRAME_BYTES:
            return -1
    return -1


cdef bint is_frame(list frames, Py_ssize_t at, const char* wanted, Py_ssize_t size):
    cdef object frame = <object>PyList_GET_ITEM(frames, at)
    if not PyBytes_CheckExact(frame) or PyBytes_GET_SIZE(frame) != size:
        return False
    return memcmp(PyBytes_AS_STRING(frame), wanted, size) == 0


cdef bint number(list frames, Py_ssize_t at, uint64_t* out):
    cdef object frame = <object>PyList_GET_ITEM(frames, at)
    if not PyBytes_CheckExact(frame) or PyBytes_GET_SIZE(frame) != NUMBER_BYTES:
        return False
    out[0] = be64toh((<uint64_t*>PyBytes_AS_STRING(frame))[0])
    return True
