"""The compiled loops: framing, fan-out, and the tables they read.

Per batch Python, per message C. Everything here is plain mechanism: no clock,
no socket, no policy, and no import of any other part of polybus. Each function
has an obvious twin in `tests.rig.oracle`.

    framing        the two seams a dialect fills: Framing and Encoding
    rqueue         rqueue's framing and encoding
    notifications  rqueue as its clients read and write it, in batches
    freud          Freud's requests, in groups of like ones
    freud_answers  the answers to them
    freud_client   Freud as its clients write and read it, in batches
    memory         what the allocator keeps
    blocks         messages as checksummed columns: made, opened, cut, put together
    gathering      messages of many blocks as one batch, with their ids
    entries        the heads of a log's entries
    requests       messages that come as tuples, as columns
    slabs          memory for large columns, kept for the next read
    answers        what a store's callers wait for
    router         messages of a ZeroMQ socket, many at a time
    topics, sets   the topic table and the interned subscriber sets
    registry       who reads what
    fanout         the hot loop
"""
