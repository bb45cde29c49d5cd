"""Tables over archive and log."""
