"""`polybus topic`, `pub` and `sub`, as one types them, on a real bus."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from polybus.cli import main
from polybus.testing.bus_process import POLYBUS
from tests.rig.native_bus import NativeBus

PATIENCE_S = 60


@pytest.fixture(scope="module")
def bus() -> Iterator[NativeBus]:
    with NativeBus() as running:
        yield running


@pytest.fixture(scope="module")
def env(bus: NativeBus) -> dict[str, str]:
    return bus.process.env | {"POLYBUS_URL": bus.url}


@pytest.fixture
def topic(bus: NativeBus, request: pytest.FixtureRequest) -> str:
    with bus.client() as client:
        client.create_topic(request.node.name, shards=1)
    return str(request.node.name)


@pytest.fixture
def polybus(env: dict[str, str]):
    def call(*args: str, stdin: bytes | Path = b"", code: int = 0) -> subprocess.CompletedProcess:
        with (Path(os.devnull) if isinstance(stdin, bytes) else stdin).open("rb") as file:
            source = {"input": stdin} if isinstance(stdin, bytes) else {"stdin": file}
            done = subprocess.run(
                [*POLYBUS, *args], env=env, capture_output=True, timeout=PATIENCE_S, **source
            )
        assert done.returncode == code, done.stderr
        return done

    return call


def on_terminal(env: dict[str, str], *args: str, typed: bytes = b"", **streams) -> tuple[int, str]:
    """The command with stdin and stderr (and stdout, if not given) on a terminal."""
    master, slave = pty.openpty()
    child = subprocess.Popen(
        [*POLYBUS, *args], env=env | {"TERM": "xterm"}, stdin=streams.pop("stdin", slave),
        stdout=streams.pop("stdout", slave), stderr=slave,
    )  # fmt: skip
    os.close(slave)
    if typed:
        os.write(master, typed)
    shown = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # the child has gone
            break
        if not piece:
            break
        shown += piece
    os.close(master)
    return child.wait(PATIENCE_S), shown.decode(errors="replace")


def test_published_lines_are_printed(polybus, topic, tmp_path):
    lines = b"".join(b"line %d\n" % n for n in range(200_000)) + b"\nthe last has no end"
    source = tmp_path / "lines"
    source.write_bytes(lines)
    done = polybus("pub", topic, stdin=source)
    assert done.stdout == b""
    assert done.stderr.startswith(b"200002 messages, 2.1 MB, ")
    assert polybus("sub", topic, "-o", "earliest", "-e").stdout == lines + b"\n"


def test_arguments_are_messages(polybus, topic):
    polybus("pub", topic, "one", "two words", "", "--key", "k")
    shown = polybus("sub", topic, "-o", "earliest", "-n", "3", "-f", "%i %k %s|").stdout
    assert shown == b"1 k one|2 k two words|3 k |"


def test_whole_input_is_one_message(polybus, topic):
    polybus("pub", topic, "--whole", "-q", stdin=b"a\nb\n\xff")
    line = json.loads(polybus("sub", topic, "-o", "1", "-n", "1", "--json").stdout)
    assert line["body_base64"] == "YQpiCv8="


def test_lines_have_keys(polybus, topic):
    polybus("pub", topic, "--key-sep", ":", stdin=b"a:1\nplain\n:2\nb:x:y\n")
    shown = polybus("sub", topic, "-o", "earliest", "-e", "-f", "<%k>%s\n").stdout
    assert shown.decode().split() == ["<a>1", "<>plain", "<>2", "<b>x:y"]


def test_empty_input_publishes_nothing(polybus, topic):
    assert polybus("pub", topic).stderr.startswith(b"0 messages, 0 B")
    assert polybus("sub", topic, "-o", "earliest", "-e").stdout == b""


def test_start_positions(polybus, bus, topic):
    polybus("pub", topic, "1", "2")
    with bus.client() as client:
        client.trim(topic, {0: 1})
        came_ms = client.bounds(topic)["timestamp_ns"] // 1_000_000
    for place, found in [
        ("earliest", b"2\n"),
        ("1", b"2\n"),
        ("2", b"2\n"),
        ("3", b""),
        ("latest", b""),
        (f"@{came_ms}", b"2\n"),
        ("@2020-01-01T00:00Z", b"2\n"),
        ("@2100-01-01", b""),
    ]:
        assert polybus("sub", topic, "-o", place, "-e").stdout == found, place


def test_interrupted_follower_ends_without_an_error(polybus, env, topic):
    """Ctrl-C ends it. Until then it shows each message as it arrives."""
    polybus("pub", topic, "first")
    child = subprocess.Popen(
        [*POLYBUS, "sub", topic, "-o", "earliest"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"first\n"
        polybus("pub", topic, "second")
        assert child.stdout.readline() == b"second\n"
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=PATIENCE_S) == (b"", b"")
    assert child.returncode == 130


def test_closed_pipe_is_not_an_error(polybus, env, topic):
    polybus("pub", topic, stdin=b"x" * 99 + b"\n" + b"line\n" * 200_000)
    child = subprocess.Popen(
        [*POLYBUS, "sub", topic, "-o", "earliest"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == b"x" * 99 + b"\n"
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(PATIENCE_S) == 1


def test_follower_and_publisher_survive_a_restart(env):
    with NativeBus() as bus:
        env = bus.process.env | {"POLYBUS_URL": bus.url}
        with bus.client() as client:
            client.create_topic("t", shards=1)
        reader = subprocess.Popen(
            [*POLYBUS, "sub", "t", "-o", "earliest", "-n", "3"], env=env, stdout=subprocess.PIPE
        )
        writer = subprocess.Popen(
            [*POLYBUS, "pub", "t"], env=env, stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )
        with reader, writer:
            assert reader.stdout is not None
            assert writer.stdin is not None
            writer.stdin.write(b"before\n")
            writer.stdin.flush()
            assert reader.stdout.readline() == b"before\n"
            bus.kill()
            writer.stdin.write(b"meanwhile\n")
            writer.stdin.flush()
            bus.start()
            _, said = writer.communicate(b"after\n", timeout=PATIENCE_S)
            assert b"3 messages" in said
            assert reader.communicate(timeout=PATIENCE_S)[0] == b"meanwhile\nafter\n"
            assert (writer.returncode, reader.returncode) == (0, 0)


def test_topic_is_created_listed_and_removed(polybus, bus):
    polybus("topic", "create", "made.a", "--shards", "2", "--keep", "all", "--max-bytes", "1000")
    polybus("topic", "create", "made.b")
    listed = polybus("topic", "ls", "made.*").stdout.decode().splitlines()
    assert listed[0].split() == ["topic", "shards", "creator", "keep", "max_bytes", "paused"]
    assert listed[1].split()[:2] == ["made.a", "2"]
    assert listed[1].split()[3:] == ["all", "1000", "-"]
    listed = json.loads(polybus("topic", "ls", "made.*", "--json").stdout)
    assert [one["topic"] for one in listed] == ["made.a", "made.b"]
    assert json.loads(polybus("topic", "info", "made.a", "--json").stdout)["next_id"] == 1
    assert b"next_id" in polybus("topic", "info", "made.a").stdout
    polybus("topic", "rm", "made.a")
    polybus("topic", "rm", "made.b", "--yes")
    assert json.loads(polybus("topic", "ls", "made.*", "--json").stdout) == []


def test_stats_count_and_trim_removes(polybus, topic):
    polybus("pub", topic, "1", "2", "3")
    (found,) = json.loads(polybus("topic", "stats", topic, "--json").stdout)
    assert (found["all"]["inserted"], found["all"]["trimmed"]) == (3, 0)
    shown = polybus("topic", "stats", topic).stdout.decode().splitlines()
    assert shown[1].split()[:5] == [topic, "1", "3", "3", "0"]
    assert shown[2].split()[:5] == ["shard", "0", "3", "3", "0"]
    assert polybus("topic", "trim", topic, "0:2").stdout == b"2 messages removed\n"
    assert polybus("topic", "trim", topic, "@2020-01-01").stdout == b"0 messages removed\n"
    assert polybus("topic", "trim", topic, "latest").stdout == b"1 messages removed\n"


def test_watched_stats_repeat(env, topic):
    child = subprocess.Popen(
        [*POLYBUS, "topic", "stats", topic, "--watch", "--json"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with child:
        assert child.stdout is not None
        assert json.loads(child.stdout.readline())[0]["topic"] == topic
        assert json.loads(child.stdout.readline())[0]["topic"] == topic
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=PATIENCE_S)[1] == b""
    assert child.returncode == 130


def test_rm_asks_on_a_terminal(env, bus, topic):
    code, shown = on_terminal(env, "topic", "rm", topic, typed=b"n\n")
    assert code == 130
    assert f"Remove {topic} and its 0 messages?" in shown
    code, _ = on_terminal(env, "topic", "rm", topic, typed=b"y\n")
    assert code == 0
    with bus.client() as client:
        assert client.topics(topic) == []


def test_long_commands_show_progress_on_a_terminal(env, topic, tmp_path):
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"0123456789abcdef\n" * 300_000)
    with source.open("rb") as stdin:
        code, shown = on_terminal(env, "pub", topic, stdin=stdin)
    assert code == 0
    assert "publishing" in shown
    assert "300000 messages" in shown
    with target.open("wb") as stdout:
        code, shown = on_terminal(env, "sub", topic, "-o", "earliest", "-e", stdout=stdout)
    assert code == 0
    assert "reading" in shown
    assert target.read_bytes() == source.read_bytes()


@pytest.mark.parametrize(
    ("code", "says", "args"),
    [
        (4, "no durable topic 'missing'", ["sub", "missing"]),
        (4, "no durable topic 'missing'", ["topic", "info", "missing"]),
        (4, "no durable topic 'missing'", ["topic", "rm", "missing"]),
        (4, "no durable topic 'missing'", ["topic", "stats", "missing"]),
        (2, "starts with '_'", ["topic", "create", "_hidden"]),
        (2, "starts with '_'", ["pub", "_hidden", "x", "-q"]),
        (2, "keep must be one of", ["topic", "create", "odd", "--keep", "some"]),
        (2, "invalid start position", ["sub", "any", "-o", "yesterday"]),
        (2, "invalid %q in a format", ["sub", "any", "-f", "%q"]),
        (2, "exclude each other", ["sub", "any", "-f", "%s", "--json"]),
        (2, "exclude each other", ["pub", "any", "--key", "a", "--key-sep", ":"]),
        (2, "remove the MESSAGE arguments", ["pub", "any", "x", "--whole"]),
        (2, "at least one character", ["pub", "any", "--key-sep", ""]),
        (2, "BEFORE must be", ["topic", "trim", "any", "soon"]),
        (2, "invalid bus URL", ["topic", "ls", "--bus", "somewhere"]),
        (
            2,
            "the query must name files",
            ["topic", "ls", "--bus", "polybus://127.0.0.1:1?colour=red"],
        ),
        (3, "no bus answers", ["topic", "ls", "--bus", "polybus://127.0.0.1:1"]),
        (3, "no bus answers", ["pub", "any", "x", "--bus", "polybus://127.0.0.1:1"]),
        (3, "no bus answers", ["sub", "any", "--bus", "polybus://127.0.0.1:1"]),
    ],
)
def test_usage_error_is_one_line(bus, monkeypatch, capsys, code, says, args):
    monkeypatch.setenv("POLYBUS_URL", bus.url)
    assert main.run(args) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("polybus: ")
    assert says in err
    assert err.count("\n") == 1


def test_refusal_reports_the_number_of_stored_messages(polybus, bus):
    with bus.client() as client:
        client.create_topic("small", shards=1, settings={"max_bytes": 2_000_000})
    done = polybus("pub", "small", stdin=b"x" * 99 + b"\n" + b"y" * 1000 + b"\n" * 3000, code=0)
    assert done.stderr.startswith(b"3001 messages")
    done = polybus("pub", "small", stdin=(b"z" * 99 + b"\n") * 60_000, code=4)
    summary, error = done.stderr.decode().splitlines()
    assert error.startswith("polybus: topic small holds ")
    stored = int(summary.split()[0])
    with bus.client() as client:
        assert client.topic_stats("small")["all"]["inserted"] == 3001 + stored
