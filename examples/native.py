"""A durable topic: written, read from the start, and followed while more comes.

python examples/native.py [polybus://127.0.0.1:6570]
"""

import sys
import threading

from polybus import native

URL = sys.argv[1] if len(sys.argv) > 1 else native.DEFAULT_URL


def follow(bus: native.Client) -> None:
    """Prints what comes, until nothing has come for ten seconds, or the last was there."""
    for batch in bus.read("example.orders", wait_s=10):
        for order in batch.to_pylist():
            print(order["id"], order["shard_key"], order["body"].decode())
            if order["body"] == b"the last":
                return


def main() -> None:
    with native.Client(URL) as bus, bus.producer() as producer:
        producer.produce("example.orders", [b"a chair", b"a table"], keys=["ann", "bob"]).result()
        following = threading.Thread(target=follow, args=(bus,))
        following.start()
        for number in range(1000):  # each is a batch of its own; pending batches travel together
            producer.produce("example.orders", [b"lamp %d" % number], keys=["ann"])
        last = producer.produce("example.orders", [b"the last"])
        following.join()
        print(last.result())
        bus.drop_topic("example.orders")


if __name__ == "__main__":
    main()
