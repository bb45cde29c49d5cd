"""A stream from one topic to another, exactly once: orders in, large orders out.

python examples/spark_stream.py [polybus://127.0.0.1:6570] [CHECKPOINT]

Orders are JSON, such as {"customer": "ann", "euros": 120}. Stop it as you like, by Ctrl-C
or by kill -9, and start it again with the same checkpoint: each large order is in
`orders.large` once.
"""

import sys
import time

from pyspark.sql.functions import col, from_json

import polybus.spark

BUS = sys.argv[1] if len(sys.argv) > 1 else "polybus://127.0.0.1:6570"
CHECKPOINT = sys.argv[2] if len(sys.argv) > 2 else "./checkpoints/orders.large"
LARGE_EUROS = 100
LOOK_S = 0.5


def main() -> None:
    spark = polybus.spark.session(name="large orders")
    orders = spark.readStream.format("polybus").options(bus=BUS, topic="orders").load()
    order = from_json(col("body").cast("string"), "customer string, euros double")
    large = orders.where(order.euros >= LARGE_EUROS).select("body", "shard_key")
    query = (
        large.writeStream.format("polybus")
        .options(bus=BUS, topic="orders.large", checkpointLocation=CHECKPOINT)
        .queryName("large orders")
        .start()
    )
    try:
        while query.isActive:
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        query.stop()
    else:
        query.awaitTermination()  # raises what has ended it


if __name__ == "__main__":
    main()
