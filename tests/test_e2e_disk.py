"""A real run whose disk fills up begins nothing new, says so, and goes on when there is room. Needs root, for its own mount."""

import contextlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from e2e import SMALL, Run, hosts_file, ledger_is_closed

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(os.geteuid() != 0, reason="a file system of its own needs root"),
]

STEPS = 30
CLEARED = r"^the disk takes everything again"


def fill(path: Path) -> None:
    """Until there is no room at all."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 65536)
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 512)


def allow_writing(directory: Path, allowed: bool) -> bool:
    """Let files be made there or not, also by root. False if that cannot be had."""
    command = ["chattr", "-i" if allowed else "+i", directory]
    return bool(shutil.which("chattr")) and subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_run_waits_for_a_full_disk_and_for_its_permissions_and_loses_nothing(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    wrap = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size=64m tmpfs {runs} && exec "$@"', "sh")
    overrides = (*SMALL, f"run.steps={STEPS}", "trainer.checkpoint_every=10")
    with Run.start(runs, hosts_file(tmp_path), *overrides, wrap=wrap) as run:
        run.until_said(r"^step 3/")
        here = Path(f"/proc/{run.process.pid}/root{runs}")
        filler = here / "filler"
        fill(filler)
        run.until_said(
            r"^alarm: storage-failed: nothing can be written: .*(full|No space).*no group, step or checkpoint begins"
        )
        filler.unlink()
        run.until_said(CLEARED)
        if allow_writing(here / run.name, False):  # not every file system can forbid it to root
            run.until_said(r"^alarm: storage-failed: nothing can be written: .*Operation not permitted; no group")
            allow_writing(here / run.name, True)
            run.until(lambda: len(re.findall(CLEARED, run.output, re.MULTILINE)) == 2)
        assert run.wait() == 0, run.output
    steps = [int(number) for number in re.findall(rf"^step (\d+)/{STEPS}", run.output, re.MULTILINE)]
    assert steps == list(range(1, STEPS + 1)), "every step once"
    assert ledger_is_closed(run.output), run.output
