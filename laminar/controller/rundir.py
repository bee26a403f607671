"""The directory that a run leaves: making it, finding it again, its token."""

import contextlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from laminar import checkpoints, configfile
from laminar.config import Config
from laminar.controller.runlock import RunLock
from laminar.errors import ConfigError, StartError
from laminar.remote import Answer

SHORT_CHARACTERS_MAX = 40  # of the data set's name in a run's name
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


class RunDirectory:
    """Paths of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_new = False
        """Whether this process made the directory."""

    @property
    def name(self) -> str:
        return self.path.name

    def id_of(self, boot: int) -> str:
        """Names what a process of this run makes on its hosts, so that two runs of a name do not meet."""
        return f"{re.sub('[^A-Za-z0-9_]', '_', self.name[:40])}-{os.getpid()}-{boot}"

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def hosts(self) -> Path:
        return self.path / "hosts.txt"

    @property
    def database(self) -> Path:
        return self.path / "run.db"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def tokens(self) -> Path:
        return self.path / "tokens"

    @property
    def archive(self) -> Path:
        """Tokens of what was trained, if that is wanted."""
        return self.path / "archive"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def url(self) -> Path:
        """Holds where the controller is reached."""
        return self.path / "url"

    @property
    def found(self) -> Path:
        """Holds what the check of other hosts found."""
        return self.path / "found.json"

    @property
    def token(self) -> Path:
        return self.path / "token"

    def unreadable(self) -> str:
        """Why its database cannot be read, and what to do; empty = it can."""
        import sqlite3  # only here: the command line loads little

        access = (
            sqlite3.SQLITE_CANTOPEN,
            sqlite3.SQLITE_PERM,
            sqlite3.SQLITE_READONLY,
            sqlite3.SQLITE_BUSY,
            sqlite3.SQLITE_IOERR,
        )

        try:
            with contextlib.closing(sqlite3.connect(f"{self.database.as_uri()}?mode=ro", uri=True)) as connection:
                connection.execute("SELECT max(boot) FROM boots").fetchone()
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in access:
                yours = "is its directory there, with all files, and yours to write?"
                return f"the log {self.database} cannot be read ({error}): {yours}"
            return (
                f"the log {self.database} is damaged ({error}); go on from the last checkpoint with --from-checkpoint"
            )
        return ""

    def has_begun(self) -> bool:
        """Whether there is anything to go on from: a checkpoint, a step, or a controller that was killed. True if that cannot be
        known."""
        import sqlite3

        if self.last_checkpoint() is not None or self.is_interrupted:
            return True
        try:
            with contextlib.closing(sqlite3.connect(f"{self.database.as_uri()}?mode=ro", uri=True)) as connection:
                return connection.execute("SELECT 1 FROM metrics LIMIT 1").fetchone() is not None
        except sqlite3.Error:
            return True

    @property
    def is_interrupted(self) -> bool:
        """The last controller of this run ended without a word: killed, or its machine died. False if that cannot be read."""
        import sqlite3  # only here: the command line loads little

        try:
            with contextlib.closing(sqlite3.connect(f"{self.database.as_uri()}?mode=ro", uri=True)) as connection:
                last = connection.execute("SELECT outcome FROM boots ORDER BY boot DESC LIMIT 1").fetchone()
                (num_snapshots,) = connection.execute("SELECT count(*) FROM snapshots").fetchone()
        except sqlite3.Error:
            return False
        return last is not None and last[0] is None and num_snapshots > 0

    def last_checkpoint(self) -> Path | None:
        """The newest complete checkpoint."""
        found = checkpoints.complete(self.checkpoints)
        return found[-1] if found else None


def create(config: Config, hosts_text: str, say: Callable[[str], None] = print) -> RunDirectory:
    """Make the directory of a new run, or take that of one that ended before its first step.

    Raises ConfigError if the name is taken, StartError if it cannot be written.
    """
    name = config.run.name or f"{_short(config.task.dataset)}-{time.strftime('%Y%m%d-%H%M%S')}"
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"run.name = {name!r}: a plain directory name is expected: letters, digits, '.', '_' and '-', not a dot first"
        )
    run = RunDirectory((Path(config.run.dir) / name).absolute())
    run.is_new = not os.path.lexists(run.path)
    if os.path.lexists(run.database):
        if run.has_begun():
            raise ConfigError(
                f"the run {run.path} exists; resume it with --resume {run.path}, or choose another run.name"
            )
        _use_again(run)
        say(
            f"{run.path}: a run of this name ended before its first step; its directory is used again, logs are added to"
        )
    resolved = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, name=name))
    _write(run, resolved, hosts_text)
    return run


def _use_again(run: RunDirectory) -> None:
    """Everything but logs goes. Raises StartError if another controller has the run."""
    lock = RunLock(run.database)
    lock.take(os.getpid(), socket.gethostname())
    try:
        for path in (
            run.metrics,
            run.url,
            run.found,
            *run.tokens.glob("*.seg"),
            *run.path.glob(f"{run.database.name}*"),
        ):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise StartError(f"cannot clear the run's directory {run.path}: {error}") from error
    finally:
        lock.release()


def discard(run: RunDirectory) -> str:
    """Remove the directory of a run that could not start, unless others made it or workers wrote to it: what became of it."""
    if not run.is_new or any(not path.name.startswith("controller") for path in run.logs.glob("*")):
        return f"logs are in {run.logs}; another start may have the same run.name"
    shutil.rmtree(run.path, ignore_errors=True)
    return f"nothing was started, and {run.path} is removed again"


def reopen(path: Path) -> RunDirectory:
    """The directory of an existing run. Raises ConfigError if it is none."""
    run = RunDirectory(path.absolute())
    if not (run.config.is_file() and run.database.is_file()):
        raise ConfigError(f"{path} is not a run's directory (config.toml and run.db are expected there)")
    return run


def latest(directory: Path) -> Path:
    """The run under `directory` that was touched last. Raises ConfigError if there is none."""
    runs = [path.parent for path in directory.glob("*/run.db")]
    if not runs:
        raise ConfigError(f"there is no run in {directory.absolute()}; name the directory of one")
    return max(runs, key=lambda path: (path / "run.db").stat().st_mtime)


def _short(dataset: str) -> str:
    is_file = "/" in dataset or dataset.endswith((".jsonl", ".parquet"))
    name = Path(dataset).stem if is_file else dataset.rpartition(":")[2]
    return re.sub("[^A-Za-z0-9_-]", "_", name)[:SHORT_CHARACTERS_MAX]


def _write(run: RunDirectory, config: Config, hosts_text: str) -> None:
    try:
        for directory in (run.logs, run.tokens, run.checkpoints):
            directory.mkdir(parents=True, exist_ok=True)
        run.config.write_text(configfile.dumps(config))
        run.hosts.write_text(hosts_text)
    except OSError as error:
        raise StartError(f"cannot write the run's directory {run.path}: {error.strerror}") from error


def write_token(run: RunDirectory) -> str:
    """A new secret for this process's channels, readable by this user only. OSError if it cannot be written."""
    token = secrets.token_urlsafe(32)
    run.token.unlink(missing_ok=True)
    descriptor = os.open(run.token, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token)
    return token


