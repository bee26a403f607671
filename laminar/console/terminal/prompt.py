"""Line editing: history, completion of commands and of what there is now, and a prompt that says where the run is."""

import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from laminar.console.help import completions
from laminar.console.place import Place
from laminar.console.terminal.session import Session
from laminar.errors import LaminarError

REFRESH_S = 2.0  # how old the prompt of a live run may be


class Words(Completer):
    """What could come next."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """Of the word before the cursor."""
        session, before = self._session, document.text_before_cursor
        last = before.split(" ")[-1]
        for word, what in completions(session.language, session.target.kind, before, session.names):
            yield Completion(word, start_position=-len(last), display_meta=what)


def talk(session: Session) -> None:
    """Until Ctrl-D or `quit`."""
    stop = threading.Event()
    if session.target.kind == "live":
        threading.Thread(target=_keep_up, args=(session, stop), name="prompt", daemon=True).start()
    prompt: PromptSession[str] = PromptSession(
        history=_history(),
        completer=Words(session),
        auto_suggest=AutoSuggestFromHistory(),
        complete_while_typing=False,
        refresh_interval=REFRESH_S if session.target.kind == "live" else 0,
    )
    try:
        _loop(session, lambda: prompt.prompt(lambda: text(session)))
    finally:
        stop.set()


def _loop(session: Session, read: Callable[[], str]) -> None:
    while not session.over:
        try:
            line = read()
        except KeyboardInterrupt:  # throws the line away, as in a shell
            continue
        except EOFError:
            return
        try:
            session.take(line)
        except KeyboardInterrupt:
            continue


def text(session: Session) -> StyleAndTextTuples:
    """`live name step 40/100 1 held> `."""
    place = session.place or Place(target=session.target.kind)
    parts: StyleAndTextTuples = [("bold", f"{place.target} {session.target.title} ")]
    steps = f"/{place.steps}" if place.steps else ""
    parts.append(("", f"step {place.step}{steps} "))
    if place.target != "live":
        parts.append(("", f"event {place.event} "))
    if place.held:
        parts.append(("bold ansiyellow", f"held {' '.join(map(str, place.held))} "))
    elif place.paused:
        parts.append(("ansiyellow", f"paused {' '.join(place.paused)} "))
    if place.finished:
        parts.append(("ansired", "over "))
    return [*parts, ("bold", "> ")]


def _keep_up(session: Session, stop: threading.Event) -> None:
    """Ask a live run where it is, for the prompt. One that does not answer is told of when it is asked something."""
    while not stop.wait(REFRESH_S):
        try:
            session.place = session.target.look().place
        except LaminarError:
            continue


def _history() -> History:
    """Kept between sittings, where that is possible."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(state) / "laminar" / "console_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))
