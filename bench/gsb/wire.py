"""Names and sizes that caller and service share."""

from polybus.dialects.gsb import gsb_pb2

__all__ = ["BUFFERS", "ECHO", "ITEMS", "ITEM_BYTES", "METHOD", "NUMBERS", "gsb_pb2"]

ECHO, NUMBERS, ITEMS = "public/echo", "numbers", "items"
METHOD = ("bench.Echo", "Call")  # gRPC's service and method
ITEM_BYTES = 1 << 20
# Of a Pair0 socket, in messages. Without them nng passes each message separately.
BUFFERS = {"send_buffer_size": 128, "recv_buffer_size": 128}
