"""Benchmarks: each one beside its peers, as ratios within one run.

`harness/` is what every benchmark shares, `load/` the load generator in C, `peers/` the servers
that are measured, and each further folder is one benchmark: its cases, its targets, its order of
work.
"""
