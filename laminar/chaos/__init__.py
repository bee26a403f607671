"""Faults in a real run, and a report of what they cost: `python -m laminar.chaos --help`, docs/chaos.md.

    plan ──► injector ──► kinds ──► harm ──► processes, sockets, disk, shared memory of the run
                │   ▲
       chaos.jsonl  └── run.db (what the controller saw: `signs`)
                └──► evidence (the log through the core again) ──► outcomes, invariants ──► report

What is judged is read from `run.db` and `chaos.jsonl` alone, so a report can be made again, of a run that is long over.
"""
