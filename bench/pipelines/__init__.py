"""Pipelines: how fast they catch up with a topic, beside Spark's own Parquet."""
