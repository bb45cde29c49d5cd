"""The Python side of the recorded conversations with the deployed bus's Rust client.

The recorded program calls these services, serves `public/rust`, and broadcasts on `news`:

    python            returns its data
    python-fail       fails with 404
    python-count      streams numbers
    python-push       is called without a reply
    python-callback   calls back the service that its data names: Get, Stream and Fail
    news              a broadcast of "rust" is answered by one of "python"
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from polybus import gsb


@contextmanager
def partner(address: str) -> Iterator[list[Any]]:
    """Serve during a `with`. Yields the data of pushes."""
    pushed: list[Any] = []
    with gsb.blocking.connect(address) as client, gsb.blocking.connect(address) as caller:

        @client.service("python")
        def echo(call: gsb.Call) -> object:
            return call.data

        @client.service("python-fail")
        def fail(call: gsb.Call) -> object:
            raise gsb.ServiceFailed("no such item", 404)

        @client.service("python-count")
        def count(call: gsb.Call) -> object:
            yield from range(call.data)

        @client.service("python-push")
        def push(call: gsb.Call) -> object:
            pushed.append(call.data)
            return None

        @client.service("python-callback")
        def call_back(call: gsb.Call) -> object:
            name = call.data
            answers = [caller.call(f"{name}/Get", [1, 2]), list(caller.stream(f"{name}/Stream"))]
            try:
                caller.call(f"{name}/Fail")
            except gsb.ServiceFailed as error:
                answers.append(str(error))
            return answers

        with client.subscribe("news") as news:

            def answer() -> None:
                for message in news:
                    if message.data == "rust":
                        caller.broadcast("news", "python")

            thread = threading.Thread(target=answer)
            thread.start()
            yield pushed
        thread.join()
