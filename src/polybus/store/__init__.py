"""The store below durable topics: its contract, the engine registry and the engines."""
