"""Two checkouts of the repository, measured in turn by their own benchmarks."""
