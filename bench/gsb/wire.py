"""What both ends agree on."""

from polybus.dialects.gsb import gsb_pb2

__all__ = ["BUFFERS", "ECHO", "ITEMS", "ITEM_BYTES", "METHOD", "NUMBERS", "gsb_pb2"]

ECHO, NUMBERS, ITEMS = "echo", "numbers", "items"
METHOD = ("bench.Echo", "Call")  # gRPC's service and method
ITEM_BYTES = 1 << 20
# Of a Pair0 socket, in messages: without them nng hands over each one by itself.
BUFFERS = {"send_buffer_size": 128, "recv_buffer_size": 128}
