"""The pipeline `dead-letters`."""
