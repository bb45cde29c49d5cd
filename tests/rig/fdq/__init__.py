"""A checker of FDQ's guarantees: clients record their operations, and the checker compares them.

journal.py     a file per process: its operations and their outcomes
history.py     the journals of a round, as values
snapshot.py    the content of the idle bus
checker.py     compares the two and reports anomalies, in the style of Jepsen
recorded_bus.py  a bus client that records its calls
clients.py     the producer and consumer processes of a round
message_plan.py  the plan that the handler of a message follows
workload.py    a round: a bus, its clients, injected faults, and the verdict
"""
