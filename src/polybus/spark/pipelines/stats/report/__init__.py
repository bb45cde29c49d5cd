"""A report as one HTML file: plots are inline SVG, nothing is fetched, no script runs.

histogram.py   counts in buckets that merge: sizes and times, as Spark counts them
figures.py     what is shown: plain values, made from the Parquet files of `stats`
scales.py      round numbers along an axis; sizes, times and counts as people write them
svg.py         elements of SVG, escaped
lines.py       a plot over time;  bars.py  bars side by side
sections.py    what is said of one topic;  page.py  all of it, with its style
"""
