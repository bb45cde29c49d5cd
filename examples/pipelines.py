"""A pipeline of your own, out of those that are there: copy large orders, then report on both.

python examples/pipelines.py [polybus://127.0.0.1:6570] [FOLDER]

Orders are JSON, such as {"customer": "ann", "euros": 120}. Run it as often as you like, kill it
as you like: each large order is in `orders.large` once, and each order is counted once.
"""

import random
import sys
from pathlib import Path

import polybus.spark
from polybus import fdq
from polybus.spark import pipelines

BUS = sys.argv[1] if len(sys.argv) > 1 else "polybus://127.0.0.1:6570"
FOLDER = Path(sys.argv[2] if len(sys.argv) > 2 else "./pipelines")
LARGE = "get_json_object(cast(body AS string), '$.euros') >= 100"
ORDERS = 1000


def main() -> None:
    produce()
    spark = polybus.spark.session(name="large orders")
    routed = pipelines.route(
        spark,
        "orders",
        into="orders.large",
        where=LARGE,
        bus=BUS,
        checkpoint=str(FOLDER / "large"),
        once=True,
    )
    counted = pipelines.stats(
        spark, "orders,orders.large", out=str(FOLDER / "stats"), window=1, bus=BUS, once=True
    )
    print(f"{routed.rows} orders were looked at; the report is {counted.facts['report']}")


def produce() -> None:
    customers = ["ann", "bob", "eve"]
    with fdq.Producer(BUS) as producer:
        for _ in range(ORDERS):
            customer, euros = random.choice(customers), random.randrange(200)
            order = f'{{"customer": "{customer}", "euros": {euros}}}'
            producer.produce_nowait("orders", customer, order.encode())


if __name__ == "__main__":
    main()
