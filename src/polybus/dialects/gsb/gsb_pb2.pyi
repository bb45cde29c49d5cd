from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterReplyCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REGISTER_OK: _ClassVar[RegisterReplyCode]
    BAD_REQUEST: _ClassVar[RegisterReplyCode]
    FORBIDDEN: _ClassVar[RegisterReplyCode]
    CONFLICT: _ClassVar[RegisterReplyCode]

class ServiceReplyCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CALL_OK: _ClassVar[ServiceReplyCode]
    SERVICE_FAILURE: _ClassVar[ServiceReplyCode]

class ServiceReplyType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FULL: _ClassVar[ServiceReplyType]
    PARTIAL: _ClassVar[ServiceReplyType]
REGISTER_OK: RegisterReplyCode
BAD_REQUEST: RegisterReplyCode
FORBIDDEN: RegisterReplyCode
CONFLICT: RegisterReplyCode
CALL_OK: ServiceReplyCode
SERVICE_FAILURE: ServiceReplyCode
FULL: ServiceReplyType
PARTIAL: ServiceReplyType

class RegisterRequest(_message.Message):
    __slots__ = ("service_id",)
    SERVICE_ID_FIELD_NUMBER: _ClassVar[int]
    service_id: str
    def __init__(self, service_id: _Optional[str] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: RegisterReplyCode
    message: str
    def __init__(self, code: _Optional[_Union[RegisterReplyCode, str]] = ..., message: _Optional[str] = ...) -> None: ...

class ServiceCallRequest(_message.Message):
    __slots__ = ("address", "request_id", "data")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    address: str
    request_id: str
    data: bytes
    def __init__(self, address: _Optional[str] = ..., request_id: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class CallRequest(_message.Message):
    __slots__ = ("request_id", "data", "caller", "address")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    data: bytes
    caller: str
    address: str
    def __init__(self, request_id: _Optional[str] = ..., data: _Optional[bytes] = ..., caller: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class CallReply(_message.Message):
    __slots__ = ("request_id", "code", "type", "data")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    code: ServiceReplyCode
    type: ServiceReplyType
    data: bytes
    def __init__(self, request_id: _Optional[str] = ..., code: _Optional[_Union[ServiceReplyCode, str]] = ..., type: _Optional[_Union[ServiceReplyType, str]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("node_id", "deadline_ms", "credits", "ping")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    deadline_ms: int
    credits: bool
    ping: bool
    def __init__(self, node_id: _Optional[str] = ..., deadline_ms: _Optional[int] = ..., credits: _Optional[bool] = ..., ping: _Optional[bool] = ...) -> None: ...

class UnregisterRequest(_message.Message):
    __slots__ = ("service_id",)
    SERVICE_ID_FIELD_NUMBER: _ClassVar[int]
    service_id: str
    def __init__(self, service_id: _Optional[str] = ...) -> None: ...

class UnregisterReply(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class SubscribeReply(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class UnsubscribeRequest(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class UnsubscribeReply(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class BroadcastRequest(_message.Message):
    __slots__ = ("topic", "data", "caller")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    topic: str
    data: bytes
    caller: str
    def __init__(self, topic: _Optional[str] = ..., data: _Optional[bytes] = ..., caller: _Optional[str] = ...) -> None: ...

class BroadcastReply(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    def __init__(self, token: _Optional[bytes] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    def __init__(self, token: _Optional[bytes] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("request_id", "replies")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    replies: int
    def __init__(self, request_id: _Optional[str] = ..., replies: _Optional[int] = ...) -> None: ...

class LinkHello(_message.Message):
    __slots__ = ("version", "public_key", "nonce", "instance")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    version: int
    public_key: bytes
    nonce: bytes
    instance: int
    def __init__(self, version: _Optional[int] = ..., public_key: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., instance: _Optional[int] = ...) -> None: ...

class LinkAccept(_message.Message):
    __slots__ = ("public_key", "nonce", "instance", "signature")
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    public_key: bytes
    nonce: bytes
    instance: int
    signature: bytes
    def __init__(self, public_key: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., instance: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class LinkProof(_message.Message):
    __slots__ = ("signature",)
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    signature: bytes
    def __init__(self, signature: _Optional[bytes] = ...) -> None: ...

class Announcement(_message.Message):
    __slots__ = ("public_key", "exchange_key", "instance", "sequence", "neighbours", "signature")
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_KEY_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NEIGHBOURS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    public_key: bytes
    exchange_key: bytes
    instance: int
    sequence: int
    neighbours: _containers.RepeatedScalarFieldContainer[bytes]
    signature: bytes
    def __init__(self, public_key: _Optional[bytes] = ..., exchange_key: _Optional[bytes] = ..., instance: _Optional[int] = ..., sequence: _Optional[int] = ..., neighbours: _Optional[_Iterable[bytes]] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Announce(_message.Message):
    __slots__ = ("announcements",)
    ANNOUNCEMENTS_FIELD_NUMBER: _ClassVar[int]
    announcements: _containers.RepeatedCompositeFieldContainer[Announcement]
    def __init__(self, announcements: _Optional[_Iterable[_Union[Announcement, _Mapping[str, object]]]] = ...) -> None: ...

class RelayCall(_message.Message):
    __slots__ = ("request_id", "data", "address", "origin", "target", "hops", "deadline_ms", "counter", "mac", "free_partials", "free_bytes", "instance", "target_instance")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    HOPS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    FREE_PARTIALS_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    data: bytes
    address: str
    origin: bytes
    target: bytes
    hops: int
    deadline_ms: int
    counter: int
    mac: bytes
    free_partials: int
    free_bytes: int
    instance: int
    target_instance: int
    def __init__(self, request_id: _Optional[str] = ..., data: _Optional[bytes] = ..., address: _Optional[str] = ..., origin: _Optional[bytes] = ..., target: _Optional[bytes] = ..., hops: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., counter: _Optional[int] = ..., mac: _Optional[bytes] = ..., free_partials: _Optional[int] = ..., free_bytes: _Optional[int] = ..., instance: _Optional[int] = ..., target_instance: _Optional[int] = ...) -> None: ...

class Packet(_message.Message):
    __slots__ = ("hello", "register_request", "register_reply", "unregister_request", "unregister_reply", "service_call_request", "call_reply", "subscribe_request", "subscribe_reply", "unsubscribe_request", "unsubscribe_reply", "broadcast_request", "broadcast_reply", "ping", "pong", "call_request", "cancel", "credit", "link_hello", "link_accept", "link_proof", "announce", "relay_call")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REGISTER_REQUEST_FIELD_NUMBER: _ClassVar[int]
    REGISTER_REPLY_FIELD_NUMBER: _ClassVar[int]
    UNREGISTER_REQUEST_FIELD_NUMBER: _ClassVar[int]
    UNREGISTER_REPLY_FIELD_NUMBER: _ClassVar[int]
    SERVICE_CALL_REQUEST_FIELD_NUMBER: _ClassVar[int]
    CALL_REPLY_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBE_REPLY_FIELD_NUMBER: _ClassVar[int]
    UNSUBSCRIBE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    UNSUBSCRIBE_REPLY_FIELD_NUMBER: _ClassVar[int]
    BROADCAST_REQUEST_FIELD_NUMBER: _ClassVar[int]
    BROADCAST_REPLY_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    CALL_REQUEST_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    LINK_HELLO_FIELD_NUMBER: _ClassVar[int]
    LINK_ACCEPT_FIELD_NUMBER: _ClassVar[int]
    LINK_PROOF_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    RELAY_CALL_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    register_request: RegisterRequest
    register_reply: RegisterReply
    unregister_request: UnregisterRequest
    unregister_reply: UnregisterReply
    service_call_request: ServiceCallRequest
    call_reply: CallReply
    subscribe_request: SubscribeRequest
    subscribe_reply: SubscribeReply
    unsubscribe_request: UnsubscribeRequest
    unsubscribe_reply: UnsubscribeReply
    broadcast_request: BroadcastRequest
    broadcast_reply: BroadcastReply
    ping: Ping
    pong: Pong
    call_request: CallRequest
    cancel: Cancel
    credit: Credit
    link_hello: LinkHello
    link_accept: LinkAccept
    link_proof: LinkProof
    announce: Announce
    relay_call: RelayCall
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping[str, object]]] = ..., register_request: _Optional[_Union[RegisterRequest, _Mapping[str, object]]] = ..., register_reply: _Optional[_Union[RegisterReply, _Mapping[str, object]]] = ..., unregister_request: _Optional[_Union[UnregisterRequest, _Mapping[str, object]]] = ..., unregister_reply: _Optional[_Union[UnregisterReply, _Mapping[str, object]]] = ..., service_call_request: _Optional[_Union[ServiceCallRequest, _Mapping[str, object]]] = ..., call_reply: _Optional[_Union[CallReply, _Mapping[str, object]]] = ..., subscribe_request: _Optional[_Union[SubscribeRequest, _Mapping[str, object]]] = ..., subscribe_reply: _Optional[_Union[SubscribeReply, _Mapping[str, object]]] = ..., unsubscribe_request: _Optional[_Union[UnsubscribeRequest, _Mapping[str, object]]] = ..., unsubscribe_reply: _Optional[_Union[UnsubscribeReply, _Mapping[str, object]]] = ..., broadcast_request: _Optional[_Union[BroadcastRequest, _Mapping[str, object]]] = ..., broadcast_reply: _Optional[_Union[BroadcastReply, _Mapping[str, object]]] = ..., ping: _Optional[_Union[Ping, _Mapping[str, object]]] = ..., pong: _Optional[_Union[Pong, _Mapping[str, object]]] = ..., call_request: _Optional[_Union[CallRequest, _Mapping[str, object]]] = ..., cancel: _Optional[_Union[Cancel, _Mapping[str, object]]] = ..., credit: _Optional[_Union[Credit, _Mapping[str, object]]] = ..., link_hello: _Optional[_Union[LinkHello, _Mapping[str, object]]] = ..., link_accept: _Optional[_Union[LinkAccept, _Mapping[str, object]]] = ..., link_proof: _Optional[_Union[LinkProof, _Mapping[str, object]]] = ..., announce: _Optional[_Union[Announce, _Mapping[str, object]]] = ..., relay_call: _Optional[_Union[RelayCall, _Mapping[str, object]]] = ...) -> None: ...
