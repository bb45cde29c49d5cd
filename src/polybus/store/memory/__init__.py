"""The engine of `memory:`, the reference engine: data lives and ends with the process.

memory_log.py         a topic: blocks with their run tables, per shard
memory_producers.py   stamps and results
namespace.py          everything that one commit can change; no threads
memory_store.py       the contract around a namespace: one writer thread, one lock
memory_engine.py      opens private and shared stores
"""
