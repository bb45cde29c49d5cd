from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REGISTER_OK: _ClassVar[RegisterCode]
    REGISTER_BAD_REQUEST: _ClassVar[RegisterCode]
    REGISTER_CONFLICT: _ClassVar[RegisterCode]

class UnregisterCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNREGISTER_OK: _ClassVar[UnregisterCode]
    UNREGISTER_NOT_FOUND: _ClassVar[UnregisterCode]

class CallCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CALL_OK: _ClassVar[CallCode]
    CALL_BAD_REQUEST: _ClassVar[CallCode]
    CALL_FAILURE: _ClassVar[CallCode]

class ReplyType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FULL: _ClassVar[ReplyType]
    PARTIAL: _ClassVar[ReplyType]

class SubscribeCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SUBSCRIBE_OK: _ClassVar[SubscribeCode]
    SUBSCRIBE_BAD_REQUEST: _ClassVar[SubscribeCode]

class UnsubscribeCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNSUBSCRIBE_OK: _ClassVar[UnsubscribeCode]
    UNSUBSCRIBE_NOT_FOUND: _ClassVar[UnsubscribeCode]

class BroadcastCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BROADCAST_OK: _ClassVar[BroadcastCode]
    BROADCAST_BAD_REQUEST: _ClassVar[BroadcastCode]
REGISTER_OK: RegisterCode
REGISTER_BAD_REQUEST: RegisterCode
REGISTER_CONFLICT: RegisterCode
UNREGISTER_OK: UnregisterCode
UNREGISTER_NOT_FOUND: UnregisterCode
CALL_OK: CallCode
CALL_BAD_REQUEST: CallCode
CALL_FAILURE: CallCode
FULL: ReplyType
PARTIAL: ReplyType
SUBSCRIBE_OK: SubscribeCode
SUBSCRIBE_BAD_REQUEST: SubscribeCode
UNSUBSCRIBE_OK: UnsubscribeCode
UNSUBSCRIBE_NOT_FOUND: UnsubscribeCode
BROADCAST_OK: BroadcastCode
BROADCAST_BAD_REQUEST: BroadcastCode

