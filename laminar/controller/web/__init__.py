"""The dashboard: what the controller shows of a run in a browser. docs/dashboard.md.

    events ──► lanes, journal ─┐
    core ──────────────────────┴─► board ──► stream ──► static/*.js     twice a second, only what has changed
    run.db, tokens ──► past, detail ───────► static/*.js                 when somebody looks

Invariants:
* Nothing here decides, and nothing here changes the core.
* The event loop is never held up: what grows with the run is done in slices or in threads, everything that is kept is bounded.
* A client that is slow gets less, not later: there is no queue of what it has not read.
"""
