"""What workers say: tokens to the token store, figures to the telemetry, events to the core."""

from collections.abc import Callable

import structlog

from laminar import wire
from laminar.controller.channels import Channel
from laminar.controller.eventlog import EventLog
from laminar.controller.runtime import Runtime
from laminar.controller.telemetry import Telemetry
from laminar.controller.tokens import TokenStore
from laminar.core import actions
from laminar.errors import ProtocolError

logger = structlog.get_logger(__name__)


class Intake:
    """Takes the frames of all channels. `alarm` tells people."""

    def __init__(
        self,
        runtime: Runtime,
        log: EventLog,
        tokens: TokenStore,
        telemetry: Telemetry,
        alarm: Callable[[actions.RaiseAlarm], None],
    ) -> None:
        self.on_stacks: Callable[[Channel, wire.Stacks], None] = lambda channel, answer: None
        self.joined: set[str] = set()
        """Workers that were ever heard."""
        self._runtime, self._log, self._tokens, self._telemetry, self._alarm = runtime, log, tokens, telemetry, alarm
        self._failures_told: set[str] = set()

    def on_message(self, channel: Channel, message: wire.Message, number: int) -> int:
        """The seq of the event that vouches for the frame once it is on disk. Raises ProtocolError."""
        try:
            return self._take(channel, message, number)
        except ProtocolError:
            raise
        except Exception as error:  # noqa: BLE001 - a bug of the controller must end the run, not one channel
            self._runtime.crash(error)
            return self._runtime.seq

    def _take(self, channel: Channel, message: wire.Message, number: int) -> int:
        self.joined.add(channel.worker)
        self._telemetry.on_message(channel.worker, message)
        if isinstance(message, wire.RolloutReport):
            self._take_tokens(message)
            self._tell_failures(message)
        elif isinstance(message, wire.WorkerFailed) and message.detail:
            logger.error("worker.failed", worker=channel.worker, reason=message.reason, detail=message.detail)
        frame = (str(channel.worker), channel.incarnation, number) if number else None
        event = channel.origin.to_event(message)
        if event is not None:
            return self._runtime.post(event, frame)
        if isinstance(message, wire.Stacks):
            self.on_stacks(channel, message)
        elif frame is not None:
            self._log.heard(frame)
        return self._runtime.seq + 1  # that event commits with, or after, the word of this frame

    def _take_tokens(self, report: wire.RolloutReport) -> None:
        for prompt in report.prompts:
            if prompt.trajectory:
                self._tokens.put_own_prompt(prompt.trajectory, prompt.attempt, prompt.tokens)
            else:
                self._tokens.put_prompt(prompt.group, prompt.tokens)
        self._tokens.take(report)

    def _tell_failures(self, report: wire.RolloutReport) -> None:
        """The first failure of each kind, with what the user's code said; the ledger counts the others."""
        for failed in report.failed:
            if failed.reason not in self._failures_told:
                self._failures_told.add(failed.reason)
                cause, traceback = (failed.detail.strip().splitlines() or ["no details"])[-1], ""
                if cause != failed.detail.strip():
                    traceback = "\n" + indent(failed.detail)
                follows = "will be tried again" if failed.kind == "infra" else "will not be trained on"
                text = f"a trajectory {follows} (told once of each kind): {cause}{traceback}"
                self._alarm(actions.RaiseAlarm(cause=self._runtime.seq, name=failed.reason, text=text))


def indent(text: str) -> str:
    """For people: lines that somebody else wrote."""
    return "\n".join(f"    {line}" for line in text.splitlines())
