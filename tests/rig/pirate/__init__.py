"""Does pirate keep its word? The wire once more, a model, a lossy proxy, and a verdict.

wire.py          requests and replies as frames; shares no code with the server's codec
model.py         what the server must answer, as a plain state machine
modelserver.py   that model behind a ROUTER: an in-memory server to try clients on
bare.py          a client of bare pyzmq that says whatever it is told to
proxy.py         whole messages dropped, doubled, delayed, reordered; connections cut, stalled
witness.py       reads every topic over an honest line: what really is in them
crew.py          clients that do this and that, and write down what they were told
children.py      the same as processes that may be killed
verdict.py       compares what they wrote down with what the witness saw
rounds.py        a bus, its clients, what is done to them, and the verdict
"""
