"""The folder that `polybus.spark.session` puts first on workers' path: see `sitecustomize`."""
