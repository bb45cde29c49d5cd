"""Declarations of Arrow and of flight_port.h that flight_port.pyx uses."""

from libc.stdint cimport int64_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr
from libcpp.string cimport string
from libcpp.vector cimport vector


cdef extern from "arrow/api.h" namespace "arrow" nogil:
    cdef cppclass CStatus "arrow::Status":
        cbool ok()
        string ToString()

    cdef cppclass CBuffer "arrow::Buffer":
        const char* data_as "data_as<char>"()
        const unsigned char* data()
        int64_t size()
        @staticmethod
        shared_ptr[CBuffer] FromString(string)

    cdef cppclass CSchema "arrow::Schema":
        pass

    cdef cppclass CRecordBatch "arrow::RecordBatch":
        pass

    cdef cppclass CResult "arrow::Result"[T]:
        cbool ok()
        CStatus status()
        T ValueUnsafe()


cdef extern from "arrow/flight/api.h" namespace "arrow::flight" nogil:
    cdef cppclass CLocation "arrow::flight::Location":
        CLocation()
        @staticmethod
        CResult[CLocation] Parse(const string&)

    cdef cppclass CCertKeyPair "arrow::flight::CertKeyPair":
        string pem_cert
        string pem_key

    cdef cppclass CActionType "arrow::flight::ActionType":
        string type
        string description

    cdef cppclass COptions "arrow::flight::FlightServerOptions":
        COptions(const CLocation&)
        vector[CCertKeyPair] tls_certificates
        cbool verify_client
        string root_certificates


cdef extern from "arrow/python/pyarrow.h" namespace "arrow::py":
    int import_pyarrow() except -1
    object wrap_batch(const shared_ptr[CRecordBatch]&)
    object wrap_buffer(const shared_ptr[CBuffer]&)
    object wrap_schema(const shared_ptr[CSchema]&)
    CResult[shared_ptr[CRecordBatch]] unwrap_batch(object)
    CResult[shared_ptr[CBuffer]] unwrap_buffer(object)
    CResult[shared_ptr[CSchema]] unwrap_schema(object)


cdef extern from "flight_port.h" namespace "polybus" nogil:
    double Now()

    cdef cppclass Refusal:
        cbool is_set
        int code
        string text
        string extra

    cdef cppclass CCallGate "polybus::CallGate":
        vector[void*] TakeEnded()
        int TakeRefused()

    cdef cppclass GrpcBounds:
        int max_message_bytes
        int max_streams

    cdef cppclass Handover:
        uint64_t id
        string peer
        double since_s

    cdef cppclass CBatchQueue "polybus::BatchQueue":
        CBatchQueue(int64_t, int, int64_t, int64_t)
        CCallGate gate
        cbool PopAll(vector[ReceivedBatch]*)
        void Wake()
        void Stop(const Refusal&)
        cbool WaitSettled(double)
        void Close()
        vector[shared_ptr[Handover]] PendingHandovers()

    cdef cppclass CCall "polybus::FlightCall":
        const string& peer()
        cbool is_cancelled()
        void* caller()
        void LeaveInterpreterQueue()
        cbool is_authorized()
        string authorization()
        void Refuse(const Refusal&)

    cdef cppclass CPutStream "polybus::PutStream":
        vector[string] path
        string user
        shared_ptr[CSchema] schema
        void* owner

    cdef cppclass BatchAnswer:
        shared_ptr[CPutStream] put
        uint64_t ticket
        string text

    void AnswerAll(vector[BatchAnswer]&)

    cdef cppclass ReceivedBatch:
        shared_ptr[CPutStream] put
        uint64_t ticket
        shared_ptr[CRecordBatch] batch
        shared_ptr[CBuffer] metadata
        int64_t size

    cdef cppclass Columns:
        cbool is_plain
        int64_t count
        const unsigned char* bodies
        const unsigned char* body_offsets
        const unsigned char* keys
        const unsigned char* key_offsets
        const unsigned char* times
        int64_t bodies_size
        int64_t keys_size

    Columns ColumnsOf(const CRecordBatch&)

    cdef cppclass Hooks:
        void* python
        void (*open_put)(void*, CCall*, CPutStream*, Refusal*) noexcept
        void (*close_put)(void*, CPutStream*) noexcept
        void* (*begin_call)(void*, CCall*, Refusal*) noexcept
        Refusal too_many_calls
        void (*on_malformed)(void*, const string&, cbool, Refusal*) noexcept
        void (*run_action)(void*, CCall*, const string&, const shared_ptr[CBuffer]&,
                    vector[shared_ptr[CBuffer]]*, void**, Refusal*) noexcept
        void (*next_result)(void*, void*, shared_ptr[CBuffer]*, Refusal*) noexcept
        void* (*open_get)(void*, CCall*, const string&, shared_ptr[CSchema]*, Refusal*) noexcept
        void (*next_rows)(void*, void*, shared_ptr[CRecordBatch]*, Refusal*) noexcept
        void (*close_get)(void*, void*) noexcept
        void (*list_actions)(void*, vector[CActionType]*) noexcept

    cdef cppclass CService "polybus::Service":
        CService(shared_ptr[CBatchQueue], const Hooks&, shared_ptr[CSchema], int, int64_t)
        CStatus Open(COptions&, const GrpcBounds&)
        cbool is_bounded()
        CStatus Shutdown()
        CStatus Wait()
        int port()
