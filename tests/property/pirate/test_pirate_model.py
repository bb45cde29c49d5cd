"""Every answer of a real bus is that of an independent model, for random requests.

One bus for all examples; each has names of its own. Three clients that share a few topics use
counters, epochs and LASTs of every sort: right ones, repeats, old ones, ones out of the air.
"""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.rig.pirate import wire
from tests.rig.pirate.model import Model
from tests.rig.pirate.pirate_bus import PirateBus
from tests.rig.pirate.zmq_client import Bare

CLIENTS = st.sampled_from((b"a", b"b", b"\x00\xff"))
TOPICS = st.sampled_from(("x", "y"))
STEPS = st.sampled_from((1, 1, 1, 1, 1, 1, 0, 0, -1, 2, 1000, 2**63))  # to the next counter
EPOCHS = st.sampled_from((0, 0, 0, 0, 0, 0, 0, 0, -1, 1))
BODIES = st.sampled_from(((b"",), (b"one",), (b"two",), (b"o", b"ne"), (b"x" * (1 << 20), b"y")))
LASTS = st.sampled_from((0, 0, 0, 1, 1, -1, 5, 2**64 - 1))
NONCES = st.integers(0, 3) | st.just(2**64 - 1)
ENVELOPES = st.sampled_from(((), (b"1",), (b"1", b"two"), (b"\x00" * 255,) * 3))
EXAMPLES, EXAMPLES_SOAKED = 12, 1500

_example = count()


class Conversation(RuleBasedStateMachine):
    bare: Bare  # its own state does not matter: it sends the given frames

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.mark = f"{next(_example)}."

    @initialize()
    def most_have_said_hello_and_read_a_topic(self) -> None:
        for client in (b"a", b"b"):
            self._compare(wire.hello(self._client(client), 9))
            self._counted(wire.SUB, client, "x", 1, 0)

    @rule(client=CLIENTS, nonce=NONCES)
    def hello(self, client: bytes, nonce: int) -> None:
        self._compare(wire.hello(self._client(client), nonce))

    @rule(client=CLIENTS, topic=TOPICS, step=STEPS, epoch=EPOCHS)
    def sub(self, client: bytes, topic: str, step: int, epoch: int) -> None:
        self._counted(wire.SUB, client, topic, step, epoch)

    @rule(client=CLIENTS, topic=st.sampled_from("xyyy"), step=STEPS, epoch=EPOCHS)
    def unsub(self, client: bytes, topic: str, step: int, epoch: int) -> None:
        self._counted(wire.UNSUB, client, topic, step, epoch)

    @rule(client=CLIENTS, topic=TOPICS, step=STEPS, epoch=EPOCHS, body=BODIES)
    def put(self, client: bytes, topic: str, step: int, epoch: int, body: tuple[bytes]) -> None:
        self._counted(wire.PUT, client, topic, step, epoch, *body)

    @rule(client=CLIENTS, topic=TOPICS, epoch=EPOCHS, step=LASTS, junk=st.binary(max_size=9))
    def get(self, client: bytes, topic: str, epoch: int, step: int, junk: bytes) -> None:
        name, given = self._client(client), self._epoch(client, epoch)
        known = self.model.topics.get((self.mark + topic).encode())
        last = known.lasts.get(name, 0) if known else 0
        self._compare(wire.get(name, given, self.mark + topic, (last + step) % 2**64, junk))

    @rule(client=CLIENTS, topic=TOPICS)
    def read_on(self, client: bytes, topic: str) -> None:
        """Get the next message, then the one after it, as an honest client does."""
        name = self._client(client)
        request = wire.get(name, self._epoch(client, 0), self.mark + topic, 0)
        answer = self._compare(request)
        if answer[0] == "MSG":
            request[-1] = wire.number(answer[1])  # type: ignore[arg-type]
            self._compare(request)

    @rule(envelope=ENVELOPES, client=CLIENTS, topic=TOPICS)
    def any_envelope(self, envelope: tuple[bytes, ...], client: bytes, topic: str) -> None:
        """The reply has the same envelope; empty frames after the first belong to the request."""
        request = wire.get(self._client(client), self._epoch(client, 0), self.mark + topic, 0)
        self.bare.send([*envelope, b"", *request])
        reply = self.bare.receive(30.0)
        assert reply is not None, "no answer"
        assert reply[: len(envelope) + 1] == [*envelope, b""]
        assert wire.read_answer(reply[len(envelope) + 1 :]) == self.model.answer(request)

    def _counted(
        self, op: bytes, client: bytes, topic: str, step: int, epoch: int, *body: bytes
    ) -> None:
        name = self._client(client)
        known = self.model.clients.get(name)
        counter = min(max(0, (known.counter if known else 0) + step), 2**64 - 1)
        given = self._epoch(client, epoch)
        self._compare(wire.counted(op, name, given, counter, self.mark + topic, *body))

    def _client(self, client: bytes) -> bytes:
        return self.mark.encode() + client

    def _epoch(self, client: bytes, step: int) -> int:
        known = self.model.clients.get(self._client(client))
        return max(0, (known.epoch if known else 0) + step)

    def _compare(self, request: wire.Frames) -> wire.Answer:
        expected, answer = self.model.answer(request), self.bare.ask(request)
        assert answer == expected, request[1:6]
        return answer


def converse(examples: int, sabotaged: bool) -> None:
    with (
        PirateBus() as bus,
        Bare(bus.endpoint, b"") as bare,
    ):
        Conversation.bare = bare
        # A sabotaged one fails anyway: how short it could be is of no interest.
        phases = [phase for phase in Phase if not sabotaged or phase is not Phase.shrink]
        effort = settings(max_examples=examples, stateful_step_count=40, phases=phases)
        run_state_machine_as_test(Conversation, settings=effort)


@pytest.mark.sabotage("stamps-off", "replies-off", expects=r"assert \('(OK|ERR)', .*\) == \('")
@pytest.mark.sabotage("client-epochs-off", expects=r"== \('ERR', 'FENCED'\)")
def test_bus_answers_as_the_model(sabotaged):
    converse(EXAMPLES, sabotaged)


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_bus_answers_as_the_model_in_a_thousand_runs():
    converse(EXAMPLES_SOAKED, False)
