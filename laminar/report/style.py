"""The page's style: the colours of the dashboard, light or dark as the reader's screen is."""

CSS = """
:root { --paper: #fbfaf8; --raised: #ffffff; --ink: #211f1c; --muted: #716c64; --line: #e5e1da; --good: #3f7d4f; --bad: #b3362b;
  --c0: #4f7cac; --c1: #cc8b33; --c2: #4d9078; --c3: #b3596b; --c4: #7b70b5; --c5: #7f9139; color-scheme: light; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #161513; --raised: #1e1c1a; --ink: #ece8e1; --muted: #a09a90; --line: #35322e;
  --good: #74b886; --bad: #e0786d; --c0: #7fa8d1; --c1: #dca052; --c2: #74b89e; --c3: #d08497; --c4: #a39ada; --c5: #a9bb62;
  color-scheme: dark; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1220px; padding: 24px 20px 60px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 18px; margin: 40px 0 10px; }
h3 { font-size: 14px; font-weight: 600; margin: 0 0 6px; }
p { margin: 6px 0; } .muted { color: var(--muted); } .bad { color: var(--bad); } .good { color: var(--good); }
nav { margin: 14px 0; display: flex; flex-wrap: wrap; gap: 4px 16px; } nav a { color: var(--muted); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(185px, 1fr)); gap: 12px; margin: 18px 0; }
.card, .chart { background: var(--raised); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; }
.card b { display: block; font-size: 19px; font-weight: 600; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 430px), 1fr)); gap: 14px; }
.wide { grid-column: 1 / -1; }
svg { display: block; width: 100%; height: auto; } svg text { font-size: 10.5px; fill: var(--muted); }
.grid { stroke: var(--line); stroke-width: 1; } .line { fill: none; stroke-width: 1.5; stroke-linejoin: round; }
.band { fill: var(--c0); opacity: 0.16; } .work { fill: var(--muted); }
.line.c0 { stroke: var(--c0); } .line.c1 { stroke: var(--c1); } .line.c2 { stroke: var(--c2); } .line.c3 { stroke: var(--c3); }
.line.c4 { stroke: var(--c4); } .line.c5 { stroke: var(--c5); }
.fill.c0, .dot.c0 { fill: var(--c0); } .fill.c1, .dot.c1 { fill: var(--c1); } .fill.c2, .dot.c2 { fill: var(--c2); }
.fill.c3, .dot.c3 { fill: var(--c3); } .fill.c4, .dot.c4 { fill: var(--c4); } .fill.c5, .dot.c5 { fill: var(--c5); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px; }
.key { display: inline-block; width: 12px; height: 3px; margin: 0 6px 3px 0; border-radius: 2px; }
.key.c0 { background: var(--c0); } .key.c1 { background: var(--c1); } .key.c2 { background: var(--c2); }
.key.c3 { background: var(--c3); } .key.c4 { background: var(--c4); } .key.c5 { background: var(--c5); }
.scrolls { overflow-x: auto; margin-top: 14px; } table { border-collapse: collapse; font-size: 13.5px; width: 100%; }
th, td { text-align: left; padding: 4px 10px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--muted); font-weight: 500; } .number { text-align: right; font-variant-numeric: tabular-nums; }
td { overflow-wrap: anywhere; } .parts { width: 160px; } .scrolls + h3 { margin-top: 16px; }
code, pre { font: 12.5px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; } pre { white-space: pre-wrap; margin: 0; }
details { margin: 8px 0; } summary { cursor: pointer; color: var(--muted); }
@media print { body { max-width: none; } .card, .chart { break-inside: avoid; } }
"""
