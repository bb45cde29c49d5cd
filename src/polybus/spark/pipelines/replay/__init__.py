"""The pipeline `replay`."""
