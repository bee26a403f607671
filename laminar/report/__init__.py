"""One run as one HTML file: `python -m laminar.report RUN_DIR`. docs/observability.md.

    run.db ──► facts (what is told) ──► page (sections) ──► charts (SVG), markup (escaping) ──► report.html

Invariants:
* The file needs nothing else: no script, no font, no picture from anywhere, so it can be mailed and kept.
* Every text of the run is escaped (`markup`): prompts' data sets, alarms and errors are others' words.
* Nothing here writes to the run that it reads; it may be going on, have ended, or have been killed, at any moment of its life.
"""
