"""Spark: how fast topics are read into it and written from it, beside its own Parquet."""
