"""`polybus fdq consume` on a running bus."""

import json
import signal
import subprocess

import pytest

from polybus import fdq
from polybus.testing.bus_process import POLYBUS
from tests.rig.native_bus import NativeBus
from tests.rig.observer import until

PATIENCE_S = 60


@pytest.fixture(scope="module")
def bus():
    with NativeBus() as running:
        yield running


@pytest.fixture
def env(bus):
    return bus.process.env | {"POLYBUS_URL": bus.url}


@pytest.fixture
def topic(bus, request):
    name = str(request.node.name)
    with fdq.Producer(bus.url) as producer:
        producer.produce_batch(name, [fdq.MessageRequest("k", b"%d" % n) for n in range(10)])
    return name


def consume(env, *args, code=0):
    done = subprocess.run(
        [*POLYBUS, "fdq", "consume", *args], env=env, capture_output=True, timeout=PATIENCE_S
    )
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def acked(bus, topic):
    return fdq.stats(bus.url, topic)["all"]["acked"]


def test_exit_prints_each_message_once_per_group(bus, env, topic):
    assert consume(env, topic, "-e") == b"".join(b"%d\n" % n for n in range(10))
    assert acked(bus, topic) == 10
    assert consume(env, topic, "-e") == b""
    lines = consume(env, topic, "-e", "--group", "audit", "--json").splitlines()
    assert [json.loads(line)["body"] for line in lines] == [str(n) for n in range(10)]


def test_count_is_exact_and_leaves_the_rest(bus, env, topic):
    assert consume(env, topic, "-n", "3", "-f", "%o %k %s\\n") == b"0 k 0\n1 k 1\n2 k 2\n"
    assert acked(bus, topic) == 3
    assert consume(env, topic, "-n", "1") == b"3\n"


def test_sigterm_leaves_the_group(bus, env, topic):
    child = subprocess.Popen(
        [*POLYBUS, "fdq", "consume", topic, "--name", "one"], env=env, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"0\n"
    until(lambda: acked(bus, topic) == 10, "all is acked")
    child.send_signal(signal.SIGTERM)
    assert child.wait(PATIENCE_S) == 128 + signal.SIGTERM
    child.stdout.close()
    groups = fdq.stats(bus.url, topic)["groups"]
    assert [one["members"] for one in groups] == [[]]


def test_errors_are_one_line(env, topic):
    assert b"exclude" in consume(env, topic, "--json", "-f", "%s", code=2)
    assert b"no-such" in consume(env, "no-such", code=4)
    assert b"start" in consume(env, topic, "--start", "middle", code=2)
