"""Laminar: asynchronous RL post-training of language models, one trajectory at a time."""

__version__ = "0.1.0"
