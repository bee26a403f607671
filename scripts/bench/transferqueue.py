"""The same work through TransferQueue's client: makes its environment, runs `transferqueue_rows.py` in it."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = ROOT / ".venv-transferqueue"
TORCH = "torch==2.13.0"  # first and alone, so that nothing pulls the CUDA build
PACKAGES = ("TransferQueue==0.1.11", "numpy>=2")
INSTALL_S, START_S = 1200.0, 300.0


class Unavailable(Exception):
    """TransferQueue cannot be installed or run here."""


@dataclass(frozen=True)
class Result:
    """One kind of work."""

    kind: str
    seconds: float
    tokens_put: int
    tokens_got: int
    servers_cpu_s: float
    version: str


def environment() -> Path:
    """Its interpreter, installed if it is not there already. Raises Unavailable with pip's last lines."""
    python, marker = ENVIRONMENT / "bin/python", ENVIRONMENT / "installed"
    wanted = "\n".join((TORCH, *PACKAGES))
    if marker.is_file() and marker.read_text() == wanted:
        return python
    print(f"making {ENVIRONMENT} (a few minutes)", file=sys.stderr, flush=True)
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(ENVIRONMENT)], INSTALL_S)
    for packages in ((TORCH,), PACKAGES):
        _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages], INSTALL_S)
    marker.write_text(wanted)
    return python


def measure(python: Path, cores: list[int], seconds: float, mean_tokens: int) -> list[Result]:
    """Its servers on the first of `cores`, its client on the second. Raises Unavailable with its last lines."""
    script = Path(__file__).with_name("transferqueue_rows.py")
    arguments = [cores[0], cores[1], int(seconds), mean_tokens]
    output = _run([str(python), str(script), *map(str, arguments)], START_S + 3 * seconds)
    found: list[dict[str, Any]] = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return [Result(**{name: row[name] for name in Result.__annotations__}) for row in found]


def _run(command: list[str], limit_s: float) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{' '.join(command[:4])} … took longer than {limit_s:g} s") from error
    except OSError as error:
        raise Unavailable(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        last = "\n    ".join(done.stderr.splitlines()[-8:])
        raise Unavailable(f"{' '.join(command[:4])} … ended with {done.returncode}:\n    {last}")
    return done.stdout
