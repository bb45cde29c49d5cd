"""The parts that all dialects share: connections, subscriptions, delivery, policy, counters.

No asyncio, no sockets and no clocks in here: the loop's `call_soon` and a clock
are passed in, so every rule can be tested without waiting for anything.
"""
