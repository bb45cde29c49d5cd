"""The network of buses: nodes, the links between them, and calls over several hops.

node_key.py        the key of a node: its id, signatures, TLS certificate and shared secrets
announcement.py    the keys and the neighbours of a node, signed by the node
topology.py        the announcements of all nodes, and the shortest paths
link_handshake.py  each end of a link proves the key of its node
link.py            one link: its packets, from the handshake to the end
link_dialler.py    dials other buses, and again after a link ends; link_admin.py: its commands
call_keys.py       calls are signed for their target
network.py         links, announcements, and calls between nodes
node_rules.py      changes of rules by other nodes
channels.py        topics of other nodes; bus_pipe.py: connections of the bus with itself
"""
