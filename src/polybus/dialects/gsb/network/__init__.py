"""The network of buses: nodes, the links between them, and calls over several hops.

node_key.py       the key of a node: its id, signatures, TLS certificate and shared secrets
announcement.py   what a node says of itself: its keys and its neighbours, signed
topology.py       the announcements of all nodes, and the shortest paths
"""
