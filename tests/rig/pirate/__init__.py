"""Tools to test pirate's guarantees: a second codec, a model, a lossy proxy, kills, a verdict.

wire.py            requests and replies as frames; shares no code with the codec of the package
zmtp.py            ZMTP as bytes, for peers that break the protocol
model.py           the answers of a server, as a plain state machine
model_server.py    that model behind a ROUTER: an in-memory server for tests of clients
pirate_bus.py      a real bus that can be stopped, killed and started again
zmq_client.py      a client of plain pyzmq that sends any given frames
polybus_client.py  the client of the package, with the same interface
random_client.py   clients with random requests, and a history of their answers
clients.py         the same as processes that may be killed
kill_points.py     kills a client at a named point of its code
gate.py            a proxy that holds back messages until the test releases them
lossy_proxy.py     drops, doubles, delays and reorders whole messages; cuts connections
topic_reader.py    reads every topic over a reliable connection
verdict.py         compares the histories with the topics
lossy_round.py     a round with the lossy proxy
kill_round.py      a round of kills
"""
