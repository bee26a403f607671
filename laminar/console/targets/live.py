"""A live run, by its controller (`/v1/console`): lines go there, answers come back."""

import shlex
from collections.abc import Callable
from pathlib import Path

import msgspec

from laminar import plugins
from laminar.console.answers import Answer
from laminar.console.commands import COMMANDS
from laminar.console.language import Language
from laminar.console.place import Reply
from laminar.console.targets import futures
from laminar.console.targets.futures import WorldTrack
from laminar.console.view import Target, View
from laminar.controller import asking, rundir
from laminar.controller.asking import Address
from laminar.errors import ConfigError
from laminar.replay import forecast
from laminar.replay.playback import Playback
from laminar.replay.recording import Recording


class Live:
    """The target. `address` says where the controller is now: another one may have taken its place since it was asked last."""

    kind: Target = "live"

    def __init__(self, address: Callable[[], Address]) -> None:
        """Raises ConfigError if nobody answers there."""
        self._address, self._language = address, Language(COMMANDS)
        now = address()
        self._run = now.run
        self.title = now.run.name if now.run else now.url.partition("://")[2]
        self.look()

    def ask(self, line: str) -> Reply:
        """Raises ConfigError if nobody answers. A what-if is worked out here, from the run's log."""
        command, words = self._language.understood(line)
        if command.name == "whatif" and self._run is not None:
            with Recording(self._run.path) as recording:
                return msgspec.structs.replace(self.look(), answer=_whatif(recording, words))
        if command.name == "sampler" and self._run is not None:
            line = shlex.join([command.name, *map(_of_here, words)])
        return self._reply("POST", msgspec.json.encode({"line": line}))

    def look(self) -> Reply:
        """Only where the run is."""
        return self._reply("GET")

    def _reply(self, method: str, body: bytes | None = None) -> Reply:
        address = self._address()
        found = asking.ask(address, method, "/v1/console", body)
        try:
            return msgspec.json.decode(found, type=Reply)
        except msgspec.DecodeError as error:
            text = f"the controller at {address.url} answers otherwise than this console expects ({error}): "
            raise ConfigError(
                text + "use the console of the version of Laminar that the run was started with"
            ) from error

    def close(self) -> None:
        """Nothing is held open."""


def _whatif(recording: Recording, words: list[str]) -> Answer:
    """From the last event that the log has. Raises LaminarError."""
    playback = Playback(recording)
    first = playback.next_event
    fitted, began = forecast.fit(playback), first.at if first else 0.0
    core = playback.core
    view = View(core, target="live", now=core.state.at, began=began)
    return futures.whatif(view, words, lambda: WorldTrack(forecast.world(core, fitted), began))


def _of_here(reference: str) -> str:
    """A file that there is here means that one, wherever the controller was started."""
    here = plugins.absolute(reference)
    return here if Path(here.rpartition(":")[0]).is_file() else reference


def at_url(url: str) -> Live:
    """Raises ConfigError if none is live there."""
    address = Address.of_url(url)
    return Live(lambda: address)


def of_run(path: Path) -> Live:
    """The run in a directory. Raises ConfigError if none is live there."""
    directory = rundir.reopen(path)
    try:
        return Live(lambda: Address.of_run(directory))
    except ConfigError as error:
        raise ConfigError(f"{error}; --log {path} looks at what is recorded of it") from error
