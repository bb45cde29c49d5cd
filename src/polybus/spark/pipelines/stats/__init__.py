"""The pipeline `stats`."""
