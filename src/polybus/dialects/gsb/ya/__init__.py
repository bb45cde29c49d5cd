"""The framing of the deployed Golem service bus, for its existing clients: `gsb+ya=ADDRESS`.

session.py       one connection: the rules of GSB, in other packets
codec.py         packets, and the failures of calls in both protocols
ya_address.py    service names and addresses of that bus, as those of this one
ya_packets.pyx   broadcasts to its subscribers
ya.proto         its packets
"""
