"""Compiled code that several dialects, the bus or the store share.

Python runs per batch, C per message. The kernel is mechanism only: it knows no policy
and imports no other part of polybus. Each function has a plain-Python oracle in
`tests.rig.oracle` that the property tests compare it with.

Fan-out:
    framing           Framing and Encoding, the two interfaces that a dialect implements
    subscriber_table  subscriptions: the tables that the fan-out reads
    fanout            one received buffer in, one output per subscriber out

Fan-out in C, for threads without the GIL:
    framing.h         the scanner of a dialect: frames in received bytes
    topic_table.h     hash table of topics, with the remembered verdicts of the policy
    subscriber_set.h  interned sets of subscribers
    router.h          the tables together, route locks, and the scan: the hot loop of the bus
    chunk.h           bytes that several outboxes share
    outbox.h          the bounded queue before one socket
    pump_thread.h     a thread that receives, routes and sends without Python

Stream I/O:
    receive_buffer    received bytes in one buffer for all connections
    pump              one epoll set for all plain TCP and Unix connections, and its threads
    outbox            the queue before one reader, as the bus sees it
    client_batch      scanner and encoder of the stream clients: length-prefixed frames
    flight_port       the Arrow Flight service of the native port

Blocks:
    blocks            messages as checksummed columns: encode, check, split, merge
    block_gather      messages of many blocks as one batch of columns, with ids
    column_slab       memory of large columns, kept for the next read

Process and bookkeeping:
    quota_account     the quota sums of one user
    task_future       the futures of store commits and produced messages
    allocator         settings of the C allocator
    scheduler         the time slice of a thread

byte_order.pxd, router.pxd, pump_thread.pxd, bytes_inline.h, column_loops.h, topic_hash.h and
xxh64.h are shared by compiled modules, also by those of the dialects.
"""
