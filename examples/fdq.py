"""Orders become invoices, each once: two consumers share the work, by customer.

python examples/fdq.py [polybus://127.0.0.1:6570 | lmdb:./data | memory:]
"""

import sys
import threading

from polybus import fdq

URL = sys.argv[1] if len(sys.argv) > 1 else "memory:"
ORDERS, INVOICES = "example.fdq.orders", "example.fdq.invoices"
CUSTOMERS = ("ann", "bob", "eve")
COUNT = 300


def invoice(order: fdq.Envelope) -> None:
    """The ack of the order and its invoice are one step: both happen, or neither."""
    with order.transaction() as tx:
        tx.produce(INVOICES, order.shard_key, b"invoice for " + order.message)


def main() -> None:
    with fdq.Producer(URL) as producer:
        requests = [
            fdq.MessageRequest(CUSTOMERS[number % 3], b"chair %d" % number)
            for number in range(COUNT)
        ]
        producer.produce_batch(ORDERS, requests)  # all or none

        workers = [fdq.Consumer(URL) for _ in range(2)]
        for number, worker in enumerate(workers):
            worker.consume(ORDERS, f"billing-{number}", invoice, group="billing")

        seen: dict[str, list[bytes]] = {customer: [] for customer in CUSTOMERS}
        done = threading.Event()

        def collect(envelope: fdq.Envelope) -> None:
            seen[envelope.shard_key or ""].append(envelope.message)
            if sum(map(len, seen.values())) == COUNT:
                done.set()

        reader = fdq.Consumer(URL)
        reader.consume(INVOICES, "reader", collect)
        done.wait(60)
        for client in (*workers, reader):
            client.close()  # with the acks of all that was handled
        (group,) = fdq.stats(URL, ORDERS)["groups"]

    for customer, messages in seen.items():
        print(customer, len(messages), messages[0].decode(), "…", messages[-1].decode())
    print(f"acked {group['acked']}, lag {group['lag']}")


if __name__ == "__main__":
    main()
