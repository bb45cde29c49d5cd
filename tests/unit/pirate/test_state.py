"""What a client knows is what its events make of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polybus.dialects.pirate.client.client_journal import decoded, encoded
from polybus.dialects.pirate.client.journal_state import (
    FORGOTTEN,
    Answered,
    Asked,
    Doubted,
    Event,
    Everything,
    Forgotten,
    Named,
    Opened,
    Outcome,
    Pending,
    Read,
    State,
    Trusted,
)


def after(*events: Event) -> State:
    state = State()
    for event in (Named(b"me"), *events):
        state.apply(event)
    return state


def test_a_request_is_pending_until_its_answer():
    asked = Asked(1, "PUT", "news", b"hello")
    state = after(Opened(1, 0), asked)
    assert state.pending == Pending(1, "PUT", "news", b"hello")
    state.apply(Answered(1, 7, "", True))
    assert state.pending is None
    assert state.outcome == Outcome(1, "PUT", "news", 7)
    assert (state.counter, state.known) == (1, 1)


def test_a_refusal_ends_a_request_and_changes_no_subscription():
    state = after(Asked(1, "SUB", "news", b""), Answered(1, None, "DENIED", True))
    assert state.lasts == {}
    assert state.outcome == Outcome(1, "SUB", "news", None, "DENIED")


def test_a_refusal_that_the_bus_does_not_store_leaves_its_counter_unknown_there():
    state = after(Asked(3, "PUT", "news", b""), Answered(3, None, "MALFORMED", False))
    assert (state.counter, state.known) == (3, 0)


def test_a_subscription_begins_at_the_answer_and_never_goes_back():
    state = after(Asked(1, "SUB", "news", b""), Answered(1, 4, "", True))
    assert state.lasts == {"news": 4}
    for event in (Read("news", 6), Read("news", 5)):
        state.apply(event)
    state.apply(Asked(2, "SUB", "news", b""))
    state.apply(Answered(2, 4, "", True))  # the bus has not heard of 6
    assert state.lasts == {"news": 6}


def test_unsubscribing_forgets_what_was_read():
    for was_subscribed in (0, 1):
        state = after(
            Read("news", 6), Asked(1, "UNSUB", "news", b""), Answered(1, was_subscribed, "", True)
        )
        assert state.lasts == {}


def test_counters_go_on_above_what_the_bus_has():
    state = after(Asked(1, "PUT", "news", b""), Answered(1, 1, "", True), Opened(2, 9))
    assert (state.epoch, state.counter, state.known) == (2, 9, 9)


def test_a_forgotten_request_has_no_value():
    state = after(Asked(1, "PUT", "news", b""), Opened(2, 1), Forgotten(1))
    assert state.pending is None
    assert state.outcome == Outcome(1, "PUT", "news", None, FORGOTTEN)
    assert state.counter == 1


def read_to(last: int) -> list[Event]:
    put: list[Event] = [Asked(3, "PUT", "news", b""), Answered(3, 9, "", True)]
    return [Opened(5, 2), *put, Read("news", last), Read("new", 0)]


def test_a_bus_that_gives_an_epoch_again_went_back():
    for epoch in (4, 5):
        state = after(*read_to(9))
        assert state.went_back(Opened(epoch, 3))
        state.apply(Opened(epoch, 3))
        assert state.doubted == {"news"}  # nothing was read of the other one
        assert state.epoch == epoch


def test_a_bus_that_forgot_a_counter_went_back_and_counters_do_not():
    state = after(*read_to(9))
    assert state.went_back(Opened(6, 2))
    state.apply(Opened(6, 2))
    assert (state.counter, state.known, state.doubted) == (3, 2, {"news"})
    assert not state.went_back(Opened(7, 2))  # said once


def test_a_bus_that_goes_on_did_not_go_back():
    state = after(*read_to(9))
    assert not state.went_back(Opened(6, 3))
    assert not state.is_behind(Opened(6, 3))
    assert state.is_behind(Opened(6, 4))


def test_an_unanswered_request_that_the_bus_has_is_not_one_too_many():
    state = after(Opened(1, 0), Asked(1, "PUT", "news", b""))
    assert not state.is_behind(Opened(2, 1))
    assert not state.went_back(Opened(2, 0))


def test_trust_reads_from_where_the_bus_says():
    state = after(*read_to(9), Opened(5, 3), Trusted())
    assert state.lasts == {"news": 0, "new": 0}
    assert state.doubted == set()


def test_doubt_is_of_what_was_read():
    assert after(*read_to(9), Doubted()).doubted == {"news"}


def test_unsubscribing_ends_the_doubt():
    state = after(*read_to(9), Opened(5, 3), Asked(4, "UNSUB", "news", b""))
    state.apply(Answered(4, 1, "", True))
    assert state.doubted == set()


# --- all of them, at random

U64 = st.integers(0, 2**64 - 1)
SMALL = st.integers(0, 9)
TOPICS = st.sampled_from(["a", "b", "ü"])
BODIES = st.binary(max_size=20)
OPS = st.sampled_from(["PUT", "SUB", "UNSUB"])
EVENTS = st.lists(
    st.one_of(
        st.builds(Opened, SMALL, SMALL),
        st.builds(Asked, U64, OPS, TOPICS, BODIES),
        st.builds(Answered, SMALL, st.none() | U64, st.sampled_from(["", "DENIED"]), st.booleans()),
        st.builds(Forgotten, SMALL),
        st.builds(Read, TOPICS, SMALL),
        st.builds(Doubted),
        st.builds(Trusted),
    ),
    max_size=30,
)


def sensible(events: list[Event]) -> list[Event]:
    """Without second requests, and without answers to none."""
    kept: list[Event] = []
    pending = False
    for event in events:
        asks, ends = isinstance(event, Asked), isinstance(event, Answered | Forgotten)
        if not (asks and pending) and not (ends and not pending):
            kept.append(event)
            pending = asks or (pending and not ends)
    return kept


@given(EVENTS)
def test_everything_in_one_event_is_the_same_state(events):
    state = after(*sensible(events))
    whole = decoded(encoded(state.everything())[12:])
    assert isinstance(whole, Everything)
    again = State()
    again.apply(whole)
    assert again == state


@given(EVENTS)
def test_events_come_back_as_they_were_written(events):
    for event in events:
        assert decoded(encoded(event)[12:]) == event
        assert type(decoded(encoded(event)[12:])) is type(event)


@given(EVENTS)
def test_nothing_read_is_read_again_unless_the_bus_went_back(events):
    state = State()
    state.apply(Named(b"me"))
    for event in sensible(events):
        before = dict(state.lasts)
        gone = state.pending.topic if state.pending and state.pending.op == "UNSUB" else None
        state.apply(event)
        for topic, last in before.items():
            excused = topic == gone or isinstance(event, Trusted)
            assert excused or state.lasts[topic] >= last
