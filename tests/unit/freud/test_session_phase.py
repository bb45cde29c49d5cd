"""The phases of a Freud connection, and the values that compiled code tests."""

from __future__ import annotations

import pytest

from polybus.dialects.freud.server import plain_delivery, plain_session
from polybus.dialects.freud.server.session import Halt, Phase, PhaseEvent, next_phase
from polybus.dialects.freud.server.topic_lifecycle import TABLE, TopicEvent, TopicState

EVERY_PAIR = [(phase, event) for phase in Phase for event in PhaseEvent]


def test_compiled_code_tests_the_same_states():
    compiled = plain_session
    assert (compiled.OPEN, compiled.CLOSING) == (Phase.OPEN, Phase.CLOSING)
    assert (compiled.ENDING, compiled.DEPARTED) == (Phase.ENDING, Phase.DEPARTED)
    assert (compiled.NOT_HALTED, compiled.RESTING) == (Halt.NONE, Halt.RESTING)
    assert plain_delivery.LIVE == TopicState.LIVE


@pytest.mark.parametrize(("phase", "event"), EVERY_PAIR)
def test_no_event_returns_to_an_earlier_phase(phase: Phase, event: PhaseEvent):
    assert next_phase(phase, event) >= phase


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ("HANGUP HALF_CLOSE DRAINED ENDED", "HUNG_UP FINISHED CLOSING DEPARTED"),
        ("HALF_CLOSE HANGUP DRAINED ENDED", "FINISHED FINISHED CLOSING DEPARTED"),
        ("CLOSE HALF_CLOSE ENDED DRAINED", "CLOSING CLOSING DEPARTED DEPARTED"),
        ("ENDED DRAINED", "ENDING DEPARTED"),
        ("HANGUP ENDED CLOSE", "HUNG_UP ENDING DEPARTED"),
        ("DRAINED ENDED", "OPEN ENDING"),
    ],
)
def test_phases_of_a_connection(events: str, expected: str):
    phase = Phase.OPEN
    phases = []
    for event in events.split():
        phase = next_phase(phase, PhaseEvent[event])
        phases.append(phase.name)
    assert phases == expected.split()


def test_every_connection_departs_after_its_socket_ended():
    for phase in Phase:
        ended = next_phase(phase, PhaseEvent.ENDED)
        assert next_phase(ended, PhaseEvent.DRAINED) is Phase.DEPARTED


def test_lifecycle_table_has_every_cell():
    assert set(TABLE) == {(event, state) for event in TopicEvent for state in TopicState}
