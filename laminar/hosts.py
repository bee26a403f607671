"""The hosts file: one host per line, ``address  role  key=value…``, with comments and ranges.

    # address        role      options
    trainer[0-1]     trainer   gpus=8
    rollout[00-15]   rollout   gpus=8 tp=4
    localhost        rollout   engine=embedded replicas=2
    rollout16        rollout   engine=vllm gpus=8 tp=4 vllm.max-num-batched-tokens=8192

A range ``[00-15]`` or ``[1,3,5-7]`` stands for as many hosts; the zeros of its first number are kept. Several ranges
in one address combine. The order of the file is kept.

Invariant: what `parse` returns has at least one trainer and one rollout host, no (address, role) twice, and options
that are known to the role and in their range. Everything else is a ConfigError ``source:line: expected …, got …``.
"""

import difflib
import itertools
import re
import socket
from pathlib import Path

import msgspec

from laminar import vllmflags
from laminar.errors import ConfigError

HOSTS_MAX = 10_000
"""Most hosts that one line may stand for; more is a typing error in a range."""
ROLES = ("trainer", "rollout")
ENGINES = ("embedded", "vllm")

# Whole-number options and their range. The upper bounds catch slips (gpus=88), nothing runs near them.
_NUMBERS: dict[str, dict[str, tuple[int, int]]] = {
    "trainer": {"gpus": (0, 64), "ranks": (1, 1024)},
    "rollout": {"gpus": (0, 64), "replicas": (1, 1024), "tp": (1, 64), "max_concurrent": (1, 65536)},
}
_WORDS: dict[str, tuple[str, ...]] = {"trainer": ("python", "listen"), "rollout": ("engine", "python", "listen", "url")}
_OF_VLLM = ("url",)
_ADDRESS = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|[0-9A-Fa-f]*:[0-9A-Fa-f:.]+")
_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """One host in one role. Options that were not given have the defaults that the properties state."""

    address: str
    role: str
    """``trainer`` or ``rollout``."""
    options: dict[str, str] = {}
    """As written, checked."""
    line: int = 0
    """Line of the hosts file, 1-based, for messages."""

    @property
    def gpus(self) -> int:
        """GPUs to use on this host; 0 (default) = CPU."""
        return self._number("gpus", 0)

    @property
    def ranks(self) -> int:
        """Trainer processes on this host; default: one per GPU, at least one."""
        return self._number("ranks", max(1, self.gpus))

    @property
    def engine(self) -> str:
        """``embedded`` (default) or ``vllm``."""
        return self.options.get("engine", "embedded")

    @property
    def tp(self) -> int:
        """Tensor-parallel GPUs per replica; default 1."""
        return self._number("tp", 1)

    @property
    def replicas(self) -> int:
        """Engine replicas on this host; default: as many as `gpus` / `tp` gives, at least one."""
        return self._number("replicas", max(1, self.gpus // self.tp))

    @property
    def python(self) -> str:
        """Python interpreter for this host's workers, or, with ``engine=vllm``, for the vLLM server; empty (default) = the
        controller's own, or that of the environment that scripts/setup-vllm makes."""
        return self.options.get("python", "")

    @property
    def listen(self) -> str:
        """Address at which other hosts reach this one's relay; empty (default) = the one that ssh reaches."""
        return self.options.get("listen", "")

    @property
    def url(self) -> str:
        """``engine=vllm``: the server that runs already and is to be used; empty (default) = each replica starts its own."""
        return self.options.get("url", "")

    @property
    def vllm_flags(self) -> list[str]:
        """``vllm.FLAG=VALUE`` as vLLM's command line takes them."""
        return vllmflags.command_line(self.options)

    @property
    def max_concurrent(self) -> int:
        """Most requests decoding at once per replica; 0 (default) = `rollout.max_concurrent` of the configuration."""
        return self._number("max_concurrent", 0)

    def _number(self, key: str, default: int) -> int:
        return int(self.options.get(key, default))


def load(path: Path) -> list[Host]:
    """The hosts of a file. Raises ConfigError, also when it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: expected a text file in UTF-8, got byte {error.start} = {error.object[error.start]:#x}"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the hosts file: {error.strerror}") from error
    return parse(text, str(path))


def parse(text: str, source: str) -> list[Host]:
    """The hosts of a hosts file's text; `source` names it in messages. Raises ConfigError."""
    hosts: list[Host] = []
    seen: dict[tuple[str, str], int] = {}
    spelled: dict[str, Host] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        fields = re.sub(r"(^|\s)#.*", "", line).split()
        if not fields:
            continue
        where = f"{source}:{number}"
        for host in _parse_line(fields, where, number):
            key = (host.address.lower(), host.role)
            if key in seen:
                raise ConfigError(
                    f"{where}: expected every host once per role, got {' '.join(key)} again (line {seen[key]})"
                )
            seen[key] = number
            other = spelled.setdefault(host.address.lower(), host)
            if other.address != host.address:
                raise ConfigError(
                    f"{where}: expected one spelling of a host, got {host.address} after {other.address} (line {other.line})"
                )
            hosts.append(host)
    _require_roles(hosts, source)
    return hosts


def _require_roles(hosts: list[Host], source: str) -> None:
    if not hosts:
        raise ConfigError(f"{source}: expected lines `address role key=value…`, got no host at all")
    for role in ROLES:
        if all(host.role != role for host in hosts):
            raise ConfigError(
                f"{source}: expected at least one line with role {role}, got none; for example `localhost {role}`"
            )


def _parse_line(fields: list[str], where: str, number: int) -> list[Host]:
    if len(fields) < 2:
        raise ConfigError(f"{where}: expected `address role key=value…`, got only {fields[0]!r}")
    pattern, role, *rest = fields
    if role not in ROLES:
        raise ConfigError(f"{where}: expected role trainer or rollout, got {role!r}{_nearest(role, list(ROLES))}")
    options = _parse_options(rest, role, where)
    return [Host(address=address, role=role, options=options, line=number) for address in _expand(pattern, where)]


def _parse_options(fields: list[str], role: str, where: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for field in fields:
        key, equals, value = field.partition("=")
        if not equals or not key or not value:
            raise ConfigError(f"{where}: expected key=value without spaces, got {field!r}")
        if key in options:
            raise ConfigError(f"{where}: expected each option once, got {key} twice")
        _check_option(key, value, role, where)
        options[key] = value
    _check_vllm(options, where)
    tp, gpus = int(options.get("tp", 1)), int(options.get("gpus", 0))
    if tp > 1 and (gpus == 0 or gpus % tp):
        raise ConfigError(f"{where}: expected gpus to be a multiple of tp = {tp}, got gpus={gpus}")
    return options


def _check_vllm(options: dict[str, str], where: str) -> None:
    """Options that only a vLLM server has, and those that a server that runs already cannot have."""
    of_vllm = [key for key in options if key in _OF_VLLM or key.startswith(vllmflags.PREFIX)]
    if of_vllm and options.get("engine") != "vllm":
        raise ConfigError(f"{where}: expected {of_vllm[0]} only with engine=vllm")
    url = options.get("url")
    if url is None:
        return
    if not re.fullmatch(r"https?://\S+", url):
        raise ConfigError(f"{where}: expected url=http://host:port of a vLLM server, got {url!r}")
    others = [key for key in options if key in ("gpus", "tp", "python") or key.startswith(vllmflags.PREFIX)]
    if others:
        raise ConfigError(f"{where}: expected no {others[0]} beside url: that server is started already")
    if int(options.get("replicas", 1)) > 1:
        raise ConfigError(f"{where}: expected one replica per vLLM server, got replicas={options['replicas']} at {url}")


def _check_option(key: str, value: str, role: str, where: str) -> None:
    if role == "rollout" and key.startswith(vllmflags.PREFIX):
        if refused := vllmflags.why_refused(key):
            raise ConfigError(f"{where}: {refused}")
        return
    known = [*_NUMBERS[role], *_WORDS[role]]
    if key not in known:
        raise ConfigError(
            f"{where}: expected an option of a {role} ({', '.join(known)}), got {key!r}{_nearest(key, known)}"
        )
    if key in _NUMBERS[role]:
        low, high = _NUMBERS[role][key]
        if not re.fullmatch(r"[0-9]{1,9}", value) or not low <= int(value) <= high:
            raise ConfigError(f"{where}: expected {key} to be a whole number from {low} to {high}, got {value!r}")
    if key == "listen" and not _ADDRESS.fullmatch(value):
        raise ConfigError(f"{where}: expected listen to be a host name or address, got {value!r}")
    if key == "engine" and value not in ENGINES:
        raise ConfigError(
            f"{where}: expected engine {' or '.join(ENGINES)}, got {value!r}{_nearest(value, list(ENGINES))}"
        )


def _expand(pattern: str, where: str) -> list[str]:
    """All addresses that a pattern with ranges stands for, in order."""
    pieces = re.split(r"\[([^\[\]]*)\]", pattern)  # text, range, text, range, … text
    choices = [_parse_range(piece, where) if i % 2 else [piece] for i, piece in enumerate(pieces)]
    count = 1
    for choice in choices:
        count *= len(choice)
    if count > HOSTS_MAX:
        raise ConfigError(f"{where}: expected at most {HOSTS_MAX} hosts in one line, got {count} in {pattern!r}")
    addresses = ["".join(parts) for parts in itertools.product(*choices)]
    if not _ADDRESS.fullmatch(addresses[0]):
        hint = "; users and ports are named in ~/.ssh/config" if re.search(r"@|:\d+$", pattern) else ""
        raise ConfigError(
            f"{where}: expected a host name or address, perhaps with a range like [0-3], got {pattern!r}{hint}"
        )
    return addresses


def _parse_range(text: str, where: str) -> list[str]:
    """``00-15`` or ``1,3,5-7`` as its numbers, padded like the first number of each part."""
    numbers: list[str] = []
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise ConfigError(f"{where}: expected a range like [0-3] or [1,3,5-7], got [{text}]")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low):
            raise ConfigError(f"{where}: expected a range from low to high, got [{text}]")
        if int(high) - int(low) >= HOSTS_MAX:
            raise ConfigError(f"{where}: expected a range of at most {HOSTS_MAX} hosts, got [{text}]")
        width = len(low) if low.startswith("0") else 0
        numbers.extend(str(value).zfill(width) for value in range(int(low), int(high) + 1))
    return numbers


def is_local(address: str) -> bool:
    """Whether `address` is this machine: a loopback name or address, or this machine's host name. Asks no resolver."""
    return is_name_of_this(address) or address.startswith("127.")


def is_name_of_this(address: str) -> bool:
    """Whether it means this machine and no other address of it, which would be a host of its own (127.0.0.2)."""
    own = socket.gethostname().lower()
    return address.lower() in ("localhost", "127.0.0.1", "::1", own, own.partition(".")[0])


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {near[0]}?" if near else ""