def last_token(run: RunDirectory) -> str:
    """The secret of a controller that died; a new one if it is gone, with which its workers cannot come back."""
    return write_token(run) if why_no_token(run) else run.token.read_text()


def why_no_token(run: RunDirectory) -> str:
    """Why the secret of the controller before this one cannot be read; empty = it can."""
    try:
        return "" if run.token.read_text() else "it is empty"
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)


def last_port(run: RunDirectory) -> int:
    """Where the controller before this one listened; 0 = unknown."""
    try:
        return int(run.url.read_text().rpartition(":")[2])
    except (OSError, ValueError):
        return 0


def write_url(run: RunDirectory, url: str) -> None:
    """Where the controller is reached, for consoles. Raises StartError if it cannot be written."""
    try:
        (run.path / "url.new").write_text(url)
        os.replace(run.path / "url.new", run.url)  # workers read it
    except OSError as error:
        raise StartError(f"cannot write {run.url}: {error.strerror}") from error


def write_found(run: RunDirectory, found: Mapping[str, Answer]) -> None:
    """What other hosts answered, by address, for a controller that takes over. Raises StartError if it cannot be written."""
    try:
        if found:
            run.found.write_bytes(msgspec.json.encode(found))
    except OSError as error:
        raise StartError(f"cannot write {run.found}: {error.strerror}") from error


def last_found(run: RunDirectory) -> dict[str, Answer]:
    """What other hosts answered the controller before this one; empty if there are none, or nobody knows."""
    try:
        return msgspec.json.decode(run.found.read_bytes(), type=dict[str, Answer])
    except (OSError, msgspec.MsgspecError):
        return {}
