"""The benchmark of Freud: one at a time beside an echo and D-Bus, and pipelined by itself."""
