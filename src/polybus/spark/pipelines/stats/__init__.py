"""The pipeline `stats`: partial sums of each batch, from them tables, and a report."""
