"""The reference engine: everything in this process, gone with it, and plain to read.

log.py         a topic: blocks with their run tables, per shard
producers.py   stamps judged, results kept
namespace.py   all that one commit can change together; knows no threads
engine.py      the contract around a namespace: one writing thread, one lock
"""
