# The tables and the scan in C: topic_table.h, subscriber_set.h and router.h have the contracts.
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

from polybus.kernel.framing cimport Frame, pb_framing
from polybus.kernel.outbox cimport pb_chunk, pb_outbox, pb_turn

cdef extern from "topic_table.h" nogil:
    ctypedef enum pb_verdict:
        PB_UNKNOWN
        PB_ALLOW
        PB_DENY

    ctypedef struct pb_topic:
        uint32_t subscribers
        uint8_t collect
        uint8_t durable
        uint8_t hold
        uint8_t name_size
        int collected
        unsigned char* name

    ctypedef struct pb_topic_table:
        size_t count
        size_t idle

    bint pb_topic_is_idle(const pb_topic* topic) noexcept
    uint64_t pb_topic_next_id(pb_topic* topic) noexcept
    void pb_topic_set_next_id(pb_topic* topic, uint64_t next_id) noexcept
    void pb_topic_advance(pb_topic* topic, uint64_t count, bint shared) noexcept
    pb_topic* pb_topics_find(const pb_topic_table* table, const unsigned char* name, size_t size) noexcept
    pb_topic* pb_topics_find_or_add(pb_topic_table* table, const unsigned char* name, size_t size) noexcept
    void pb_topics_sweep_idle(pb_topic_table* table) noexcept
    void pb_topics_update_idle(pb_topic_table* table, pb_topic* topic, bint was_idle) noexcept
    pb_verdict pb_topic_verdict(const pb_topic* topic, uint32_t identity, uint64_t generation) noexcept
    int pb_topic_remember_verdict(
        pb_topic* topic, uint32_t identity, uint64_t generation, pb_verdict verdict
    ) noexcept

cdef extern from "subscriber_set.h" nogil:
    ctypedef struct pb_set:
        uint32_t size
        const uint32_t* members

    ctypedef struct pb_set_table:
        uint32_t count

cdef extern from "router.h" nogil:
    enum:
        PB_ENCODINGS
        PB_MAX_IDLE_TOPICS

    ctypedef enum pb_stop:
        PB_STOP_END
        PB_STOP_CONTROL
        PB_STOP_BLOCKED
        PB_STOP_BAD
        PB_STOP_FRAGMENTS
        PB_STOP_JUDGE
        PB_STOP_GENERAL
        PB_STOP_NO_MEMORY

    ctypedef struct pb_counter:
        pass

    ctypedef struct pb_source:
        bint trusted
        pb_counter messages
        pb_counter bytes
        pb_counter denied
        pb_counter unheard

    ctypedef struct pb_subscriber:
        pb_counter messages
        pb_counter bytes
        pb_outbox* outbox
        uint8_t encoding
        uint8_t alive

    ctypedef struct pb_run:
        uint32_t subscribers
        size_t start
        size_t end
        uint64_t count
        uint64_t unfit

    ctypedef struct pb_piece:
        Frame frame
        size_t run
        int column
        bint relayed

    ctypedef struct pb_column:
        pb_topic* topic
        uint64_t first_id
        size_t count
        size_t size
        int32_t* offset
        unsigned char* body

    ctypedef struct pb_output:
        uint32_t subscriber
        pb_outbox* outbox
        pb_chunk* chunk
        size_t size
        uint64_t messages
        unsigned char* cursor

    ctypedef struct pb_routed:
        size_t consumed
        pb_stop stop
        int code
        const unsigned char* topic
        size_t topic_size
        uint32_t blocker

    ctypedef struct pb_worker:
        pb_turn* turn
        pb_counter messages
        pb_counter bytes
        pb_counter delivered
        pb_counter delivered_bytes
        pb_counter denied
        pb_counter unheard
        pb_counter too_large
        pb_run* runs
        size_t run_count
        pb_piece* pieces
        size_t piece_count
        pb_column* columns
        size_t column_count
        Frame* fragments
        size_t fragment_count
        pb_output* outputs
        size_t output_count
        unsigned char* (*open_raw)(void* owner, size_t size) noexcept
        void* owner
        unsigned char* raw
        pb_chunk* raw_chunk
        size_t room
        size_t filled
        uint32_t own_bit
        int skip

    ctypedef struct pb_router:
        pb_topic_table topics
        pb_set_table sets
        uint32_t used
        uint64_t generation
        uint64_t stops
        bint has_produce_rules
        uint32_t* outbox_counts
        pb_worker** workers
        unsigned int worker_count

    uint64_t pb_counter_get(const pb_counter* counter) noexcept
    void pb_counter_add(pb_counter* counter, uint64_t more) noexcept
    uint32_t pb_source_identity(const pb_source* source) noexcept
    void pb_source_reclassify(pb_source* source, uint32_t identity) noexcept
    int pb_router_init(pb_router* router, uint64_t seed) noexcept
    void pb_router_free(pb_router* router) noexcept
    pb_subscriber* pb_router_subscriber(const pb_router* router, uint32_t number) noexcept
    const pb_set* pb_router_set(const pb_router* router, uint32_t number) noexcept
    uint32_t pb_set_encodings(const pb_set* set) noexcept
    uint32_t pb_router_add_subscriber(pb_router* router, uint32_t encoding) noexcept
    void pb_router_set_outbox(pb_router* router, uint32_t number, pb_outbox* outbox) noexcept
    void pb_router_remove_subscriber(pb_router* router, uint32_t number) noexcept
    void pb_router_set_full(pb_router* router, pb_subscriber* subscriber, bint full) noexcept
    int pb_router_link(pb_router* router, uint32_t number, const unsigned char* name, size_t size) noexcept
    int pb_router_unlink(pb_router* router, uint32_t number, const unsigned char* name, size_t size) noexcept
    void pb_router_change_begin(pb_router* router) noexcept
    void pb_router_change_end(pb_router* router) noexcept
    void pb_router_changes_begin(pb_router* router) noexcept
    void pb_router_changes_end(pb_router* router) noexcept
    void pb_worker_begin(pb_router* router, pb_worker* worker) noexcept
    void pb_worker_end(pb_worker* worker) noexcept
    void pb_route_begin(pb_worker* worker, uint32_t own_bit, int skip, size_t room, bint plain_only) noexcept
    pb_stop pb_accept(
        pb_router* router, pb_worker* worker, pb_source* source, const Frame* frame, pb_routed* routed
    ) noexcept
    void pb_scan(
        pb_router* router,
        pb_worker* worker,
        pb_source* source,
        const pb_framing* framing,
        const unsigned char* at,
        size_t size,
        pb_routed* routed,
    ) noexcept
    int pb_start_run(pb_worker* worker, uint32_t subscribers) noexcept
    int pb_add_piece(pb_worker* worker, pb_topic* topic, const Frame* frame, bint relayed, bint collected) noexcept
    Py_ssize_t pb_measure_outputs(const pb_router* router, pb_worker* worker, uint32_t encoding) noexcept
    void pb_copy_runs(
        const pb_router* router, pb_worker* worker, uint32_t encoding, size_t first, const unsigned char* bytes
    ) noexcept
    pb_chunk* pb_take_raw_chunk(pb_worker* worker) noexcept
    int pb_open_output(pb_output* output) noexcept
    int pb_route(
        pb_router* router,
        pb_worker* worker,
        pb_source* source,
        const pb_framing* framing,
        uint32_t own_encoding,
        const unsigned char* buf,
        size_t size,
        pb_routed* out,
    ) noexcept
    void pb_deliver(pb_worker* worker) noexcept
