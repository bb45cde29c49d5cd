"""Consumer groups: the assignment of shards to members, and the progress of each group.

All durable state is in records of the store. A commit changes a record only if it has the
version that the change was made from. So a bus continues after a restart, and a member with
an old epoch cannot write. State in memory only can be rebuilt: when a member was last seen,
the offsets that it was handed, and the offsets that it runs.

    group_records      the records as values and as bytes
    assignment         which member should own which shard
    group_state        a group in memory, its locks, and changes that become one commit
    group_registry     all groups: find, load, create, remove
    membership         join, leave, expire; shards change owners
    shard_phases       which shards of a resharded topic a group may read now
    shard_progress     the effect of acks and failed runs on a shard's record
    acks               acks of several shards as one commit, and transactions
    message_expiry     messages whose time to live has passed
    dead_letter_queue  messages that have failed too often
    message_block      messages that are produced with an ack, as blocks
    shard_ends         the ends of shards, kept current by store notifications
    member_fetch       rows and assignment changes for a member
    ack_latency        the time from commit to ack
    group_reset        move a group to another position
    group_info         statistics of a group
    coordinator        the entry point of all of these, and the timer that expires members

Lock order: a group's lock before those of its shards, and these by shard number. Acks take
only locks of shards, so members do not wait for each other's disk writes.
"""
