"""Durable subscribers: clients that come and go, and get every message once, in order.

    client         an id that chose itself; its epochs (one a start) and its counter
    counter        one stamp a change, checked in the same commit as what it changes
    subscription   a client and a topic, and LAST: up to where it has read
    collection     what every subscriber and every group has read goes

All of it is the loop's, but for what stands on `workers`, and all of it is in the store:
see `records`. What is in memory can be made again from there.
"""
