"""`lmdb:PATH`: the engine on one machine's disk. `engine.py` is its face."""
