"""ya.proto, compiled by .ci/proto.py: do not edit.

The messages are in a pool of their own, so that a program may load another copy of
the same file.
"""

from google.protobuf import descriptor_pool, message_factory

DESCRIPTOR = descriptor_pool.DescriptorPool().AddSerializedFile(
    b'\n polybus/dialects/gsb/ya/ya.proto\x12\x02YA"V\n\x05Hello\x12'
    b'\x12\n\x04name\x18\x01 \x01(\tR\x04name\x12\x18\n\x07version\x18\x02 \x01(\tR\x07version\x12\x1f\n'
    b'\x0binstance_id\x18\x03 \x01(\x0cR\ninstanceId"0\n\x0fRegisterReques'
    b't\x12\x1d\n\nservice_id\x18\x01 \x01(\tR\tserviceId"O\n\rRegisterRepl'
    b'y\x12$\n\x04code\x18\x01 \x01(\x0e2\x10.YA.RegisterCodeR\x04code\x12\x18\n\x07messa'
    b'ge\x18\x02 \x01(\tR\x07message"2\n\x11UnregisterRequest\x12\x1d\n\nservic'
    b'e_id\x18\x01 \x01(\tR\tserviceId"9\n\x0fUnregisterReply\x12&\n\x04code'
    b'\x18\x01 \x01(\x0e2\x12.YA.UnregisterCodeR\x04code"\x8d\x01\n\x0bCallRequest'
    b'\x12\x16\n\x06caller\x18\x01 \x01(\tR\x06caller\x12\x18\n\x07address\x18\x02 \x01(\tR\x07addre'
    b'ss\x12\x1d\n\nrequest_id\x18\x03 \x01(\tR\trequestId\x12\x12\n\x04data\x18\x04 \x01(\x0cR'
    b'\x04data\x12\x19\n\x08no_reply\x18\x05 \x01(\x08R\x07noReply"\x8e\x01\n\tCallReply\x12\x1d'
    b'\n\nrequest_id\x18\x01 \x01(\tR\trequestId\x12 \n\x04code\x18\x02 \x01(\x0e2\x0c.YA'
    b'.CallCodeR\x04code\x12,\n\nreply_type\x18\x03 \x01(\x0e2\r.YA.ReplyTy'
    b'peR\treplyType\x12\x12\n\x04data\x18\x04 \x01(\x0cR\x04data"(\n\x10SubscribeRe'
    b'quest\x12\x14\n\x05topic\x18\x01 \x01(\tR\x05topic"Q\n\x0eSubscribeReply\x12%\n'
    b'\x04code\x18\x01 \x01(\x0e2\x11.YA.SubscribeCodeR\x04code\x12\x18\n\x07message\x18'
    b'\x02 \x01(\tR\x07message"*\n\x12UnsubscribeRequest\x12\x14\n\x05topic\x18\x01 '
    b'\x01(\tR\x05topic";\n\x10UnsubscribeReply\x12\'\n\x04code\x18\x01 \x01(\x0e2\x13.Y'
    b'A.UnsubscribeCodeR\x04code"T\n\x10BroadcastRequest\x12\x16\n\x06c'
    b'aller\x18\x01 \x01(\tR\x06caller\x12\x12\n\x04data\x18\x02 \x01(\x0cR\x04data\x12\x14\n\x05topic'
    b'\x18\x03 \x01(\tR\x05topic"Q\n\x0eBroadcastReply\x12%\n\x04code\x18\x01 \x01(\x0e2\x11.'
    b'YA.BroadcastCodeR\x04code\x12\x18\n\x07message\x18\x02 \x01(\tR\x07message'
    b'"\x06\n\x04Ping"\x06\n\x04Pong"\xf9\x06\n\x06Packet\x12!\n\x05hello\x18\x01 \x01(\x0b2\t.YA.'
    b'HelloH\x00R\x05hello\x12@\n\x10register_request\x18\x02 \x01(\x0b2\x13.YA.Re'
    b'gisterRequestH\x00R\x0fregisterRequest\x12:\n\x0eregister_rep'
    b'ly\x18\x03 \x01(\x0b2\x11.YA.RegisterReplyH\x00R\rregisterReply\x12F\n\x12'
    b'unregister_request\x18\x04 \x01(\x0b2\x15.YA.UnregisterRequestH'
    b'\x00R\x11unregisterRequest\x12@\n\x10unregister_reply\x18\x05 \x01(\x0b2\x13'
    b'.YA.UnregisterReplyH\x00R\x0funregisterReply\x124\n\x0ccall_r'
    b'equest\x18\x06 \x01(\x0b2\x0f.YA.CallRequestH\x00R\x0bcallRequest\x12.\n\n'
    b'call_reply\x18\x07 \x01(\x0b2\r.YA.CallReplyH\x00R\tcallReply\x12C\n\x11'
    b'subscribe_request\x18\x08 \x01(\x0b2\x14.YA.SubscribeRequestH\x00R'
    b'\x10subscribeRequest\x12=\n\x0fsubscribe_reply\x18\t \x01(\x0b2\x12.YA.'
    b'SubscribeReplyH\x00R\x0esubscribeReply\x12I\n\x13unsubscribe_'
    b'request\x18\n \x01(\x0b2\x16.YA.UnsubscribeRequestH\x00R\x12unsubsc'
    b'ribeRequest\x12C\n\x11unsubscribe_reply\x18\x0b \x01(\x0b2\x14.YA.Unsu'
    b'bscribeReplyH\x00R\x10unsubscribeReply\x12C\n\x11broadcast_re'
    b'quest\x18\x0c \x01(\x0b2\x14.YA.BroadcastRequestH\x00R\x10broadcastRe'
    b'quest\x12=\n\x0fbroadcast_reply\x18\r \x01(\x0b2\x12.YA.BroadcastRep'
    b'lyH\x00R\x0ebroadcastReply\x12\x1e\n\x04ping\x18\x0e \x01(\x0b2\x08.YA.PingH\x00R\x04'
    b'ping\x12\x1e\n\x04pong\x18\x0f \x01(\x0b2\x08.YA.PongH\x00R\x04pongB\x06\n\x04kind*R\n\x0c'
    b'RegisterCode\x12\x0f\n\x0bREGISTER_OK\x10\x00\x12\x19\n\x14REGISTER_BAD_RE'
    b'QUEST\x10\x90\x03\x12\x16\n\x11REGISTER_CONFLICT\x10\x99\x03*>\n\x0eUnregisterCo'
    b'de\x12\x11\n\rUNREGISTER_OK\x10\x00\x12\x19\n\x14UNREGISTER_NOT_FOUND\x10\x94\x03'
    b'*A\n\x08CallCode\x12\x0b\n\x07CALL_OK\x10\x00\x12\x15\n\x10CALL_BAD_REQUEST\x10\x90\x03'
    b'\x12\x11\n\x0cCALL_FAILURE\x10\xf4\x03*"\n\tReplyType\x12\x08\n\x04FULL\x10\x00\x12\x0b\n\x07PA'
    b'RTIAL\x10\x01*=\n\rSubscribeCode\x12\x10\n\x0cSUBSCRIBE_OK\x10\x00\x12\x1a\n\x15SU'
    b'BSCRIBE_BAD_REQUEST\x10\x90\x03*A\n\x0fUnsubscribeCode\x12\x12\n\x0eUNS'
    b'UBSCRIBE_OK\x10\x00\x12\x1a\n\x15UNSUBSCRIBE_NOT_FOUND\x10\x94\x03*=\n\rBro'
    b'adcastCode\x12\x10\n\x0cBROADCAST_OK\x10\x00\x12\x1a\n\x15BROADCAST_BAD_RE'
    b'QUEST\x10\x90\x03b\x06proto3'
)

for _name, _message in DESCRIPTOR.message_types_by_name.items():
    globals()[_name] = message_factory.GetMessageClass(_message)
for _enum in DESCRIPTOR.enum_types_by_name.values():
    globals().update({_value.name: _value.number for _value in _enum.values})
