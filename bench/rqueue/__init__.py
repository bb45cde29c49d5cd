"""The rqueue benchmark: push pub/sub beside nats-server, redis, a ZeroMQ proxy and a raw relay."""
