"""Whole runs in virtual time: the real core in a world of cost models. `python -m laminar.sim --help`."""
