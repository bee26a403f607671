"""Asking the controller of a run from another process: where it is, with which token, and what is wrong if it does not answer."""

import http.client
import os
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import urlsplit

from laminar.controller import loopwatch
from laminar.controller.rundir import RunDirectory
from laminar.errors import ConfigError
from laminar.processes import TOKEN

TIMEOUT_S = 15.0  # the slowest question gives the workers two seconds to answer


class Address(NamedTuple):
    """A controller to ask."""

    url: str
    token: str
    run: RunDirectory | None = None
    """Where it runs, if that is known."""

    @classmethod
    def of_run(cls, run: RunDirectory) -> Self:
        """Raises ConfigError when none runs there."""
        try:
            return cls(run.url.read_text().strip(), run.token.read_text().strip(), run)
        except OSError:
            raise ConfigError(f"no controller runs in {run.path}: the run is over, or has not begun") from None

    @classmethod
    def of_url(cls, url: str) -> Self:
        """Its token is in the environment, as a worker's. Raises ConfigError."""
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ConfigError(f"{url!r} is no URL of a controller: write, for example, http://127.0.0.1:8000")
        token = os.environ.get(TOKEN, "")
        if not token:
            raise ConfigError(
                f"{TOKEN} must hold the token of the run at {url}: it is in the file `token` of its directory"
            )
        return cls(url.rstrip("/"), token)


def ask(address: Address, method: str, path: str, body: bytes | None = None) -> bytes:
    """The body of the answer. Raises ConfigError when there is none, or it is a refusal."""
    where = urlsplit(address.url)
    kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
    connection = kind(where.hostname or "", where.port, timeout=TIMEOUT_S)
    try:
        connection.request(method, path, body, headers={"Authorization": f"Bearer {address.token}"})
        answer = connection.getresponse()
        found = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise ConfigError(_no_answer(address, error)) from error
    finally:
        connection.close()
    if answer.status != 200:
        said = found[:300].decode(errors="replace")
        raise ConfigError(f"the controller at {address.url} refused (HTTP {answer.status}): {said}")
    return found


def _no_answer(address: Address, error: Exception) -> str:
    run, url = address.run, address.url
    if isinstance(error, TimeoutError):
        blocked = (run.logs if run else Path("logs")) / loopwatch.FILE
        return (
            f"the controller at {url} does not answer within {TIMEOUT_S:g} s: its process is stopped, or its event loop is "
            f"blocked, and then {blocked} says in what"
        )
    then = f"if it died, go on with --resume {run.path}" if run else "is that its address, and does it run?"
    return f"no controller answers at {url} ({error}): {then}"
