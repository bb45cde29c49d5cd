"""Consumer groups: who reads which shard of a topic, and how far each group has come.

All that matters is in records of the store, and changes there by commits that expect
the version they were made from. So a bus that starts again goes on where it was, and
whoever holds an old epoch can write nothing. What is held in memory beside that can
be made again: when a member was heard of last, what it was handed, what it runs.

    records      what is kept, as values and as bytes
    ranges       a low mark, and what is acked above it
    assignment   which shard is for whom
    state        a group in memory; its locks, and changes that become one commit
    table        all groups: found, loaded, made, removed
    membership   joining, leaving, dying; shards change hands
    judging      what acks and failed runs make of a record
    acks         acks of several shards as one commit; transactions
    letters      messages that are given up
    outputs      messages that are produced with an ack, as blocks
    ends         where shards end, known from news
    fetching     rows for a member, and what has changed for it
    latency      the time from commit to ack
    resetting    a group moved to another position
    telling      figures for people and programs
    coordinator  the face of it all
    ticking      the thread by which its time passes

Locks: a group's lock is taken before those of its shards, and these by their numbers.
Acks take locks of shards alone, so members do not wait for each other's disk.
"""
