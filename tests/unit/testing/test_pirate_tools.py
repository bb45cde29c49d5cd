"""The tools that judge pirate, tried on the model: an honest one passes, and no other."""

from __future__ import annotations

import pytest

from tests.rig.pirate import wire
from tests.rig.pirate.lossy_proxy import KINDS, Odds
from tests.rig.pirate.lossy_round import LossyRound
from tests.rig.pirate.model import Model, Refused
from tests.rig.pirate.model_server import ModelServer
from tests.rig.pirate.zmq_client import Bare

SEED = 20
STEPS = 20
QUICK = Odds(most_delay_s=0.06, most_held_s=0.06, most_stall_s=0.04, cut=0.01, stalled=0.01)


def quick(endpoint: str, name: str) -> Bare:
    return Bare.introduced(endpoint, name, try_s=0.04)


class RepeatsAreDone(Model):
    """A model that executes repeated requests again, as with stamps off."""

    def _once(self, client, counter, request, name):
        return self._do(name, counter, *request)


class RepliesAreLost(Model):
    def _once(self, client, counter, request, name):
        if counter == client.counter:
            raise Refused("STALE")
        return super()._once(client, counter, request, name)


class SendingIsReading(Model):
    """A message counts as read as soon as it was sent."""

    def _get(self, name, topic, last):
        answer = super()._get(name, topic, last)
        if answer[0] == "MSG":
            self.topics[topic].lasts[name] = int(answer[1])  # type: ignore[call-overload]
        return answer


class SubMovesTheCursor(Model):
    def _subscribe(self, name, topic):
        last = super()._subscribe(name, topic)
        self.topics[topic].lasts[name] = max(last, self.topics[topic].newest)
        return self.topics[topic].lasts[name]


class AnswersBeforeItIsDone(Model):
    """Every tenth PUT is answered, and not kept."""

    def _do(self, name, counter, op, topic, body):
        if op == wire.PUT and counter % 10 == 0:
            return ("OK", counter, self.topics[topic].newest + 1) if topic in self.topics else ()
        return super()._do(name, counter, op, topic, body)


def run_lossy_round(model, tmp_path) -> list[str]:
    with (
        ModelServer(model) as server,
        LossyRound(tmp_path, server.endpoint, SEED, quick, odds=QUICK) as one,
    ):
        one.run(STEPS)
        one.finish()
        return one.anomalies()


def test_an_honest_server_passes_and_all_harm_is_done(tmp_path):
    assert run_lossy_round(Model(), tmp_path) == []


@pytest.mark.parametrize(
    ("model", "sign"),
    [
        (RepeatsAreDone, "doubled"),
        (RepliesAreLost, "received STALE"),
        (SendingIsReading, "a gap"),
        (SubMovesTheCursor, "moved"),
        (AnswersBeforeItIsDone, "; it is"),
    ],
)
def test_one_that_does_wrong_is_found_out(model, sign, tmp_path):
    assert any(sign in anomaly for anomaly in run_lossy_round(model(), tmp_path))


def test_harm_that_was_not_done_is_an_anomaly(tmp_path):
    with (
        ModelServer() as server,
        LossyRound(tmp_path, server.endpoint, SEED, quick, odds=QUICK) as one,
    ):
        one.proxy.calm()
        one.run(1, most_steps=1)
        one.finish()
        assert one.anomalies() == [f"nothing was {kind}" for kind in KINDS]
