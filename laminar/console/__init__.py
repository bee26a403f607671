"""Interactive debugging of scheduling decisions: one command language for live, simulated and recorded runs (docs/console.md).

    a line ──► language (which command, which arguments) ──► a function of the core (`commands/`) ──► Answer ──► terminal or JSON
                                                                  └─► events, which the target posts to its core

`commands/`, `language`, `subjects`, `view` and `answers` are also imported by the controller, which answers lines of its own run:
they import the core, and nothing that draws.
"""
