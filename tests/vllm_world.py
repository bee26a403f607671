"""Real vLLM servers for tests, each in a process group of its own, and what they are asked over HTTP."""

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from laminar.workers.engines.vllm_weights import SERVER_ENVIRONMENT, SERVER_FLAGS

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "configs/quickstart/model"
"""0.34 M parameters, float32, tied embeddings, a vocabulary of characters, context 128."""
PYTHON = Path(os.environ.get("LAMINAR_VLLM_PYTHON") or ROOT / ".venv-vllm/bin/python")
BOOT_S = 500.0  # 40 s on an idle machine with two cores, minutes on a busy one
STOP_S = 20.0
LOG_CHARS = 6000  # enough for the last traceback

needs_vllm = pytest.mark.skipif(
    not PYTHON.exists(), reason="no vLLM here: scripts/setup-vllm makes .venv-vllm, or set LAMINAR_VLLM_PYTHON"
)

FLAGS = ("--dtype", "float32", "--enforce-eager", "--enable-scale-out", "--max-num-seqs", "32", *SERVER_FLAGS)
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",  # else the first request compiles for 20 s
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    **SERVER_ENVIRONMENT,
}


class Server:
    """A server that is up, or was."""

    def __init__(self, model: Path, flags: tuple[str, ...], environment: dict[str, str]) -> None:
        port = _free_port()
        self.base_url = f"http://127.0.0.1:{port}"
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115  closed in `end`
        command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1"]
        self.process = subprocess.Popen(
            [*command, "--port", str(port), *FLAGS, *flags],
            env={**os.environ, **ENVIRONMENT, **environment},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def log(self) -> str:
        """The last of what the server said."""
        return Path(self._log.name).read_text(errors="replace")[-LOG_CHARS:]

    def wait_until_up(self) -> None:
        """Fails the test with the log if the server dies or does not come up."""
        deadline = time.monotonic() + BOOT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"vLLM exited with {self.process.returncode}:\n{self.log()}"
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.base_url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.2)
        raise AssertionError(f"vLLM was not up after {BOOT_S:.0f} s:\n{self.log()}")

    def post(self, route: str, body: object = None, timeout_s: float = 60.0) -> dict:
        """The JSON answer. Raises AssertionError with the server's text for a status other than 200."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.base_url + route, msgspec.json.encode(body), headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return msgspec.json.decode(answer.read())
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{route} answered {error.code}: {error.read().decode()}") from error

    def get(self, route: str) -> dict:
        """The JSON answer."""
        return msgspec.json.decode(self.text(route))

    def text(self, route: str) -> str:
        """The answer of a GET."""
        with urllib.request.urlopen(self.base_url + route, timeout=60.0) as answer:
            return answer.read().decode()

    def end(self) -> None:
        """Stop the whole group; also what the server left when it died."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=STOP_S)
        self._log.close()


@contextlib.contextmanager
def running_vllm(
    model: Path, *flags: str, plugins: tuple[str, ...] = (), environment: dict[str, str] | None = None
) -> Iterator[Server]:
    """A server of `model` that answers. `plugins` are modules of tests/ whose `register` vLLM is to call too."""
    with tempfile.TemporaryDirectory() as directory:
        _write_entry_points(Path(directory), plugins)
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), directory])
        server = Server(model, flags, {"PYTHONPATH": path, **(environment or {})})
        try:
            server.wait_until_up()
            yield server
        finally:
            server.end()


def _write_entry_points(directory: Path, plugins: tuple[str, ...]) -> None:
    """What an installed distribution would have, so that vLLM finds this tree's plugin wherever it comes from."""
    metadata = directory / "laminar_tests-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: laminar-tests\nVersion: 0\n")
    lines = ["[vllm.general_plugins]", "laminar = laminar.workers.engines.vllm_plugin:register"]
    lines += [f"{module} = {module}:register" for module in plugins]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
