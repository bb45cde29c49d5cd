"""Services that call each other: who is registered, which calls are open, and how they end.

calls.py      the verbs: call, reply, cancel; each call ends in one FULL
services.py   registering, and what an address means
pressure.py   who is full, who waits for whom, credits
deadlines.py  calls that take too long
watching.py   pings, and peers that keep others waiting
builtin.py    the bus's own services
audit.py      the log of calls
peer.py       what all of these ask of a connection
"""
