"""Sabotages of the pump's threads: locks, atomic operations, and the queues between threads."""

from __future__ import annotations

from tests.rig.patching import Edit, Patch

OUTBOX = "kernel/outbox.h"
ROUTER = "kernel/router.h"
PUMP = "kernel/pump_thread.h"
CHUNK = "kernel/chunk.h"

SABOTAGES = [
    # A push takes no lock.
    Patch(
        "push-unlocked",
        OUTBOX,
        "    pthread_mutex_lock(&box->lock);\n    bool is_first =",
        "    bool is_first =",
        (
            Edit(
                OUTBOX,
                "        pb_outbox_overflow(box, turn);\n    }\n    pthread_mutex_unlock(&box->lock);\n",
                "        pb_outbox_overflow(box, turn);\n    }\n",
            ),
        ),
    ),
    # A worker routes without its lock.
    Patch(
        "route-unlocked",
        ROUTER,
        "        pthread_mutex_unlock(&router->change_lock);\n    }\n    pthread_mutex_lock(&worker->lock);\n",
        "        pthread_mutex_unlock(&router->change_lock);\n    }\n",
        (Edit(ROUTER, "    if (worker->number != 0) pthread_mutex_unlock(&worker->lock);\n", ""),),
    ),
    # A change does not wait for the workers.
    Patch(
        "change-stops-no-worker",
        ROUTER,
        "    for (at = 1; at < router->worker_count; at++) pthread_mutex_lock(&router->workers[at]->lock);\n",
        "    (void)at;\n",
        (
            Edit(
                ROUTER,
                "    for (at = router->worker_count; at-- > 1;) pthread_mutex_unlock(&router->workers[at]->lock);\n",
                "    (void)at;\n",
            ),
        ),
    ),
    # Threads add to the loop's list without its lock.
    Patch(
        "mailbox-unlocked",
        PUMP,
        "    pthread_mutex_lock(&mailbox->lock);\n    bool was_empty",
        "    bool was_empty",
        (
            Edit(
                PUMP,
                "    pb_list_move(&mailbox->list, &turn->changed);\n    pthread_mutex_unlock(&mailbox->lock);\n",
                "    pb_list_move(&mailbox->list, &turn->changed);\n",
            ),
        ),
    ),
    # The loop adds to a thread's list without its lock.
    Patch(
        "requests-unlocked",
        PUMP,
        "    pthread_mutex_lock(&thread->lock);\n    bool was_empty",
        "    bool was_empty",
        (
            Edit(
                PUMP,
                "        stream->requests |= request;\n    pthread_mutex_unlock(&thread->lock);\n",
                "        stream->requests |= request;\n",
            ),
        ),
    ),
    # The mark of a full reader is no atomic store.
    Patch(
        "full-stored-plainly",
        OUTBOX,
        "    atomic_store_explicit(box->reader_full, full, memory_order_release);\n",
        "    *(uint8_t *)box->reader_full = full;\n",
    ),
    # Threads that publish to one topic add to its next id by turns of load and store.
    Patch(
        "next-id-added-plainly",
        "kernel/topic_table.h",
        "        atomic_fetch_add_explicit(&topic->next_id, count, memory_order_relaxed);\n",
        "        *(uint64_t *)&topic->next_id += count;\n",
    ),
    # The thread that frees a chunk is not ordered behind those that have read it.
    Patch(
        "chunk-release-relaxed",
        CHUNK,
        "fetch_sub_explicit(&chunk->references, 1, memory_order_acq_rel)",
        "fetch_sub_explicit(&chunk->references, 1, memory_order_relaxed)",
    ),
    # A list of events does not keep its outboxes.
    Patch(
        "events-without-reference",
        OUTBOX,
        "            return; /* without memory the next event of this outbox tries again */\n"
        "        pb_outbox_retain(box);\n",
        "            return; /* without memory the next event of this outbox tries again */\n",
    ),
    # Frames that the loop has left in a stream stay there until the peer sends more.
    Patch(
        "held-never-routed",
        PUMP,
        "    if (stream->held_size > 0)\n        pb_stream_route(",
        "    if (0)\n        pb_stream_route(",
    ),
    # The first push of a turn goes to the socket before held bytes.
    Patch(
        "push-overtakes-held",
        OUTBOX,
        "        if (is_first && box->count == 0 && !box->by_pipe) {\n",
        "        if (is_first && !box->by_pipe) {\n",
    ),
    # The part of a push that the socket has accepted is sent again.
    Patch(
        "sent-part-sent-again",
        OUTBOX,
        "        box->first_sent = sent;\n        box->held -= sent;\n",
        "",
    ),
    # Publishers do not wait for full readers.
    Patch(
        "full-readers-ignored",
        ROUTER,
        "            && reader->encoding != worker->skip) {\n",
        "            && reader->encoding == worker->skip) {\n",
    ),
    # An outbox over its bound grows until the loop cuts its reader.
    Patch(
        "overflow-accepts-more",
        OUTBOX,
        "    box->closed = true;\n    pb_outbox_report(box, turn, PB_OVERFLOW);\n",
        "    pb_outbox_report(box, turn, PB_OVERFLOW);\n",
    ),
    # Messages for a reader that is gone are not counted.
    Patch("drops-uncounted", OUTBOX, "        box->dropped += messages;\n", "        ;\n"),
    # The bus does not count the messages for a reader that it was about to cut.
    Patch(
        "late-messages-uncounted",
        "bus/broker.py",
        "        lost = connection.outbox.take_dropped()\n",
        "        lost = 0\n",
    ),
    # A parked stream holds messages that were routed already.
    Patch(
        "consumed-routed-again",
        PUMP,
        "    if (!pb_stream_hold(stream, data + routed.consumed, size - routed.consumed) || failed)\n",
        "    if (!pb_stream_hold(stream, data, size) || failed)\n",
    ),
]
