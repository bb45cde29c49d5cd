"""What every benchmark shares: programs, load, quiet rounds, tables, targets."""
