"""A time range of a recorded run as a trace for Perfetto: `python -m laminar.trace RUN_DIR`. docs/observability.md.

    run.db ──► records (what happened in the range) ──► timeline (lanes of processes) ──► chrome (JSON)

Invariants:
* Nothing here writes to the run that it reads; the run may go on meanwhile.
* What is shown is in the database: the totals of a trace are those of the metrics.
"""
