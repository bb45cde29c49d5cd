"""Alarms: raised once, cleared once, bounded, and listed with or without names."""

import threading

from polybus.bus.alarms import MAX_ALARMS, NS_PER_S, Alarms
from tests.rig.memory_bus import MemoryBus, RecordedLog


class Clock:
    def __init__(self) -> None:
        self.now_ns = 5 * NS_PER_S

    def __call__(self) -> int:
        return self.now_ns


def test_an_alarm_is_one_log_line_when_raised_and_one_when_cleared() -> None:
    log, clock = RecordedLog(), Clock()
    alarms = Alarms(clock, log)
    alarms.raise_alarm("disk_full", "store", "no space left")
    clock.now_ns += 2 * NS_PER_S
    alarms.raise_alarm("disk_full", "store", "no space left for 3 commits")
    assert alarms.to_json(with_names=True) == [
        {
            "kind": "disk_full",
            "since": 5.0,
            "object": "store",
            "text": "no space left for 3 commits",
        }
    ]
    alarms.clear_alarm("disk_full", "store")
    alarms.clear_alarm("disk_full", "store")
    named = {"kind": "disk_full", "object": "store"}
    assert log.events == [
        ("alarm raised", {"level": "warning", **named, "text": "no space left"}),
        ("alarm cleared", {"level": "info", **named, "lasted_s": 2.0}),
    ]
    assert alarms.to_json(with_names=True) == []


def test_alarms_of_one_kind_differ_by_object_and_are_listed_by_age() -> None:
    clock = Clock()
    alarms = Alarms(clock, RecordedLog())
    for name in ("b", "a"):
        alarms.raise_alarm("topic_damaged", name, "")
        clock.now_ns += 1
    alarms.clear_alarm("topic_damaged", "c")
    assert [one["object"] for one in alarms.to_json(with_names=True)] == ["b", "a"]
    alarms.clear_alarm("topic_damaged", "b")
    assert not alarms.is_raised("topic_damaged", "b")
    assert alarms.is_raised("topic_damaged", "a")


def test_without_names_an_alarm_shows_kind_and_start_alone() -> None:
    alarms = Alarms(Clock(), RecordedLog())
    alarms.raise_alarm("topic_damaged", "salaries", "shard 3 of salaries")
    assert alarms.to_json(with_names=False) == [
        {"kind": "topic_damaged", "since": 5.0, "object": "", "text": ""}
    ]


def test_the_number_of_alarms_is_bounded() -> None:
    log = RecordedLog()
    alarms = Alarms(Clock(), log)
    for number in range(MAX_ALARMS + 3):
        alarms.raise_alarm("topic_damaged", f"t{number}", "")
    assert (len(alarms.to_json(with_names=True)), alarms.left_out) == (MAX_ALARMS, 3)
    assert len(log.warnings()) == MAX_ALARMS
    alarms.raise_alarm("topic_damaged", "t0", "changed")  # a raised one still changes
    assert alarms.to_json(with_names=True)[0]["text"] == "changed"
    alarms.raise_alarm("disk_full", "store", "no space left")  # has room of its own
    assert alarms.is_raised("disk_full", "store")
    alarms.clear_alarm("topic_damaged", "t0")
    alarms.raise_alarm("topic_damaged", "new", "")
    assert alarms.is_raised("topic_damaged", "new")


def test_threads_that_raise_and_clear_leave_no_alarm() -> None:
    log = RecordedLog()
    alarms = Alarms(Clock(), log)

    def raise_and_clear(name: str) -> None:
        for _ in range(500):
            alarms.raise_alarm("kind", name, "")
            alarms.clear_alarm("kind", name)

    threads = [threading.Thread(target=raise_and_clear, args=(f"t{n % 2}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert alarms.to_json(with_names=True) == []
    raised = sum(event == "alarm raised" for event, _ in log.events)
    assert raised == len(log.events) - raised


def test_statistics_show_alarms_without_names() -> None:
    bus = MemoryBus()
    bus.broker.alarms.raise_alarm("topic_damaged", "salaries", "")
    (shown,) = bus.broker.stats()["alarms"]
    assert (shown["kind"], shown["object"]) == ("topic_damaged", "")


def test_statistics_count_alarms_that_were_left_out() -> None:
    bus = MemoryBus()
    for number in range(MAX_ALARMS + 3):
        bus.broker.alarms.raise_alarm("topic_damaged", f"t{number}", "")
    assert bus.broker.stats()["dropped"] == {"alarms": 3}
