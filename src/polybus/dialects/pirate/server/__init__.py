"""The server side of pirate: durable subscribers, which receive each message once, in order.

    client         an id that the client chose; its epochs (one per start) and its counter
    counter        one stamp per change, checked in the same commit as the change
    subscription   a client and a topic, with LAST, the position of the reader
    retention      messages that every subscriber and every group has read are trimmed

Everything runs on the loop, except blocking calls on `workers`. All state is in the store (see
`subscriber_records`) and is loaded from there.
"""
