"""The folder that `polybus.spark.session` puts before Spark's workers: see `sitecustomize`."""
