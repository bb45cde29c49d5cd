"""The native port on Arrow Flight: gRPC's threads and Arrow's batches on one side, the
bus's verbs on the other.
"""
