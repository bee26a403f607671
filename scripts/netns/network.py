"""Hosts on one machine: network namespaces on a bridge whose links carry so much each way. Needs root and iproute2."""

import subprocess
import uuid
from typing import Literal

Direction = Literal["in", "out", "both"]


class Network:
    """Namespaces `<mark>n0`, `<mark>n1`, … with addresses 10.77.0.1, 10.77.0.2, …; gone when the `with` block ends.

    `rate`: of every link, each way, as tc writes it: ``800mbit``.
    """

    def __init__(self, num_hosts: int, rate: str) -> None:
        self.mark = f"lm{uuid.uuid4().hex[:4]}"
        self.num_hosts, self.rate = num_hosts, rate

    def __enter__(self) -> "Network":
        try:
            _ip("link", "add", self.mark, "type", "bridge")
            _ip("link", "set", self.mark, "up")
            for number in range(self.num_hosts):
                self._add(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for number in range(self.num_hosts):
            subprocess.run(["ip", "netns", "del", self.name(number)], check=False, capture_output=True)
            subprocess.run(["ip", "link", "del", self.outside(number)], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self.mark], check=False, capture_output=True)

    def name(self, number: int) -> str:
        """The host's namespace."""
        return f"{self.mark}n{number}"

    def outside(self, number: int) -> str:
        """The host's cable, at the bridge."""
        return f"{self.mark}v{number}"

    def address(self, number: int) -> str:
        """Where others reach the host."""
        return f"10.77.0.{number + 1}"

    def inside(self, number: int, command: list[str], **options: object) -> subprocess.Popen[str]:
        """Start a command on a host."""
        whole = ["ip", "netns", "exec", self.name(number), *command]
        return subprocess.Popen(whole, text=True, **options)  # type: ignore[call-overload, no-any-return]

    def cable(self, number: int, state: Literal["up", "down"]) -> None:
        """Pull the host's cable, or plug it in again."""
        _ip("link", "set", self.outside(number), state)

    def shape(self, number: int, rate: str, direction: Direction = "both") -> None:
        """Let what comes to the host, or goes from it, pass at this rate; ``0`` = drop all of it."""
        limit = ["rate", self.rate, "limit", "1"] if rate == "0" else ["rate", rate, "latency", "100ms"]
        shaped = ["root", "tbf", *limit, "burst", "512kb"]
        if direction in ("in", "both"):
            _run(["tc", "qdisc", "replace", "dev", self.outside(number), *shaped])
        if direction in ("out", "both"):
            _run(["tc", "-n", self.name(number), "qdisc", "replace", "dev", "eth0", *shaped])

    def _add(self, number: int) -> None:
        name, outside = self.name(number), self.outside(number)
        _ip("netns", "add", name)
        _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", outside, "master", self.mark, "up")
        _ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", name, "link", "set", device, "up")
        self.shape(number, self.rate)


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
