"""The bound on the memory of libzmq: which connections are cut, and which are not."""

from __future__ import annotations

from polybus.transports.zmq import memory_watch
from polybus.transports.zmq.memory_watch import MemoryBounds, MemoryWatch

BOUNDS = MemoryBounds(
    max_unfinished=1000, max_unread=5000, slow_timeout_s=5.0, slow_bytes_per_s=100
)


class Fake:
    """A connection as the kernel would count it."""

    def __init__(self) -> None:
        self.received_by_kernel = self.acked_by_peer = 0
        self.received = self.received_bytes = 0
        self.sent_bytes = 0
        self.is_guessed = False
        self.baseline_s = 0.0
        self.whole, self.baseline, self.unfinished, self.acked = -1, 0, 0, 0
        self.slow_since_s: float | None = None
        self.slow_acked = 0
        self.is_cut = False

    @property
    def unacknowledged_bytes(self) -> int:
        return max(0, self.sent_bytes - self.acked)

    def read_byte_counts(self) -> tuple[int, int]:
        return self.received_by_kernel, self.acked_by_peer

    def cut(self) -> bool:
        self.is_cut = True
        return True


class Scene:
    def __init__(self, count: int = 1, *, waiting: bool = False) -> None:
        self.all = [Fake() for _ in range(count)]
        self.now_s = 0.0
        self.reasons: list[str] = []
        self.watch = MemoryWatch(
            lambda: [one for one in self.all if not one.is_cut],  # type: ignore[misc]
            BOUNDS,
            lambda: self.now_s,
            lambda: waiting,
            lambda _one, reason: self.reasons.append(reason),
        )
        self.watch.check()


def test_unfinished_bytes_are_bounded_per_connection():
    scene = Scene()
    (one,) = scene.all
    one.received_by_kernel = 1000
    scene.watch.check()
    assert not one.is_cut
    one.received_by_kernel = 1001
    scene.watch.check()
    assert scene.reasons == ["max_unfinished_bytes"]


def test_read_messages_do_not_count():
    scene = Scene()
    (one,) = scene.all
    for _ in range(10):
        one.received_by_kernel += 900
        one.received += 1
        one.received_bytes += 900
        scene.watch.check()
    assert not one.is_cut


def test_bytes_after_a_complete_message_count(monkeypatch):
    """They may be more than the message was."""
    monkeypatch.setattr(memory_watch, "HANDSHAKE_BYTES", 50)
    scene = Scene()
    (one,) = scene.all
    one.received_by_kernel, one.received, one.received_bytes = 1100, 1, 100
    scene.watch.check()
    assert (one.is_cut, one.unfinished) == (False, 1000)
    one.received_by_kernel, one.received, one.received_bytes = 1201, 2, 200
    scene.watch.check()
    assert one.is_cut


def test_handshake_and_heartbeats_do_not_count(monkeypatch):
    """The handshake, and heartbeats: in time more bytes than the bound."""
    monkeypatch.setattr(memory_watch, "HANDSHAKE_BYTES", 50)
    scene = Scene()
    busy, quiet = scene.all = [Fake(), Fake()]
    for number in range(200):
        scene.now_s += 1.0
        busy.received_by_kernel += 40 + 900
        busy.received, busy.received_bytes = number + 1, busy.received_bytes + 900
        quiet.received_by_kernel += 40
        scene.watch.check()
    assert not scene.reasons
    busy.received_by_kernel += 1001
    scene.watch.check()
    assert busy.is_cut


def test_guess_restarts_with_each_complete_message():
    scene = Scene()
    (one,) = scene.all
    one.is_guessed = True
    for _ in range(10):
        one.received_by_kernel += 900
        one.received += 1
        scene.watch.check()
    assert not one.is_cut
    one.received_by_kernel += 1001
    scene.watch.check()
    assert one.is_cut


