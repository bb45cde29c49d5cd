"""Two threads that talk over ephemeral topics, without asyncio.

python examples/freud_blocking.py [unix:/run/polybus/freud.sock]
"""

import sys
import threading

from polybus import freud

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else None


def square(ready: threading.Event) -> None:
    """Answers each number with its square, until the topic `numbers` is deleted."""
    with freud.blocking.connect(ADDRESS) as client, client.subscribe("numbers") as numbers:
        ready.set()
        for record in numbers:
            client.produce("squares", b"%d" % (int(record.body) ** 2))


def main() -> None:
    with freud.blocking.connect(ADDRESS) as client:
        client.create_topic("numbers")
        client.create_topic("squares")
        ready = threading.Event()
        worker = threading.Thread(target=square, args=(ready,))
        worker.start()
        ready.wait()
        with client.subscribe("squares") as squares:
            for number in range(5):
                client.produce("numbers", b"%d" % number)
                print(number, "squared is", next(squares).body.decode())
        client.delete_topic("numbers")
        client.delete_topic("squares")
        worker.join()


if __name__ == "__main__":
    main()
