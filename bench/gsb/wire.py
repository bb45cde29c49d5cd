"""What both ends agree on."""

from polybus.dialects.gsb import gsb_pb2

__all__ = ["ECHO", "ITEMS", "ITEM_BYTES", "METHOD", "NUMBERS", "gsb_pb2"]

ECHO, NUMBERS, ITEMS = "echo", "numbers", "items"
METHOD = ("bench.Echo", "Call")  # gRPC's service and method
ITEM_BYTES = 1 << 20
