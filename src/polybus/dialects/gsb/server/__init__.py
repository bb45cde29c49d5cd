"""The server side of GSB: services that register and call each other.

session.py           one connection: frames, packets, halting (../ya/session.py: of another framing)
call_router.py       call, reply, cancel; deadlines; built-in services
call_table.pyx       the state of open calls, and the fast path
service_registry.py  registered names, and the resolution of addresses
back_pressure.py     full connections, waiting connections, credits
peer_liveness.py     pings, and full peers that block others
control_requests.py  register, subscribe, broadcast: requests without an id
oversized_packet.py  packets over the size limit, skipped while they arrive
sender_tracker.py    the senders of broadcasts to durable topics
call_log.py          the log of ended calls
"""
