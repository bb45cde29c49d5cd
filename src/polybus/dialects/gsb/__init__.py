"""GSB: services that register and call each other, over nng's PAIR protocol."""
