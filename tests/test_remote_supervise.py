"""The supervisor of a process on another host, spoken to through pipes as ssh has them."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from laminar.processes import NAME, TOKEN, living, marked
from laminar.remote import (
    GONE,
    HERE,
    KILL,
    LOST,
    NOT_STARTED,
    OUTDATED,
    STARTED,
    TERMINATE,
    Attach,
    Order,
    returncode_of,
    status_of,
)
from laminar.workers.remote.supervisor import send_away, socket_of

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parent.parent
LIMIT_S = 60.0
SLEEP = "import time; print('ready', flush=True); time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
)
WITH_CHILD = (  # as torchrun starts its ranks: in a session of their own
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    "print(child.pid, flush=True)\n"
    "time.sleep({seconds})\n"
)


class Connection:
    """What sshd has of a connection: the process that it starts, and the pipes to it."""

    def __init__(
        self, program: str = "", survive_s: float = 600.0, token: str = "", command: list[str] | None = None, **say: Any
    ) -> None:
        """A process is started; or with `attach=True` found again, by its `token`. `say`: `boot` and `url` of the controller."""
        self.token = token or f"token-{os.urandom(8).hex()}"
        controller = {"boot": say.get("boot", 1), "url": say.get("url", "http://here:1")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "laminar.workers.remote.supervise"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
        environment = {TOKEN: self.token, NAME: "rollout-0", "MINE": "1"}
        command = command or [sys.executable, "-c", program]
        order: Order | Attach = Order(command=command, environment=environment, survive_s=survive_s, **controller)
        if say.get("attach"):
            order = Attach(token=token, name="rollout-0", **controller)
        self.say(msgspec.json.encode(order) + b"\n")

    def say(self, words: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(words)
        self.process.stdin.flush()

    def hang_up(self) -> None:
        """The connection breaks: nobody says anything more, nor takes any output."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def line(self) -> bytes:
        """The next one of the process's output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def started(self) -> psutil.Process:
        """The process, once the supervisor says that it has started."""
        self.attached()
        (child,) = self.supervisor().children()
        return child

    def attached(self) -> None:
        """The supervisor takes the connection."""
        assert self.process.stderr is not None
        assert self.process.stderr.readline() == STARTED

    def supervisor(self) -> psutil.Process:
        """Of the process that this connection started."""
        (supervisor,) = psutil.Process(self.process.pid).children()
        return supervisor

    def status(self) -> int:
        return self.process.wait(LIMIT_S)


@pytest.fixture
def connect() -> Iterator[Callable[..., Connection]]:
    connections: list[Connection] = []

    def make(*arguments: Any, **options: Any) -> Connection:
        connections.append(Connection(*arguments, **options))
        return connections[-1]

    yield make
    for connection in connections:
        send_away({TOKEN: connection.token, NAME: "rollout-0"}, boot=9)
        for process in marked({TOKEN: connection.token}):
            process.kill()
        connection.process.kill()
        connection.process.wait(LIMIT_S)
        for pipe in (connection.process.stdin, connection.process.stdout, connection.process.stderr):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue


def until(condition: Callable[[], Any]) -> None:
    """Wait for what happens in another process."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    return not living([process for process in psutil.process_iter() if process.pid == pid])


def test_a_process_gets_its_environment_a_session_of_its_own_and_no_input_and_its_output_comes_back(connect) -> None:
    connection = connect(
        "import os, sys\nprint(os.environ['MINE'], os.getsid(0) == os.getpid(), repr(sys.stdin.read()))\n"
        "print('problems', file=sys.stderr)\nsys.exit(7)"
    )
    output, words = connection.process.communicate(timeout=LIMIT_S)
    assert output.splitlines() == [b"1 True ''", b"problems"]
    assert words == STARTED
    assert connection.status() == 7


def test_the_token_is_in_the_environment_of_the_process_only(connect) -> None:
    connection = connect(SLEEP)
    child = connection.started()
    assert child.environ()[TOKEN] == connection.token
    supervisor, asking = connection.supervisor(), psutil.Process(connection.process.pid)
    assert TOKEN not in supervisor.environ()
    arguments = [*supervisor.cmdline(), *asking.cmdline(), *child.cmdline()]
    assert not any(connection.token in argument for argument in arguments)
    assert connection.token not in " ".join(str(path) for path in Path("/dev/shm").glob("laminar-*"))


def test_a_process_that_dies_by_a_signal_is_told_apart_from_one_that_ends(connect) -> None:
    connection = connect(SLEEP)
    connection.started().send_signal(signal.SIGKILL)
    assert returncode_of(connection.status()) == -signal.SIGKILL


@pytest.mark.parametrize("returncode", [0, 1, 3, 130, -1, -9, -15])
def test_every_end_that_processes_have_comes_back_unless_it_looks_like_a_signal(returncode: int) -> None:
    back = returncode_of(status_of(returncode))
    assert back == returncode or (returncode == 130 and back == -signal.SIGINT)


