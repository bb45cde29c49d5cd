"""The state of a client is the result of its events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polybus.dialects.pirate.client.client_journal import decode_event, encode_event
from polybus.dialects.pirate.client.journal_state import (
    FORGOTTEN,
    EpochOpened,
    Event,
    IdAssigned,
    JournalState,
    MessageRead,
    Outcome,
    Pending,
    PositionsDoubted,
    PositionsTrusted,
    RequestAnswered,
    RequestForgotten,
    RequestRecorded,
    StateSnapshot,
)


def after(*events: Event) -> JournalState:
    state = JournalState()
    for event in (IdAssigned(b"me"), *events):
        state.apply(event)
    return state


def test_request_is_pending_until_answered():
    asked = RequestRecorded(1, "PUT", "news", b"hello")
    state = after(EpochOpened(1, 0), asked)
    assert state.pending == Pending(1, "PUT", "news", b"hello")
    state.apply(RequestAnswered(1, 7, "", True))
    assert state.pending is None
    assert state.outcome == Outcome(1, "PUT", "news", 7)
    assert (state.counter, state.known) == (1, 1)


def test_refusal_settles_request_and_changes_no_subscription():
    state = after(RequestRecorded(1, "SUB", "news", b""), RequestAnswered(1, None, "DENIED", True))
    assert state.lasts == {}
    assert state.outcome == Outcome(1, "SUB", "news", None, "DENIED")


def test_refusal_that_is_not_stored_leaves_known_counter():
    state = after(
        RequestRecorded(3, "PUT", "news", b""), RequestAnswered(3, None, "MALFORMED", False)
    )
    assert (state.counter, state.known) == (3, 0)


def test_subscription_starts_at_the_answer_and_never_goes_back():
    state = after(RequestRecorded(1, "SUB", "news", b""), RequestAnswered(1, 4, "", True))
    assert state.lasts == {"news": 4}
    for event in (MessageRead("news", 6), MessageRead("news", 5)):
        state.apply(event)
    state.apply(RequestRecorded(2, "SUB", "news", b""))
    state.apply(RequestAnswered(2, 4, "", True))  # the bus does not know 6
    assert state.lasts == {"news": 6}


def test_unsubscribe_removes_the_position():
    for was_subscribed in (0, 1):
        state = after(
            MessageRead("news", 6),
            RequestRecorded(1, "UNSUB", "news", b""),
            RequestAnswered(1, was_subscribed, "", True),
        )
        assert state.lasts == {}


def test_counters_continue_above_the_counter_of_the_bus():
    state = after(
        RequestRecorded(1, "PUT", "news", b""), RequestAnswered(1, 1, "", True), EpochOpened(2, 9)
    )
    assert (state.epoch, state.counter, state.known) == (2, 9, 9)


def test_forgotten_request_has_no_value():
    state = after(RequestRecorded(1, "PUT", "news", b""), EpochOpened(2, 1), RequestForgotten(1))
    assert state.pending is None
    assert state.outcome == Outcome(1, "PUT", "news", None, FORGOTTEN)
    assert state.counter == 1


def read_to(last: int) -> list[Event]:
    put: list[Event] = [RequestRecorded(3, "PUT", "news", b""), RequestAnswered(3, 9, "", True)]
    return [EpochOpened(5, 2), *put, MessageRead("news", last), MessageRead("new", 0)]


def test_repeated_epoch_means_restored_bus():
    for epoch in (4, 5):
        state = after(*read_to(9))
        assert state.is_restored_bus(EpochOpened(epoch, 3))
        state.apply(EpochOpened(epoch, 3))
        assert state.doubted == {"news"}  # nothing was read of the other one
        assert state.epoch == epoch


def test_lost_counter_means_restored_bus_and_counters_continue():
    state = after(*read_to(9))
    assert state.is_restored_bus(EpochOpened(6, 2))
    state.apply(EpochOpened(6, 2))
    assert (state.counter, state.known, state.doubted) == (3, 2, {"news"})
    assert not state.is_restored_bus(EpochOpened(7, 2))  # reported once


def test_newer_epoch_and_counter_raise_no_doubt():
    state = after(*read_to(9))
    assert not state.is_restored_bus(EpochOpened(6, 3))
    assert not state.is_behind(EpochOpened(6, 3))
    assert state.is_behind(EpochOpened(6, 4))


def test_stored_pending_request_does_not_mean_an_old_folder():
    state = after(EpochOpened(1, 0), RequestRecorded(1, "PUT", "news", b""))
    assert not state.is_behind(EpochOpened(2, 1))
    assert not state.is_restored_bus(EpochOpened(2, 0))


def test_trusted_topics_start_at_the_position_of_the_bus():
    state = after(*read_to(9), EpochOpened(5, 3), PositionsTrusted())
    assert state.lasts == {"news": 0, "new": 0}
    assert state.doubted == set()


def test_only_read_topics_are_doubted():
    assert after(*read_to(9), PositionsDoubted()).doubted == {"news"}


def test_unsubscribe_ends_the_doubt():
    state = after(*read_to(9), EpochOpened(5, 3), RequestRecorded(4, "UNSUB", "news", b""))
    state.apply(RequestAnswered(4, 1, "", True))
    assert state.doubted == set()


# --- all of them, at random

U64 = st.integers(0, 2**64 - 1)
SMALL = st.integers(0, 9)
TOPICS = st.sampled_from(["a", "b", "ü"])
BODIES = st.binary(max_size=20)
OPS = st.sampled_from(["PUT", "SUB", "UNSUB"])
EVENTS = st.lists(
    st.one_of(
        st.builds(EpochOpened, SMALL, SMALL),
        st.builds(RequestRecorded, U64, OPS, TOPICS, BODIES),
        st.builds(
            RequestAnswered, SMALL, st.none() | U64, st.sampled_from(["", "DENIED"]), st.booleans()
        ),
        st.builds(RequestForgotten, SMALL),
        st.builds(MessageRead, TOPICS, SMALL),
        st.builds(PositionsDoubted),
        st.builds(PositionsTrusted),
    ),
    max_size=30,
)


def sensible(events: list[Event]) -> list[Event]:
    """Remove requests while one is pending, and answers while none is."""
    kept: list[Event] = []
    pending = False
    for event in events:
        asks, ends = (
            isinstance(event, RequestRecorded),
            isinstance(event, RequestAnswered | RequestForgotten),
        )
        if not (asks and pending) and not (ends and not pending):
            kept.append(event)
            pending = asks or (pending and not ends)
    return kept


@given(EVENTS)
def test_snapshot_restores_the_same_state(events):
    state = after(*sensible(events))
    whole = decode_event(encode_event(state.snapshot())[12:])
    assert isinstance(whole, StateSnapshot)
    again = JournalState()
    again.apply(whole)
    assert again == state


@given(EVENTS)
def test_events_round_trip(events):
    for event in events:
        assert decode_event(encode_event(event)[12:]) == event
        assert type(decode_event(encode_event(event)[12:])) is type(event)


@given(EVENTS)
def test_positions_never_go_back_unless_the_bus_was_restored(events):
    state = JournalState()
    state.apply(IdAssigned(b"me"))
    for event in sensible(events):
        before = dict(state.lasts)
        gone = state.pending.topic if state.pending and state.pending.op == "UNSUB" else None
        state.apply(event)
        for topic, last in before.items():
            excused = topic == gone or isinstance(event, PositionsTrusted)
            assert excused or state.lasts[topic] >= last
