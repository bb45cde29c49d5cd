"""The source of `format("polybus")`: batch and stream readers of durable topics."""
