"""The sink of `format("polybus")`: staged writes that one publish makes visible."""
