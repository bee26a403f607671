"""A live run, by its controller (`/v1/console`): lines go there, answers come back."""

from pathlib import Path

import msgspec

from laminar.console.answers import Answer
from laminar.console.commands import COMMANDS
from laminar.console.language import Language, UsageError, split
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

RUNS = Path("runs")


class Live:
    """The target."""

    kind: Target = "live"

    def __init__(self, address: Address) -> None:
        """Raises ConfigError if nobody answers there."""
        self._address, self._language = address, Language(COMMANDS)
        self.title = address.run.name if address.run else address.url.partition("://")[2]
        self.look()

    def ask(self, line: str) -> Reply:
        """Raises ConfigError if nobody answers. A what-if is worked out here, from the run's log."""
        words = split(line)
        if words and self._address.run is not None and self._is_whatif(words[0]):
            command = self._language.commands["whatif"]
            if not command.arguments[0] <= len(words) - 1 <= command.arguments[1]:
                raise UsageError(f"usage: {command.usage}; `help whatif` has examples")
            with Recording(self._address.run.path) as recording:
                return msgspec.structs.replace(self.look(), answer=_whatif(recording, words[1:]))
        return self._reply("POST", msgspec.json.encode({"line": line}))

    def _is_whatif(self, word: str) -> bool:
        try:
            return self._language.find(word).name == "whatif"
        except UsageError:
            return False

    def look(self) -> Reply:
        """Only where the run is."""
        return self._reply("GET")

    def _reply(self, method: str, body: bytes | None = None) -> Reply:
        found = asking.ask(self._address, method, "/v1/console", body)
        try:
            return msgspec.json.decode(found, type=Reply)
        except msgspec.DecodeError as error:
            text = f"the controller at {self._address.url} answers otherwise than this console expects ({error}): "
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


def opened(run: Path | None, url: str | None) -> Live:
    """The run in a directory (default: the latest), or at a URL. Raises ConfigError if none is live there."""
    if url is not None:
        return Live(Address.of_url(url))
    directory = rundir.reopen(run or rundir.latest(RUNS))
    try:
        return Live(Address.of_run(directory))
    except ConfigError as error:
        raise ConfigError(f"{error}; --log {directory.path} looks at what is recorded of it") from error
