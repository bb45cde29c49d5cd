"""Two threads that talk over the bus, without asyncio.

python examples/rqueue_blocking.py [tcp://127.0.0.1:6567]
"""

import sys
import threading

from polybus import rqueue

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:6567"


def square(ready: threading.Event) -> None:
    """Answers each number on `numbers` with its square on `squares`."""
    with rqueue.blocking.connect(ADDRESS) as client:
        client.subscribe("numbers")
        ready.set()
        for message in client:
            if message.content == b"stop":
                return
            client.publish("squares", b"%d" % (int(message.content) ** 2))


def main() -> None:
    ready = threading.Event()
    worker = threading.Thread(target=square, args=(ready,))
    worker.start()
    ready.wait()
    with rqueue.blocking.connect(ADDRESS) as client:
        client.subscribe("squares")
        for number in range(5):
            client.publish("numbers", b"%d" % number)
            print(number, "squared is", next(client).content.decode())
        client.publish("numbers", b"stop")
    worker.join()


if __name__ == "__main__":
    main()