def test_an_end_never_looks_like_a_broken_connection() -> None:
    assert returncode_of(status_of(255)) == 254


def test_a_command_that_does_not_exist_is_named_and_nothing_is_said_to_have_started(connect) -> None:
    connection = connect("", command=["/no/such/python"])
    _, words = connection.process.communicate(timeout=LIMIT_S)
    assert words == b"No such file or directory: /no/such/python\n"
    assert connection.status() == NOT_STARTED


def test_a_process_is_terminated_on_the_controllers_word(connect) -> None:
    connection = connect(SLEEP)
    connection.started()
    connection.say(TERMINATE)
    assert returncode_of(connection.status()) == -signal.SIGTERM


def test_a_stubborn_process_is_killed_on_the_controllers_word(connect) -> None:
    connection = connect(STUBBORN)
    connection.started()
    assert connection.line() == b"ready"
    connection.say(TERMINATE)
    connection.say(KILL)
    assert returncode_of(connection.status()) == -signal.SIGKILL


@pytest.mark.parametrize("word", [TERMINATE, KILL])
def test_descendants_in_other_sessions_end_with_their_process(connect, word: bytes) -> None:
    connection = connect(WITH_CHILD.format(seconds=600))
    connection.started()
    child = int(connection.line())
    connection.say(word)
    connection.status()
    until(lambda: is_gone(child))


def test_what_a_process_leaves_behind_at_its_own_end_is_killed(connect) -> None:
    connection = connect(WITH_CHILD.format(seconds=0))
    child = int(connection.line())
    assert connection.status() == 0
    until(lambda: is_gone(child))


def test_what_it_leaves_behind_without_a_mark_is_known_by_its_session(connect) -> None:
    connection = connect(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], env={})\n"
        "print(child.pid, flush=True)\n"
    )
    child = int(connection.line())
    assert connection.status() == 0
    until(lambda: is_gone(child))


def test_a_process_survives_a_broken_connection_and_may_end_by_itself(connect, tmp_path: Path) -> None:
    go, done = tmp_path / "go", tmp_path / "done"
    connection = connect(
        "import os, time\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        "print('more words than anybody takes ' * 10_000, flush=True)\n"
        f"open({str(done)!r}, 'w').close()"
    )
    connection.started()
    supervisor = connection.supervisor()
    connection.hang_up()
    go.touch()
    until(done.exists)
    until(lambda: is_gone(supervisor.pid))


@pytest.mark.parametrize("hangs_up", [True, False])
def test_a_process_without_a_word_of_a_controller_for_too_long_is_ended_also_if_it_is_stubborn(
    connect, hangs_up: bool
) -> None:
    connection = connect(STUBBORN, survive_s=1.0)
    child, supervisor = connection.started(), connection.supervisor()
    assert connection.line() == b"ready"
    if hangs_up:
        connection.hang_up()
    until(lambda: is_gone(child.pid) and is_gone(supervisor.pid))


@pytest.mark.parametrize("by_itself", [False, True])
def test_a_process_lives_on_while_its_supervisor_or_it_itself_hears_the_controller(connect, by_itself: bool) -> None:
    touches = "import os, time\nwhile True: os.utime(os.environ['LAMINAR_HOST_RENDEZVOUS']); time.sleep(0.1)"
    connection = connect(touches if by_itself else SLEEP, survive_s=2.0)
    child = connection.started()
    beyond = time.monotonic() + 4.0
    while time.monotonic() < beyond:
        if not by_itself:
            connection.say(HERE)
        time.sleep(0.1)
    assert not is_gone(child.pid)
    child.suspend()
    until(lambda: is_gone(child.pid))


def test_a_process_of_the_same_name_whose_supervisor_was_killed_ends_before_the_next_begins(connect) -> None:
    first = connect(SLEEP)
    left = first.started()
    first.supervisor().kill()
    assert first.status() == LOST
    second = connect(SLEEP, token=first.token)
    second.started()
    assert is_gone(left.pid)


def test_a_supervisor_gives_way_to_the_next_of_its_name(connect) -> None:
    first = connect(SLEEP)
    left, supervisor = first.started(), first.supervisor()
    first.hang_up()
    second = connect(SLEEP, token=first.token)
    child = second.started()
    assert is_gone(left.pid)
    supervisor.wait(30.0)  # it closes its socket first, and ends when its last word is out
    assert not is_gone(child.pid)
    assert second.supervisor().is_running()


# ---- over several connections ------------------------------------------------------------------------------


def test_another_connection_gets_what_the_process_writes_from_then_on_and_its_end(connect, tmp_path: Path) -> None:
    go = tmp_path / "go"
    first = connect(
        "import os, sys, time\n"
        "print('ready', flush=True)\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        "print('last words', flush=True)\n"
        "sys.exit(7)"
    )
    child = first.started()
    assert first.line() == b"ready"
    first.process.kill()
    second = connect(token=first.token, attach=True, boot=2)
    second.attached()
    assert not is_gone(child.pid)
    go.touch()
    assert second.line() == b"last words"
    assert second.status() == 7


