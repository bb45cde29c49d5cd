"""The report as one HTML file: plots are inline SVG, nothing is fetched, no script runs.

histogram.py         counts in buckets that can be merged: sizes and times
report_data.py       the values of a report, made from the tables of `stats`
axis_scales.py       round numbers on an axis; sizes, times and counts as text
plots.py             SVG elements, plots over time, bars
report_sections.py   the section of one topic
report_page.py       the page with its style
"""
