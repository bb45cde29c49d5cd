"""The bound on what libzmq holds: who is cut, and who is not."""

from __future__ import annotations

from polybus.transports.zmq import memory_watch
from polybus.transports.zmq.memory_watch import MemoryBounds, MemoryWatch

BOUNDS = MemoryBounds(
    max_unfinished=1000, max_unread=5000, slow_timeout_s=5.0, slow_bytes_per_s=100
)


class Fake:
    """A connection as the kernel would count it."""

    def __init__(self) -> None:
        self.came = self.confirmed = 0
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
        return self.came, self.confirmed

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


def test_what_is_not_whole_is_bounded_for_each():
    scene = Scene()
    (one,) = scene.all
    one.came = 1000
    scene.watch.check()
    assert not one.is_cut
    one.came = 1001
    scene.watch.check()
    assert scene.reasons == ["max_unfinished_bytes"]


def test_what_was_taken_does_not_count():
    scene = Scene()
    (one,) = scene.all
    for _ in range(10):
        one.came += 900
        one.received += 1
        one.received_bytes += 900
        scene.watch.check()
    assert not one.is_cut


def test_what_waits_behind_a_whole_message_counts(monkeypatch):
    """It may be more than the message was."""
    monkeypatch.setattr(memory_watch, "HANDSHAKE_BYTES", 50)
    scene = Scene()
    (one,) = scene.all
    one.came, one.received, one.received_bytes = 1100, 1, 100
    scene.watch.check()
    assert (one.is_cut, one.unfinished) == (False, 1000)
    one.came, one.received, one.received_bytes = 1201, 2, 200
    scene.watch.check()
    assert one.is_cut


def test_what_is_no_message_is_not_held_against_anybody(monkeypatch):
    """The handshake, and heartbeats: more in time than anybody may hold."""
    monkeypatch.setattr(memory_watch, "HANDSHAKE_BYTES", 50)
    scene = Scene()
    busy, quiet = scene.all = [Fake(), Fake()]
    for number in range(200):
        scene.now_s += 1.0
        busy.came += 40 + 900
        busy.received, busy.received_bytes = number + 1, busy.received_bytes + 900
        quiet.came += 40
        scene.watch.check()
    assert not scene.reasons
    busy.came += 1001
    scene.watch.check()
    assert busy.is_cut


def test_a_guess_begins_anew_with_each_whole_message():
    scene = Scene()
    (one,) = scene.all
    one.is_guessed = True
    for _ in range(10):
        one.came += 900
        one.received += 1
        scene.watch.check()
    assert not one.is_cut
    one.came += 1001
    scene.watch.check()
    assert one.is_cut


def test_nobody_is_blamed_for_messages_that_we_have_not_read():
    scene = Scene(waiting=True)
    scene.all[0].came = 4000
    scene.watch.check()
    assert not scene.all[0].is_cut


def test_all_together_are_bounded_and_the_one_with_most_goes(monkeypatch):
    monkeypatch.setattr(memory_watch, "MINOR_BYTES", 10)
    scene = Scene(8, waiting=True)
    for number, one in enumerate(scene.all):
        one.came = 600 + number
    scene.watch.check()
    assert scene.reasons == []
    scene.all[3].came = 1900
    scene.watch.check()
    assert scene.reasons == ["max_unread_bytes"]
    assert [one.is_cut for one in scene.all].index(True) == 3


def test_memory_that_grows_while_something_is_unfinished_counts(monkeypatch):
    monkeypatch.setattr(memory_watch, "MINOR_BYTES", 10)
    memory = [1_000_000]
    monkeypatch.setattr(memory_watch, "process_bytes", lambda: memory[0])
    scene = Scene(2)
    memory[0] += 100_000  # nobody sends anything: not our business
    scene.watch.check()
    scene.all[1].came = 20
    scene.watch.check()
    assert scene.reasons == []
    memory[0] += 5001
    scene.watch.check()
    assert scene.reasons == ["max_unread_bytes"]
    assert scene.all[1].is_cut


def test_one_that_takes_nothing_is_slow_and_one_that_takes_a_little_is_not(monkeypatch):
    monkeypatch.setattr(memory_watch, "MINOR_BYTES", 10)
    scene = Scene(2)
    stuck, slow = scene.all
    stuck.sent_bytes = slow.sent_bytes = 10_000
    for _ in range(20):
        scene.now_s += 0.5
        slow.confirmed += 80
        scene.watch.check()
    assert scene.reasons == ["slow_consumer"]
    assert stuck.is_cut
    assert not slow.is_cut


def test_who_leaves_what_it_is_sent_is_full_until_it_takes_it():
    scene = Scene()
    (one,) = scene.all
    one.sent_bytes = 900
    assert not scene.watch.is_full(one)  # type: ignore[arg-type]
    one.sent_bytes = 1001
    assert scene.watch.is_full(one)  # type: ignore[arg-type]
    one.confirmed = 1000
    assert not scene.watch.is_full(one)  # type: ignore[arg-type]


def test_what_all_leave_of_what_they_are_sent_is_known_before_the_next_look():
    """Each takes less than it may; together they would have far more than all may have."""
    scene = Scene(6)
    for one in scene.all:
        assert not scene.watch.is_full(one)  # type: ignore[arg-type]
        one.sent_bytes = 900
        scene.watch.add_sent(900)
    assert scene.watch.is_full(scene.all[0])  # type: ignore[arg-type]
    for one in scene.all:
        one.confirmed = 900
    scene.watch.check()
    assert not scene.watch.is_full(scene.all[0])  # type: ignore[arg-type]


def test_looks_take_a_small_share_of_the_time():
    scene = Scene()
    times = iter([10.0])
    scene.watch._clock = lambda: next(times, 10.5)
    assert scene.watch.check() >= 20 * 0.4


def test_looks_come_sooner_while_much_is_on_its_way(monkeypatch):
    monkeypatch.setattr(memory_watch, "MINOR_BYTES", 10)
    scene = Scene()
    assert scene.watch.check() == memory_watch.CHECK_INTERVAL_S
    scene.all[0].came = 11
    assert scene.watch.check() == memory_watch.BUSY_CHECK_INTERVAL_S
    scene.all[0].came, scene.all[0].sent_bytes = 0, 11
    assert scene.watch.check() == memory_watch.BUSY_CHECK_INTERVAL_S


def test_a_process_has_a_size():
    assert memory_watch.process_bytes() > 1 << 20
