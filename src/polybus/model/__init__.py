"""Frozen values that every part of the bus speaks in. No I/O, no clock."""