def test_a_controller_that_comes_later_is_told_how_the_process_ended_meanwhile(connect) -> None:
    first = connect("print('last words', flush=True); import os; os.abort()")
    first.hang_up()
    until(lambda: first.process.poll() is not None)
    second = connect(token=first.token, attach=True, boot=2)
    output, words = second.process.communicate(timeout=LIMIT_S)
    assert (output, words) == (b"last words\n", STARTED)
    assert returncode_of(second.status()) == -signal.SIGABRT


def test_a_status_is_told_again_unless_the_connection_says_that_it_passes_it_on(connect) -> None:
    first = connect(SLEEP)
    child = first.started()
    listening, orders = os.pipe()
    nothing = os.open(os.devnull, os.O_WRONLY)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as killed:
        killed.connect(str(socket_of({TOKEN: first.token, NAME: "rollout-0"})))
        order = Attach(token=first.token, name="rollout-0", url="http://here:1", boot=2)
        socket.send_fds(killed, [msgspec.json.encode(order)], [listening, nothing, nothing])
        child.send_signal(signal.SIGABRT)
        assert killed.recv(1) == bytes([status_of(-signal.SIGABRT)])
    for descriptor in (listening, orders, nothing):
        os.close(descriptor)
    second = connect(token=first.token, attach=True, boot=2)
    assert returncode_of(second.status()) == -signal.SIGABRT


def test_a_connection_that_another_replaces_ends_and_its_orders_are_not_heard(connect) -> None:
    first = connect(SLEEP)
    child = first.started()
    second = connect(token=first.token, attach=True, boot=1)
    second.attached()
    assert first.status() == LOST
    assert not is_gone(child.pid)
    second.say(TERMINATE)
    assert returncode_of(second.status()) == -signal.SIGTERM


def test_a_controller_with_a_lower_boot_number_gets_nothing_and_starts_nothing_in_its_place(connect) -> None:
    first = connect(SLEEP, boot=2)
    child = first.started()
    late = connect(token=first.token, attach=True, boot=1)
    assert b"belongs to another controller, of boot 2" in late.process.communicate(timeout=LIMIT_S)[1]
    assert late.status() == OUTDATED
    later = connect(SLEEP, token=first.token, boot=1)
    assert b"belongs to another controller" in later.process.communicate(timeout=LIMIT_S)[1]
    assert later.status() == NOT_STARTED
    assert not is_gone(child.pid)
    first.say(KILL)
    assert returncode_of(first.status()) == -signal.SIGKILL


def test_a_process_finds_its_controller_where_the_last_one_that_attached_says_that_it_is(connect) -> None:
    first = connect(
        "import os, time\n"
        "path = os.environ['LAMINAR_HOST_RENDEZVOUS']\n"
        "seen = ''\n"
        "while True:\n"
        "    if (url := open(path).read()) != seen: print(seen := url, flush=True)\n"
        "    time.sleep(0.01)",
        url="http://first:1",
    )
    first.started()
    assert first.line() == b"http://first:1"
    first.process.kill()
    second = connect(token=first.token, attach=True, boot=2, url="http://second:2")
    second.attached()
    assert second.line() == b"http://second:2"
    second.say(KILL)
    second.status()


def test_nothing_to_attach_to_is_said(connect) -> None:
    connection = connect(token="token-of-nobody", attach=True)
    assert b"rollout-0 has no supervisor here" in connection.process.communicate(timeout=LIMIT_S)[1]
    assert connection.status() == GONE


def test_a_supervisor_leaves_nothing_in_shared_memory(connect) -> None:
    connection = connect(SLEEP)
    supervisor = connection.started() and connection.supervisor()
    directory = socket_of({TOKEN: connection.token, NAME: "rollout-0"}).parent
    assert directory.exists()
    connection.say(KILL)
    connection.status()
    until(lambda: is_gone(supervisor.pid))
    assert not directory.exists()


def test_output_that_nobody_takes_does_not_hold_up_the_process_and_what_is_left_out_is_said(
    connect, tmp_path: Path
) -> None:
    done, go = tmp_path / "done", tmp_path / "go"
    connection = connect(
        "import os, time\n"
        "for _ in range(160): os.write(1, b'x' * 65_536)\n"
        f"open({str(done)!r}, 'w').close()\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        "print('\\nlast words')"
    )
    connection.started()
    until(done.exists)
    output = b""
    while len(output) < 200_000:  # then there is room for more
        output += os.read(connection.process.stdout.fileno(), 65_536)
    go.touch()
    output += connection.process.stdout.read()
    assert connection.status() == 0
    assert output.endswith(b"last words\n")
    assert b" bytes left out: the connection did not take them]" in output
    assert len(output) < 10 << 20
