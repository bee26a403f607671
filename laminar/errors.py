"""Errors that a person can act on. Each message says what happened, where, and what to do."""


class LaminarError(Exception):
    """Base of all errors that Laminar raises on purpose."""


class ConfigError(LaminarError):
    """The user's configuration, hosts file or command line is wrong."""


class StartError(LaminarError):
    """A part of the run could not start (port taken, worker died, model missing)."""


class ProtocolError(LaminarError):
    """A peer sent something that the wire protocol does not allow; the channel is closed."""
