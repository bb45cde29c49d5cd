"""`polybus freud`: its output, and exit codes that follow the answer codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from polybus import freud
from polybus.cli import main
from polybus.dialects.freud import cli, codec
from polybus.testing.bus_process import POLYBUS, BusProcess
from tests.rig.second_user import User
from tests.unit.freud.conftest import running

PATIENCE_S = 40


@pytest.fixture
def polybus(address, capsys, topic):
    """Runs a command in this process; (exit code, stdout, stderr)."""

    def polybus(*args: str) -> tuple[int, str, str]:
        code = main.run(["freud", *args, "--socket", address])
        out, err = capsys.readouterr()
        return code, out, err

    return polybus


@pytest.fixture
def client(address) -> Iterator[freud.blocking.BlockingClient]:
    with freud.blocking.connect(address) as one:
        yield one


@contextmanager
def subscriber(bus: BusProcess, topic: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """`polybus freud subscribe`, subscribed."""
    command = [*POLYBUS, "freud", "subscribe", topic, "--socket", bus.address("freud").path, *args]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == f"polybus: subscribed to {topic!r}\n"
        yield process
        process.kill()


def end(process: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out.splitlines(), err


class TestTopics:
    def test_create_list_count_delete(self, polybus, topic):
        assert polybus("topic", "create", topic) == (0, f"created {topic}\n", "")
        assert topic in polybus("topic", "ls")[1].splitlines()
        assert topic in json.loads(polybus("topic", "ls", "--json")[1])
        assert polybus("subcount", topic) == (0, "0\n", "")
        assert polybus("topic", "delete", topic) == (0, f"deleted {topic}\n", "")
        assert topic not in polybus("topic", "ls")[1].splitlines()

    def test_repeated_create_or_delete_exits_11(self, polybus, topic):
        polybus("topic", "create", topic)
        code, out, err = polybus("topic", "create", topic)
        assert (code, out) == (11, "")
        assert err == f"polybus: nothing happened: topic {topic!r} already exists\n"
        polybus("topic", "delete", topic)
        assert polybus("topic", "delete", topic)[0] == 11

    @pytest.mark.parametrize("command", [("subcount",), ("subscribe",), ("topic", "publish")])
    def test_missing_topic_exits_13(self, polybus, topic, command):
        body = ("x",) if command[-1] == "publish" else ()
        code, out, err = polybus(*command, topic, *body)
        assert (code, out) == (13, "")
        assert err.startswith("polybus: cannot ")
        assert err.endswith("it does not exist\n")

    @pytest.mark.parametrize("args", [("topic", "create", "a,b"), ("topic", "frob"), ("subcount",)])
    def test_usage_errors_exit_2(self, polybus, args):
        code, out, err = polybus(*args)
        assert (code, out, err.count("\n")) == (2, "", 1)

    def test_missing_bus_exits_3(self, capsys, tmp_path):
        assert main.run(["freud", "topic", "ls", "--socket", f"{tmp_path}/none"]) == 3
        assert "no bus answers" in capsys.readouterr().err

    def test_help_of_every_command_lists_the_exit_codes(self, capsys):
        for words in (
            [],
            ["topic"],
            ["topic", "publish"],
            ["subscribe"],
            ["subcount"],
            ["subscription"],
        ):
            assert main.run(["freud", *words, "--help"]) == 0
            shown = capsys.readouterr().out
            for code in codec.Code:
                number = code + 10 if code else 0
                assert f"\n    {number:<3} {code.label}" in shown

    def test_exit_codes_are_the_answer_codes_plus_10(self):
        assert cli.NOTHING_HAPPENED == 10 + codec.Code.NOTHING_HAPPENED
        said = {code for _, code in cli.EXIT_CODE_BY_ERROR} - {None}
        assert said == {10 + code for code in codec.Code if code > 1}


class TestSubscriptions:
    def test_create_read_list_and_remove_are_one_shot(self, bus, polybus, client, topic, capsys):
        def admin(*args: str) -> tuple[int, str, str]:
            path = str(bus.admin_path)
            code = main.run(["freud", "subscription", *args, "--admin", path])
            return code, *capsys.readouterr()

        client.create_topic(topic)
        code, out, _ = polybus("subscription", "create", topic)
        key = out.strip()
        assert (code, len(key)) == (0, 32)
        assert polybus("subscription", "read", key)[0] == 11
        client.produce_many(topic, [b"1", b"2", b"3"])
        assert polybus("subscription", "read", key, "-n", "1") == (0, "1\n", "")
        (row,) = (one for one in json.loads(admin("ls", "--json")[1]) if one["id"] == key)
        assert (row["topic"], row["unread_messages"], row["unread_bytes"]) == (topic, 2, 2)
        assert key in admin("ls")[1]
        code, out, _ = polybus("subscription", "read", key, "--json", "--wait", "1")
        lines = [json.loads(line) for line in out.splitlines()]
        assert [(line["id"], line["body"]) for line in lines] == [(1, "2"), (2, "3")]
        assert all(line["timestamp_ns"] > 0 for line in lines)
        client.produce(topic, b"4")
        assert admin("rm", key) == (0, f"removed {key}, 1 unread messages\n", "")
        assert admin("rm", key)[0] == 13
        assert polybus("subscription", "read", key)[0] == 13
        assert admin("rm", "zz")[0] == 2
        assert client.count_subscribers(topic) == 0

    def test_read_of_a_deleted_topic_prints_the_notice(self, polybus, client, topic):
        client.create_topic(topic)
        key = polybus("subscription", "create", topic)[1].strip()
        client.produce(topic, b"last")
        client.delete_topic(topic)
        code, out, err = polybus("subscription", "read", key, "--json")
        assert (code, err) == (0, f"polybus: topic {topic!r} was deleted\n")
        last, notice = (json.loads(line) for line in out.splitlines())
        assert (last["body"], notice["deleted"]) == ("last", topic)
        assert polybus("subscription", "read", key)[0] == 13


class TestPublish:
    def test_publish_sends_its_argument_and_prints_the_message_id(self, polybus, client, topic):
        client.create_topic(topic)
        with client.subscribe(topic) as reader:
            for number, text in enumerate(["hello", "", "grüße", "a\nb"]):
                assert polybus("topic", "publish", topic, text) == (0, f"{number}\n", "")
            got = [record.body.decode() for record in reader.get_many(9)]
            assert got == ["hello", "", "grüße", "a\nb"]

    def test_publish_without_a_subscriber_exits_11(self, polybus, client, topic):
        client.create_topic(topic)
        code, out, err = polybus("topic", "publish", topic, "x")
        assert (code, out) == (11, "")
        assert err == f"polybus: nothing happened: topic {topic!r} has no subscriber\n"

    def test_body_that_looks_like_a_notice_is_a_message(self, bus, client, topic):
        client.create_topic(topic)
        with client.subscribe(topic) as reader:
            assert publish(bus, topic, "-", stdin=codec.deletion_notice(b"x")).returncode == 0
            record = reader.get()
            assert record is not None
            assert (record.body, record.is_notice) == (codec.deletion_notice(b"x"), False)

    def test_publish_reads_stdin_as_one_message_or_by_lines(self, bus, client, topic):
        client.create_topic(topic)
        with client.subscribe(topic) as reader:
            whole = b"two\nlines \xff\n"
            done = publish(bus, topic, "-", stdin=whole)
            assert (done.returncode, done.stdout, done.stderr) == (0, b"0\n", b"")
            lines = b"".join(b"%d\n" % n for n in range(50_000))
            done = publish(bus, topic, "--lines", stdin=lines + b"\nlast")
            assert (done.returncode, done.stdout, done.stderr) == (0, b"published 50002\n", b"")
            got = [next(reader).body for _ in range(50_003)]
            assert got == [whole, *(b"%d" % n for n in range(50_000)), b"", b"last"]
        done = publish(bus, topic, "--lines", stdin=b"a\nb\n")
        assert (done.returncode, done.stdout) == (11, b"published 0\n")

    def test_publish_lines_sends_each_line_at_once(self, bus, client, topic):
        client.create_topic(topic)
        command = [*POLYBUS, "freud", "topic", "publish", topic, "--lines"]
        command += ["--socket", bus.address("freud").path]
        with (
            client.subscribe(topic) as reader,
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
        ):
            assert process.stdin is not None
            for line in (b"one", b"two"):
                process.stdin.write(line + b"\n")
                process.stdin.flush()
                assert next(reader).body == line
            client.delete_topic(topic)
            process.stdin.write(b"three\n")
            out, _ = process.communicate(timeout=PATIENCE_S)
            assert (process.returncode, out) == (13, b"published at least 2\n")

    @pytest.mark.parametrize("args", [(), ("x", "--lines"), ("-", "--lines")])
    def test_publish_requires_either_a_message_or_lines(self, polybus, topic, args):
        assert polybus("topic", "publish", topic, *args)[0] == 2


def publish(
    bus: BusProcess, topic: str, *args: str, stdin: bytes
) -> subprocess.CompletedProcess[bytes]:
    command = [*POLYBUS, "freud", "topic", "publish", topic, *args]
    return subprocess.run(
        [*command, "--socket", bus.address("freud").path],
        input=stdin,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )


class TestSubscribe:
    def test_subscribers_get_messages_deletion_notices_and_a_recreated_topic(
        self, bus, polybus, topic
    ):
        """Create, subscribe, publish, delete and recreate a topic with the command line."""
        polybus("topic", "create", topic)
        with subscriber(bus, topic) as plain, subscriber(bus, topic, "--json") as as_json:
            assert polybus("subcount", topic) == (0, "2\n", "")
            assert plain.stdout is not None
            polybus("topic", "publish", topic, "hello")
            assert plain.stdout.readline() == "hello\n"  # at once, also into a pipe
            as_json.send_signal(signal.SIGSTOP)
            polybus("topic", "publish", topic, "while one is stopped")
            polybus("topic", "publish", topic, "x")
            assert polybus("topic", "delete", topic)[0] == 0
            assert polybus("topic", "delete", topic)[0] == 11
            assert polybus("topic", "create", topic)[0] == 0
            assert polybus("topic", "publish", topic, "for the next")[1] == "0\n"
            assert end(plain) == (
                0,
                ["while one is stopped", "x"],
                f"polybus: topic {topic!r} was deleted\n",
            )
            as_json.send_signal(signal.SIGCONT)
            code, out, err = end(as_json)
            records = [json.loads(line) for line in out]
            assert (code, err) == (0, f"polybus: topic {topic!r} was deleted\n")
            assert [one["id"] for one in records] == [0, 1, 2, 3]
            assert [one.get("body") for one in records[:2]] == ["hello", "while one is stopped"]
            assert records[3] == {"id": 3, "deleted": topic} | {
                "timestamp_ns": records[3]["timestamp_ns"]
            }
        with subscriber(bus, topic, "-n", "1") as next_one:
            assert end(next_one) == (0, ["for the next"], "")

    def test_subscribe_ends_after_count_messages(self, bus, client, topic):
        client.create_topic(topic)
        with subscriber(bus, topic, "-n", "3", "--json") as process:
            client.produce_many(topic, [b"a", b"\xff", "ü".encode(), b"unread"])
            code, out, err = end(process)
        assert (code, err) == (0, "")
        shown = [{k: v for k, v in json.loads(line).items() if "body" in k} for line in out]
        assert shown == [{"body": "a"}, {"body_base64": "/w=="}, {"body": "ü"}]
        assert client.count_subscribers(topic) == 0

    def test_topic_deleted_before_the_count_exits_13(self, bus, client, topic):
        client.create_topic(topic)
        with subscriber(bus, topic, "--count", "3") as process:
            client.produce(topic, b"a")
            client.delete_topic(topic)
            assert end(process) == (13, ["a"], f"polybus: topic {topic!r} was deleted\n")

    @pytest.mark.parametrize(
        ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)]
    )
    def test_signal_ends_subscribe_and_unsubscribes(self, bus, client, topic, number, code):
        client.create_topic(topic)
        with subscriber(bus, topic) as process:
            process.send_signal(number)
            assert end(process) == (code, [], "")
        assert client.count_subscribers(topic) == 0

    def test_subscribe_exits_3_when_the_bus_stops(self):
        with running() as bus:
            assert bus.run("freud", "topic", "create", "t", "--socket", path(bus)).returncode == 0
            with subscriber(bus, "t") as process:
                bus.stop()
                code, out, err = end(process)
        assert (code, out, err.count("\n")) == (3, [], 1)
        assert "closed the connection" in err

    def test_subscribe_ends_without_an_error_text_when_its_output_is_closed(
        self, bus, client, topic
    ):
        client.create_topic(topic)
        with subscriber(bus, topic) as process:
            assert process.stdout is not None
            process.stdout.close()
            while process.poll() is None:
                client.produce_many(topic, [bytes(1000)] * 100)
            assert process.stderr is not None
            assert (process.returncode, process.stderr.read()) == (1, "")


def path(bus: BusProcess) -> str:
    return bus.address("freud").path


@pytest.fixture(scope="module")
def open_bus() -> Iterator[BusProcess]:
    with running(acl="allow user:4242 produce,subscribe private.*") as bus:
        bus.folder.chmod(0o755)
        yield bus


@pytest.mark.skipif(os.getuid() != 0, reason="only root can change its uid")
class TestTwoUsers:
    """A bus of root accepts every user; its policy allows or denies requests."""

    def test_policy_allows_one_user_and_denies_another(self, open_bus):
        socket = ("--socket", path(open_bus))
        with User(4242) as alice, User(4343) as bob:
            assert alice.polybus("freud", "topic", "create", "private.a", *socket).code == 0
            assert alice.polybus("freud", "topic", "publish", "private.a", "x", *socket).code == 11
            for command in (("topic", "publish", "private.a", "x"), ("subscribe", "private.a")):
                refused = bob.polybus("freud", *command, *socket)
                assert (refused.code, refused.stdout) == (12, "")
                assert "not allowed to" in refused.stderr
            told = open_bus.run("acl", "test", "user:4343", "produce", "private.a")
            assert (told.returncode, told.stdout.split(":")[0]) == (4, "denied")
            assert "allow user:4242 produce,subscribe private.*" in told.stdout
            assert bob.polybus("freud", "topic", "delete", "private.a", *socket).code == 12
            assert "private.a" not in bob.polybus("freud", "topic", "ls", *socket).stdout
            assert alice.polybus("freud", "topic", "delete", "private.a", *socket).code == 0

    def test_socket_without_permission_exits_4(self, open_bus):
        Path(path(open_bus)).chmod(0o600)
        with User(4343) as bob:
            refused = bob.polybus("freud", "topic", "ls", "--socket", path(open_bus))
            assert (refused.code, refused.stdout) == (4, "")
            assert "denied for this user" in refused.stderr
