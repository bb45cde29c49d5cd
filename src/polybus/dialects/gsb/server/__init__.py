"""The server side of GSB: services that register and call each other.

session.py           one connection: frames, packets, halting (../ya/session.py: of another framing)
call_table.pyx       open calls, and their rules: open, forward, reply, end
call_router.py       the slow path of these rules; cancel; deadlines; built-in services
service_registry.py  registered names, and the resolution of addresses
back_pressure.py     full connections, waiting connections, credits
peer_liveness.py     pings, and full peers that block others
control_requests.py  register, subscribe, broadcast: requests without an id
oversized_packet.py  packets over the size limit, skipped while they arrive
sender_tracker.py    the senders of broadcasts to durable topics
call_log.py          the log of ended calls
"""
