"""gsb.proto, compiled by .ci/proto.py: do not edit.

The messages are in a pool of their own, so that a program may load another copy of
the same file.
"""

from google.protobuf import descriptor_pool, message_factory

DESCRIPTOR = descriptor_pool.DescriptorPool().AddSerializedFile(
    b'\n\x1epolybus/dialects/gsb/gsb.proto\x12\x07GSB_API"0\n\x0fReg'
    b'isterRequest\x12\x1d\n\nservice_id\x18\x01 \x01(\tR\tserviceId"Y\n\rR'
    b"egisterReply\x12.\n\x04code\x18\x01 \x01(\x0e2\x1a.GSB_API.RegisterRep"
    b'lyCodeR\x04code\x12\x18\n\x07message\x18\x02 \x01(\tR\x07message"a\n\x12Servic'
    b"eCallRequest\x12\x18\n\x07address\x18\x01 \x01(\tR\x07address\x12\x1d\n\nreques"
    b't_id\x18\x02 \x01(\tR\trequestId\x12\x12\n\x04data\x18\x03 \x01(\x0cR\x04data"r\n\x0bCal'
    b"lRequest\x12\x1d\n\nrequest_id\x18\x01 \x01(\tR\trequestId\x12\x12\n\x04data\x18"
    b"\x02 \x01(\x0cR\x04data\x12\x16\n\x06caller\x18\x03 \x01(\tR\x06caller\x12\x18\n\x07address\x18\x04"
    b' \x01(\tR\x07address"\x9c\x01\n\tCallReply\x12\x1d\n\nrequest_id\x18\x01 \x01(\tR'
    b"\trequestId\x12-\n\x04code\x18\x02 \x01(\x0e2\x19.GSB_API.ServiceReplyC"
    b"odeR\x04code\x12-\n\x04type\x18\x03 \x01(\x0e2\x19.GSB_API.ServiceReplyTy"
    b'peR\x04type\x12\x12\n\x04data\x18\x04 \x01(\x0cR\x04data"o\n\x05Hello\x12\x17\n\x07node_id'
    b"\x18\x01 \x01(\tR\x06nodeId\x12\x1f\n\x0bdeadline_ms\x18\x02 \x01(\rR\ndeadlineMs\x12"
    b'\x18\n\x07credits\x18\x03 \x01(\x08R\x07credits\x12\x12\n\x04ping\x18\x04 \x01(\x08R\x04ping"2\n'
    b"\x11UnregisterRequest\x12\x1d\n\nservice_id\x18\x01 \x01(\tR\tserviceI"
    b'd"?\n\x0fUnregisterReply\x12\x12\n\x04code\x18\x01 \x01(\x05R\x04code\x12\x18\n\x07mess'
    b'age\x18\x02 \x01(\tR\x07message"(\n\x10SubscribeRequest\x12\x14\n\x05topic\x18'
    b'\x01 \x01(\tR\x05topic">\n\x0eSubscribeReply\x12\x12\n\x04code\x18\x01 \x01(\x05R\x04co'
    b'de\x12\x18\n\x07message\x18\x02 \x01(\tR\x07message"*\n\x12UnsubscribeReque'
    b'st\x12\x14\n\x05topic\x18\x01 \x01(\tR\x05topic"@\n\x10UnsubscribeReply\x12\x12\n\x04'
    b'code\x18\x01 \x01(\x05R\x04code\x12\x18\n\x07message\x18\x02 \x01(\tR\x07message"T\n\x10Br'
    b"oadcastRequest\x12\x14\n\x05topic\x18\x01 \x01(\tR\x05topic\x12\x12\n\x04data\x18\x02 \x01"
    b'(\x0cR\x04data\x12\x16\n\x06caller\x18\x03 \x01(\tR\x06caller">\n\x0eBroadcastRep'
    b"ly\x12\x12\n\x04code\x18\x01 \x01(\x05R\x04code\x12\x18\n\x07message\x18\x02 \x01(\tR\x07message"
    b'"\x1c\n\x04Ping\x12\x14\n\x05token\x18\x01 \x01(\x0cR\x05token"\x1c\n\x04Pong\x12\x14\n\x05token\x18'
    b"\x01 \x01(\x0cR\x05token\"'\n\x06Cancel\x12\x1d\n\nrequest_id\x18\x01 \x01(\tR\trequ"
    b'estId"A\n\x06Credit\x12\x1d\n\nrequest_id\x18\x01 \x01(\tR\trequestId\x12\x18'
    b'\n\x07replies\x18\x02 \x01(\rR\x07replies"\xeb\x08\n\x06Packet\x12&\n\x05hello\x18\x01 \x01'
    b"(\x0b2\x0e.GSB_API.HelloH\x00R\x05hello\x12E\n\x10register_request\x18"
    b"\x02 \x01(\x0b2\x18.GSB_API.RegisterRequestH\x00R\x0fregisterReque"
    b"st\x12?\n\x0eregister_reply\x18\x03 \x01(\x0b2\x16.GSB_API.RegisterRep"
    b"lyH\x00R\rregisterReply\x12K\n\x12unregister_request\x18\x04 \x01(\x0b2"
    b"\x1a.GSB_API.UnregisterRequestH\x00R\x11unregisterRequest"
    b"\x12E\n\x10unregister_reply\x18\x05 \x01(\x0b2\x18.GSB_API.UnregisterR"
    b"eplyH\x00R\x0funregisterReply\x12O\n\x14service_call_request\x18"
    b"\x06 \x01(\x0b2\x1b.GSB_API.ServiceCallRequestH\x00R\x12serviceCal"
    b"lRequest\x123\n\ncall_reply\x18\x07 \x01(\x0b2\x12.GSB_API.CallReply"
    b"H\x00R\tcallReply\x12H\n\x11subscribe_request\x18\x08 \x01(\x0b2\x19.GSB_A"
    b"PI.SubscribeRequestH\x00R\x10subscribeRequest\x12B\n\x0fsubsc"
    b"ribe_reply\x18\t \x01(\x0b2\x17.GSB_API.SubscribeReplyH\x00R\x0esub"
    b"scribeReply\x12N\n\x13unsubscribe_request\x18\n \x01(\x0b2\x1b.GSB_A"
    b"PI.UnsubscribeRequestH\x00R\x12unsubscribeRequest\x12H\n\x11u"
    b"nsubscribe_reply\x18\x0b \x01(\x0b2\x19.GSB_API.UnsubscribeRepl"
    b"yH\x00R\x10unsubscribeReply\x12H\n\x11broadcast_request\x18\x0c \x01(\x0b"
    b"2\x19.GSB_API.BroadcastRequestH\x00R\x10broadcastRequest\x12"
    b"B\n\x0fbroadcast_reply\x18\r \x01(\x0b2\x17.GSB_API.BroadcastRepl"
    b"yH\x00R\x0ebroadcastReply\x12#\n\x04ping\x18\x0e \x01(\x0b2\r.GSB_API.Ping"
    b"H\x00R\x04ping\x12#\n\x04pong\x18\x0f \x01(\x0b2\r.GSB_API.PongH\x00R\x04pong\x129\n"
    b"\x0ccall_request\x18\x10 \x01(\x0b2\x14.GSB_API.CallRequestH\x00R\x0bcal"
    b"lRequest\x12)\n\x06cancel\x18\x11 \x01(\x0b2\x0f.GSB_API.CancelH\x00R\x06can"
    b"cel\x12)\n\x06credit\x18\x12 \x01(\x0b2\x0f.GSB_API.CreditH\x00R\x06creditB\x06"
    b"\n\x04kind*U\n\x11RegisterReplyCode\x12\x0f\n\x0bREGISTER_OK\x10\x00\x12\x10\n\x0b"
    b"BAD_REQUEST\x10\x90\x03\x12\x0e\n\tFORBIDDEN\x10\x93\x03\x12\r\n\x08CONFLICT\x10\x99\x03*5\n"
    b"\x10ServiceReplyCode\x12\x0b\n\x07CALL_OK\x10\x00\x12\x14\n\x0fSERVICE_FAILUR"
    b"E\x10\xf4\x03*)\n\x10ServiceReplyType\x12\x08\n\x04FULL\x10\x00\x12\x0b\n\x07PARTIAL\x10\x01b"
    b"\x06proto3"
)

for _name, _message in DESCRIPTOR.message_types_by_name.items():
    globals()[_name] = message_factory.GetMessageClass(_message)
for _enum in DESCRIPTOR.enum_types_by_name.values():
    globals().update({_value.name: _value.number for _value in _enum.values})
