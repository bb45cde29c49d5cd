"""The blocking client: the API of the async client, without `await`."""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys
import textwrap
import threading
from itertools import islice
from pathlib import Path

import pytest

from polybus import freud
from polybus.errors import DoesNotExist, TopicDeleted

PATIENCE_S = 40


def test_blocking_client_creates_subscribes_produces_and_reads(address, topic):
    with freud.blocking.connect(address) as client:
        assert client.create_topic(topic)
        with client.subscribe(topic) as news:
            assert (news.topic, len(news.id), client.count_subscribers(topic)) == (topic, 16, 1)
            assert client.produce(topic, b"hello") == 0
            assert client.produce_many(topic, [b"%d" % n for n in range(1000)])[-1] == 1000
            first = news.get()
            assert first is not None
            assert first.body == b"hello"
            assert [record.body for record in news.get_many(2, timeout_s=0)] == [b"0", b"1"]
            assert [record.message_id for record in islice(news, 998)] == list(range(3, 1001))
            assert news.get(timeout_s=0) is None
            client.delete_topic(topic)
            assert list(news) == []
            assert news.notice is not None
            with pytest.raises(TopicDeleted):
                news.get()
        assert topic not in client.list_topics()
        with pytest.raises(DoesNotExist):
            client.subscribe(topic)
    assert not client.is_connected


def test_one_thread_reads_while_other_threads_produce(address, topic):
    with freud.blocking.connect(address) as client:
        client.create_topic(topic)
        with client.subscribe(topic) as news:
            threads = [
                threading.Thread(target=client.produce_many, args=(topic, [b"%d" % n] * 100))
                for n in range(8)
            ]
            for thread in threads:
                thread.start()
            got = [record.body for record in islice(news, 800)]
            for thread in threads:
                thread.join()
            assert sorted(got) == sorted([b"%d" % n for n in range(8)] * 100)


def test_leaving_the_with_block_unsubscribes(address, topic):
    with freud.blocking.connect(address) as client:
        client.create_topic(topic)
        with pytest.raises(ZeroDivisionError), client.subscribe(topic):
            _ = 1 / 0
        assert client.count_subscribers(topic) == 0


@pytest.mark.parametrize("name", ["subscribe", "produce", "produce_many", "create_topic", "close"])
def test_blocking_methods_have_the_docstrings_and_parameters_of_the_async_ones(name):
    ours, theirs = getattr(freud.blocking.BlockingClient, name), getattr(freud.Client, name)
    assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters
    assert inspect.getdoc(ours) == inspect.getdoc(theirs)
    assert not inspect.iscoroutinefunction(ours)


def test_subscribe_is_annotated_with_the_blocking_subscription():
    signature = inspect.signature(freud.blocking.BlockingClient.subscribe)
    assert signature.return_annotation is freud.blocking.BlockingSubscription


def test_ctrl_c_interrupts_a_waiting_read_without_losing_a_message(address, topic):
    program = f"""
        import sys
        from polybus import freud
        with freud.blocking.connect({address!r}) as client:
            client.create_topic({topic!r})
            with client.subscribe({topic!r}) as news:
                try:
                    print("waiting", flush=True)
                    next(news)
                except KeyboardInterrupt:
                    client.produce({topic!r}, b"still alive")
                    print(next(news).body, flush=True)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        with freud.blocking.connect(address) as client:
            wait_for_a_waiting_get(client, process.pid)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, out, err) == (0, "b'still alive'\n", "")


def wait_for_a_waiting_get(client: freud.blocking.BlockingClient, pid: int) -> None:
    """Wait until all threads of the process sleep, twice in a row with a round trip in between."""
    asleep = 0
    while asleep < 2:
        client.list_topics()
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks]
        asleep = asleep + 1 if set(states) == {"S"} else 0