class Hello(_message.Message):
    __slots__ = ("name", "version", "instance_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    instance_id: bytes
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., instance_id: _Optional[bytes] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("service_id",)
    SERVICE_ID_FIELD_NUMBER: _ClassVar[int]
    service_id: str
    def __init__(self, service_id: _Optional[str] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: RegisterCode
    message: str
    def __init__(self, code: _Optional[_Union[RegisterCode, str]] = ..., message: _Optional[str] = ...) -> None: ...

class UnregisterRequest(_message.Message):
    __slots__ = ("service_id",)
    SERVICE_ID_FIELD_NUMBER: _ClassVar[int]
    service_id: str
    def __init__(self, service_id: _Optional[str] = ...) -> None: ...

class UnregisterReply(_message.Message):
    __slots__ = ("code",)
    CODE_FIELD_NUMBER: _ClassVar[int]
    code: UnregisterCode
    def __init__(self, code: _Optional[_Union[UnregisterCode, str]] = ...) -> None: ...

class CallRequest(_message.Message):
    __slots__ = ("caller", "address", "request_id", "data", "no_reply")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    NO_REPLY_FIELD_NUMBER: _ClassVar[int]
    caller: str
    address: str
    request_id: str
    data: bytes
    no_reply: bool
    def __init__(self, caller: _Optional[str] = ..., address: _Optional[str] = ..., request_id: _Optional[str] = ..., data: _Optional[bytes] = ..., no_reply: _Optional[bool] = ...) -> None: ...

class CallReply(_message.Message):
    __slots__ = ("request_id", "code", "reply_type", "data")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REPLY_TYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    code: CallCode
    reply_type: ReplyType
    data: bytes
    def __init__(self, request_id: _Optional[str] = ..., code: _Optional[_Union[CallCode, str]] = ..., reply_type: _Optional[_Union[ReplyType, str]] = ..., data: _Optional[bytes] = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class SubscribeReply(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: SubscribeCode
    message: str
    def __init__(self, code: _Optional[_Union[SubscribeCode, str]] = ..., message: _Optional[str] = ...) -> None: ...

class UnsubscribeRequest(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class UnsubscribeReply(_message.Message):
    __slots__ = ("code",)
    CODE_FIELD_NUMBER: _ClassVar[int]
    code: UnsubscribeCode
    def __init__(self, code: _Optional[_Union[UnsubscribeCode, str]] = ...) -> None: ...

class BroadcastRequest(_message.Message):
    __slots__ = ("caller", "data", "topic")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    caller: str
    data: bytes
    topic: str
    def __init__(self, caller: _Optional[str] = ..., data: _Optional[bytes] = ..., topic: _Optional[str] = ...) -> None: ...

class BroadcastReply(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: BroadcastCode
    message: str
    def __init__(self, code: _Optional[_Union[BroadcastCode, str]] = ..., message: _Optional[str] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Pong(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Packet(_message.Message):
    __slots__ = ("hello", "register_request", "register_reply", "unregister_request", "unregister_reply", "call_request", "call_reply", "subscribe_request", "subscribe_reply", "unsubscribe_request", "unsubscribe_reply", "broadcast_request", "broadcast_reply", "ping", "pong")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REGISTER_REQUEST_FIELD_NUMBER: _ClassVar[int]
    REGISTER_REPLY_FIELD_NUMBER: _ClassVar[int]
    UNREGISTER_REQUEST_FIELD_NUMBER: _ClassVar[int]
    UNREGISTER_REPLY_FIELD_NUMBER: _ClassVar[int]
    CALL_REQUEST_FIELD_NUMBER: _ClassVar[int]
    CALL_REPLY_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBE_REPLY_FIELD_NUMBER: _ClassVar[int]
    UNSUBSCRIBE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    UNSUBSCRIBE_REPLY_FIELD_NUMBER: _ClassVar[int]
    BROADCAST_REQUEST_FIELD_NUMBER: _ClassVar[int]
    BROADCAST_REPLY_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    register_request: RegisterRequest
    register_reply: RegisterReply
    unregister_request: UnregisterRequest
    unregister_reply: UnregisterReply
    call_request: CallRequest
    call_reply: CallReply
    subscribe_request: SubscribeRequest
    subscribe_reply: SubscribeReply
    unsubscribe_request: UnsubscribeRequest
    unsubscribe_reply: UnsubscribeReply
    broadcast_request: BroadcastRequest
    broadcast_reply: BroadcastReply
    ping: Ping
    pong: Pong
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping[str, object]]] = ..., register_request: _Optional[_Union[RegisterRequest, _Mapping[str, object]]] = ..., register_reply: _Optional[_Union[RegisterReply, _Mapping[str, object]]] = ..., unregister_request: _Optional[_Union[UnregisterRequest, _Mapping[str, object]]] = ..., unregister_reply: _Optional[_Union[UnregisterReply, _Mapping[str, object]]] = ..., call_request: _Optional[_Union[CallRequest, _Mapping[str, object]]] = ..., call_reply: _Optional[_Union[CallReply, _Mapping[str, object]]] = ..., subscribe_request: _Optional[_Union[SubscribeRequest, _Mapping[str, object]]] = ..., subscribe_reply: _Optional[_Union[SubscribeReply, _Mapping[str, object]]] = ..., unsubscribe_request: _Optional[_Union[UnsubscribeRequest, _Mapping[str, object]]] = ..., unsubscribe_reply: _Optional[_Union[UnsubscribeReply, _Mapping[str, object]]] = ..., broadcast_request: _Optional[_Union[BroadcastRequest, _Mapping[str, object]]] = ..., broadcast_reply: _Optional[_Union[BroadcastReply, _Mapping[str, object]]] = ..., ping: _Optional[_Union[Ping, _Mapping[str, object]]] = ..., pong: _Optional[_Union[Pong, _Mapping[str, object]]] = ...) -> None: ...
