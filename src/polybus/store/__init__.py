"""The store: what durable topics stand on. `contract` says what, each engine how."""
