"""What a run recorded, through the scheduling core again: compared, questioned, and simulated otherwise. docs/replay.md.

    run.db ──► recording (lives, settings) ──► playback (a core at any event) ──► verify, shadow
                                                                             └──► rates, meter ──► model ──► whatif, forecast

Invariant: nothing here writes to the run that it reads; the run may go on meanwhile.
"""