def test_unread_complete_messages_do_not_cut_a_connection():
    scene = Scene(waiting=True)
    scene.all[0].received_by_kernel = 4000
    scene.watch.check()
    assert not scene.all[0].is_cut


def test_total_is_bounded_and_the_largest_connection_is_cut(monkeypatch):
    monkeypatch.setattr(memory_watch, "MINOR_BYTES", 10)
    scene = Scene(8, waiting=True)
    for number, one in enumerate(scene.all):
        one.received_by_kernel = 600 + number
    scene.watch.check()
    assert scene.reasons == []
    scene.all[3].received_by_kernel = 1900
    scene.watch.check()
    assert scene.reasons == ["max_unread_bytes"]
    assert [one.is_cut for one in scene.all].index(True) == 3


def test_process_memory_counts_while_bytes_are_unfinished(monkeypatch):
    monkeypatch.setattr(memory_watch, "MINOR_BYTES", 10)
    memory = [1_000_000]
    monkeypatch.setattr(memory_watch, "process_bytes", lambda: memory[0])
    scene = Scene(2)
    memory[0] += 100_000  # no peer sends anything, so it does not count
    scene.now_s += memory_watch.BASELINE_INTERVAL_S
    scene.watch.check()
    scene.all[1].received_by_kernel = 200  # more than heartbeats
    scene.watch.check()
    assert scene.reasons == []
    memory[0] += 5001
    scene.watch.check()
    assert scene.reasons == ["max_unread_bytes"]
    assert scene.all[1].is_cut


def test_peer_that_reads_nothing_is_cut_as_slow_consumer(monkeypatch):
    monkeypatch.setattr(memory_watch, "MINOR_BYTES", 10)
    scene = Scene(2)
    stuck, slow = scene.all
    stuck.sent_bytes = slow.sent_bytes = 10_000
    for _ in range(20):
        scene.now_s += 0.5
        slow.acked_by_peer += 80
        scene.watch.check()
    assert scene.reasons == ["slow_consumer"]
    assert stuck.is_cut
    assert not slow.is_cut


def test_peer_is_full_until_it_reads_its_replies():
    scene = Scene()
    (one,) = scene.all
    one.sent_bytes = 900
    assert not scene.watch.is_full(one)  # type: ignore[arg-type]
    one.sent_bytes = 1001
    assert scene.watch.is_full(one)  # type: ignore[arg-type]
    one.acked_by_peer = 1000
    assert not scene.watch.is_full(one)  # type: ignore[arg-type]


def test_sent_bytes_of_all_peers_count_before_the_next_check():
    """Each is below its bound; together they are over the total."""
    scene = Scene(6)
    for one in scene.all:
        assert not scene.watch.is_full(one)  # type: ignore[arg-type]
        one.sent_bytes = 900
        scene.watch.add_sent(900)
    assert scene.watch.is_full(scene.all[0])  # type: ignore[arg-type]
    for one in scene.all:
        one.acked_by_peer = 900
    scene.watch.check()
    assert not scene.watch.is_full(scene.all[0])  # type: ignore[arg-type]


def test_checks_take_a_small_share_of_the_time():
    scene = Scene()
    times = iter([10.0])
    scene.watch._clock = lambda: next(times, 10.5)
    assert scene.watch.check() >= 20 * 0.4


def test_checks_are_more_frequent_while_bytes_are_in_transfer(monkeypatch):
    monkeypatch.setattr(memory_watch, "MINOR_BYTES", 10)
    scene = Scene()
    assert scene.watch.check() == memory_watch.CHECK_INTERVAL_S
    scene.all[0].received_by_kernel = 11
    assert scene.watch.check() == memory_watch.BUSY_CHECK_INTERVAL_S
    scene.all[0].received_by_kernel, scene.all[0].sent_bytes = 0, 11
    assert scene.watch.check() == memory_watch.BUSY_CHECK_INTERVAL_S


def test_process_bytes_is_positive():
    assert memory_watch.process_bytes() > 1 << 20
