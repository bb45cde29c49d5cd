"""The look of a report, on a light and on a dark screen, and on paper."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root { color-scheme: light dark; --ink: #1c2430; --dim: #667085; --line: #e3e6ec; --card: #fff;
  --page: #f6f7f9; --c0: #2f6fde; --c1: #e08a1e; --c2: #c2385a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --dim: #98a2b3; --line: #2d3440;
  --card: #1a1f27; --page: #12161c; --c0: #6ea2ff; --c1: #f0b05a; --c2: #f07a95; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 28px; max-width: 1280px; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 24px; margin: 0; }
h2 { font-size: 19px; margin: 36px 0 12px; overflow-wrap: anywhere; }
.note { color: var(--dim); font-size: 13px; margin: 4px 0 0; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 20px 0; }
.tiles div, figure, .wide { background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; }
.tiles div { padding: 12px 18px; }
.tiles b { display: block; font-size: 20px; font-variant-numeric: tabular-nums; }
.tiles span { color: var(--dim); font-size: 13px; }
.wide { overflow-x: auto; padding: 6px 12px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(520px, 100%), 1fr));
  gap: 14px; }
figure { margin: 0; padding: 14px 16px; overflow-x: auto; break-inside: avoid; }
figcaption { font-weight: 600; margin-bottom: 8px; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-size: 13px;
  font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--dim); font-weight: 500; white-space: nowrap; }
th, td { padding: 6px 10px 6px 0; border-bottom: 1px solid var(--line); vertical-align: middle; }
tr:last-child td { border-bottom: 0; }
td:first-child { max-width: 260px; overflow-wrap: anywhere; }
td svg { width: 120px; height: 22px; display: block; }
a { color: var(--c0); text-decoration: none; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--dim); font-size: 11px; }
svg line { stroke: var(--dim); } svg line.grid { stroke: var(--line); }
.s0 { --c: var(--c0); } .s1 { --c: var(--c1); } .s2 { --c: var(--c2); }
.line { fill: none; stroke: var(--c); stroke-width: 1.6; stroke-linejoin: round; }
.area { fill: var(--c); opacity: .13; }
.dot, .bar { fill: var(--c); } .bar { opacity: .85; } .bar:hover { opacity: 1; }
.hit { fill: transparent; } .hit:hover { fill: var(--dim); opacity: .2; }
.legend { display: flex; gap: 16px; font-size: 13px; color: var(--dim); }
.legend i { display: inline-block; width: 14px; height: 3px; margin-right: 6px;
  background: var(--c); vertical-align: middle; }
@media print { body { background: none; padding: 0; } }
"""
