"""The blocking client and its facade: threads, forks, Ctrl-C, and exit."""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from polybus import rqueue
from polybus.clients import blocking_facade
from polybus.errors import InvalidTopic, NotConnected, UsageError

PATIENCE_S = 30


def program(text: str, address: str) -> subprocess.Popen[str]:
    """Start a Python program that connects to `address`."""
    lines = textwrap.dedent(text)
    return subprocess.Popen(
        [sys.executable, "-c", f"from polybus import rqueue\nADDRESS = {address!r}\n{lines}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until_asleep(pid: int) -> None:
    """Wait until the main thread of the program sleeps."""
    deadline = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        assert time.monotonic() < deadline
        time.sleep(0.005)


def outcome(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


class TestClient:
    def test_blocking_client_publishes_and_reads(self, address, topic):
        with rqueue.blocking.connect(address) as client:
            client.subscribe(topic)
            client.publish(topic, b"one")
            client.publish_many(topic, [b"two", bytes(100_000)])
            got = [message.content for message in islice(client, 3)]
            assert got == [b"one", b"two", bytes(100_000)]
            assert client.is_connected
            assert (client.reconnects, client.lost_messages["expired"]) == (0, 0)

    def test_messages_and_batches_can_be_read_alternately(self, address, topic):
        sent = [b"%d" % number for number in range(500)]
        with rqueue.blocking.connect(address) as client:
            client.subscribe(topic)
            client.publish_many(topic, sent)
            client.flush()
            got = [next(client).content, next(client).content]
            for batch in client.batches():
                got += batch.contents()
                if len(got) == len(sent):
                    break
            assert got == sent
            assert client.next_batch(timeout_s=0.01) is None

    def test_iteration_ends_when_the_client_is_closed(self, address, topic):
        client = rqueue.blocking.connect(address)
        client.open()
        client.subscribe(topic)
        client.publish(topic, b"x")
        client.close()
        assert [message.content for message in client] == [b"x"]
        assert list(client.batches()) == []

    def test_blocking_client_raises_the_errors_of_the_async_client(self, address):
        with pytest.raises(NotConnected):
            rqueue.blocking.connect("tcp://127.0.0.1:1").open()
        with rqueue.blocking.connect(address) as client, pytest.raises(InvalidTopic):
            client.publish("", b"")

    def test_threads_publish_while_another_reads(self, address, topic):
        with rqueue.blocking.connect(address) as client:
            client.subscribe(topic)
            threads = [
                threading.Thread(target=client.publish_many, args=(topic, [b"%d" % n] * 100))
                for n in range(8)
            ]
            for thread in threads:
                thread.start()
            got = [message.content for message in islice(client, 800)]
            for thread in threads:
                thread.join()
            assert sorted(got) == sorted([b"%d" % n for n in range(8)] * 100)

    def test_all_blocking_clients_share_one_thread(self, address):
        with rqueue.blocking.connect(address), rqueue.blocking.connect(address):
            names = [thread.name for thread in threading.enumerate()]
        assert names.count("polybus-blocking") == 1


class TestTwins:
    def test_blocking_methods_have_the_signatures_and_docstrings_of_the_async_ones(self):
        for name in ("publish", "publish_many", "subscribe", "batches", "next_batch", "close"):
            ours, theirs = (
                getattr(rqueue.blocking.BlockingClient, name),
                getattr(rqueue.Client, name),
            )
            assert inspect.signature(ours) == inspect.signature(theirs)
            assert inspect.getdoc(ours) == inspect.getdoc(theirs)
            assert not inspect.iscoroutinefunction(ours)
        assert inspect.signature(rqueue.blocking.connect).parameters == (
            inspect.signature(rqueue.connect).parameters
        )

    def test_facade_must_have_every_member_of_the_async_class(self):
        class Counter:
            async def step(self) -> int:
                return 1

            def steps(self) -> AsyncIterator[int]:
                raise NotImplementedError

            @property
            def total(self) -> int:
                return 2

        with pytest.raises(TypeError, match="leaves out of Counter: steps, total"):

            class Forgetful(blocking_facade.BlockingFacade[Counter], of=Counter):
                step = blocking_facade.blocking_method(Counter.step)

    def test_facade_wraps_any_async_class(self):
        class Counter:
            """Nothing of rqueue in it."""

            def __init__(self, start: int) -> None:
                self.value = start

            async def __aenter__(self) -> Counter:
                self.value += 1
                return self

            async def __aexit__(self, *error: Any) -> None:
                self.value = 0

            async def add(self, more: int = 1) -> int:
                self.value += more
                return self.value

            async def up_to(self, end: int) -> AsyncIterator[int]:
                """Counts."""
                while self.value < end:
                    yield await self.add()

            @property
            def now(self) -> int:
                """Where it is."""
                return self.value

        class BlockingCounter(blocking_facade.BlockingFacade[Counter], of=Counter):
            add = blocking_facade.blocking_method(Counter.add)
            up_to = blocking_facade.blocking_iterator(Counter.up_to)
            now = blocking_facade.blocking_property(Counter.now)

        count = blocking_facade.blocking_connect(Counter, BlockingCounter)
        with count(start=4) as counter:
            assert counter.now == 5
            assert counter.add(more=2) == 7
            assert list(counter.up_to(10)) == [8, 9, 10]
        assert counter.now == 0
        assert BlockingCounter.up_to.__doc__ == "Counts."

    def test_blocking_call_on_the_event_loop_is_rejected(self):
        async def inside() -> None:
            blocking_facade.get_loop_thread().run(inside())

        with pytest.raises(UsageError, match="would deadlock"):
            blocking_facade.get_loop_thread().run(inside())


class TestProcesses:
    def test_ctrl_c_interrupts_a_waiting_read(self, address, topic):
        process = program(
            f"""
            with rqueue.blocking.connect(ADDRESS) as client:
                client.subscribe({topic!r})
                try:
                    print("waiting", flush=True)
                    next(client)
                except KeyboardInterrupt:
                    client.publish({topic!r}, b"still alive")
                    print(next(client).content, flush=True)
            """,
            address,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        wait_until_asleep(process.pid)
        process.send_signal(signal.SIGINT)
        assert outcome(process) == (0, "b'still alive'\n", "")

    def test_program_with_an_unclosed_client_exits(self, address, topic):
        process = program(
            f"""
            import threading
            client = rqueue.blocking.connect(ADDRESS)
            client.open()
            client.subscribe({topic!r})
            # A thread that waits forever, as a daemon: it must not hold the process.
            threading.Thread(target=lambda: list(client), daemon=True).start()
            """,
            address,
        )
        assert outcome(process) == (0, "", "")

    def test_forked_child_must_open_its_own_client(self, address, topic):
        process = program(
            f"""
            import os
            with rqueue.blocking.connect(ADDRESS) as client:
                client.subscribe({topic!r})
                if (pid := os.fork()) == 0:
                    try:
                        client.publish({topic!r}, b"x")
                    except rqueue.UsageError as error:
                        assert "fork" in str(error)
                    with rqueue.blocking.connect(ADDRESS) as own:
                        own.publish({topic!r}, b"from the child")
                    os._exit(7)
                assert next(client).content == b"from the child"
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
                client.publish({topic!r}, b"from the parent")
                assert next(client).content == b"from the parent"
            """.replace("rqueue.UsageError", "__import__('polybus.errors').errors.UsageError"),
            address,
        )
        assert outcome(process) == (0, "", "")

    def test_forked_child_exits(self, address):
        process = program(
            """
            import os, sys
            client = rqueue.blocking.connect(ADDRESS)
            client.open()
            if (pid := os.fork()) == 0:
                sys.exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
            client.close()
            """,
            address,
        )
        assert outcome(process) == (0, "", "")
