"""The scripts that need a network of their own, or many rounds, in short."""

import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
LIMIT_S = 200


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / arguments[0]), *arguments[1:]]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def can_make_namespaces() -> bool:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        return False
    name = f"lmtest{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made


@pytest.mark.timeout(240)
def test_in_network_namespaces_versions_arrive_whole_by_one_hop_each_and_links_that_are_cut_are_replaced() -> None:
    if not can_make_namespaces():
        pytest.skip("network namespaces need root, ip and tc")
    done = run("netns_relays.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT met" not in done.stdout


@pytest.mark.timeout(240)
def test_publications_and_repairs_leak_nothing() -> None:
    done = run("relay_leaks.py", "--publications", "12", "--repairs", "3")
    assert done.returncode == 0, done.stdout + done.stderr
