"""Durable publish and subscribe on ZeroMQ, beside a bare ROUTER and beside the store alone."""
