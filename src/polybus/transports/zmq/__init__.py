"""ZeroMQ: identities and memory bounds of a ROUTER's connections, and ZAP."""
