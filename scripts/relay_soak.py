#!/usr/bin/env python
"""Publishing, broadcasting and reading at once, for minutes, with a large model: no torn read, and memory as promised.

    python scripts/relay_soak.py [--mib 2048] [--seconds 300] [--slots 3]

Two relays on this machine, chained over loopback. One process publishes version after version, each with one element in 97
changed; at either relay one process leases the newest version again and again and computes its digest anew, and one holds each
lease for some seconds. Needs 2 x slots x the model in /dev/shm, and once the model beside it. Prints a report and leaves nothing;
exit status 1 when a reader saw bytes that are not the version's, a relay took more than (slots + 1/4) x the model of resident
memory, or something stopped.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from laminar.ids import Version  # noqa: E402
from laminar.wire import Neighbour  # noqa: E402
from laminar.workers.relay import paths  # noqa: E402
from laminar.workers.relay.client import RelayClient, RelayError  # noqa: E402
from laminar.workers.relay.manifest import Manifest  # noqa: E402

MIB = 1 << 20
LIMIT_S = 300.0  # for the first version: a relay's memory is backed before it
LINK_TIMEOUT_S = 5.0  # two cores do the work of six processes here
HOLD_S = 3.0  # of the slow reader
STRIDE = 97
SPARE = 0.25


class Relay:
    """One daemon."""

    def __init__(self, name: str, slots: int) -> None:
        self.name, self.run_id = name, f"soak-{uuid.uuid4().hex[:8]}-{name}"
        self.directory = paths.shm_directory(self.run_id)
        command = [sys.executable, "-m", "laminar.workers.relay", "--run-id", self.run_id, "--name", name]
        command += ["--slots", str(slots), "--listen", "127.0.0.1", "--progress-timeout", str(LINK_TIMEOUT_S)]
        environment = {**os.environ, "LAMINAR_TOKEN": "soak", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        self.client = RelayClient(self.directory, 60.0)

    @property
    def neighbour(self) -> Neighbour:
        """As the other is told of it."""
        return Neighbour(name=self.name, host="127.0.0.1", port=self.client.status().chain_port)

    def peak_bytes(self) -> int:
        """Most memory that was resident at a time, shared pages included."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

    def end(self) -> None:
        """Leaves nothing."""
        self.client.close()
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(60)
        paths.remove(self.directory)


# ---- readers, in processes of their own --------------------------------------------------------------------


def read(directory: Path, seconds: float, hold_s: float) -> None:
    """Lease the newest version and verify it, again and again; prints what came of it."""
    client, steps, num_reads = RelayClient(directory, 60.0), set(), 0
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        with client.lease(wait_s=LIMIT_S) as lease:
            time.sleep(min(hold_s, max(0.0, ends_at - time.monotonic())))
            lease.verify()
            steps.add(lease.version.step)
            num_reads += 1
    print(json.dumps({"reads": num_reads, "versions": len(steps)}))


def start_reader(relay: Relay, seconds: float, hold_s: float) -> subprocess.Popen[str]:
    """A process that runs `read`."""
    command = [sys.executable, __file__, "--read", str(relay.directory), str(seconds), str(hold_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# ---- the report --------------------------------------------------------------------------------------------


class Soak:
    """One run of it."""

    def __init__(self, mib: int, seconds: float, slots: int) -> None:
        self.num_bytes, self.seconds, self.slots = mib * MIB, seconds, slots
        self.problems: list[str] = []
        self.num_published = self.num_superseded = self.num_relinked = 0
        self._step = self._epoch = 0
        self._weights = np.random.default_rng(0).integers(0, 1 << 15, self.num_bytes // 2, dtype=np.uint16)
        self._manifest = Manifest.plan([("weights", "bfloat16", (self.num_bytes // 2,), 2)])

    def run(self) -> None:
        """Everything, to the end."""
        with contextlib.ExitStack() as stack:
            relays = []
            for name in ("first", "second"):
                relays.append(Relay(name, self.slots))
                stack.callback(relays[-1].end)
            self._arrange(relays)
            self._publish(relays[0].client)
            for relay in relays:
                relay.client.lease(Version(1, 0), wait_s=LIMIT_S).release()
            readers = {}
            for relay in relays:
                for kind, hold_s in (("fast", 0.0), ("slow", HOLD_S)):
                    reader = start_reader(relay, self.seconds, hold_s)
                    stack.callback(reader.wait, 60)
                    stack.callback(reader.kill)
                    readers[relay.name, kind] = reader
            self._go_on(relays)
            self._judge(relays, readers)

    def _go_on(self, relays: list[Relay]) -> None:
        ends_at = time.monotonic() + self.seconds
        while time.monotonic() < ends_at and not self.problems:
            self._publish(relays[0].client)
            for relay in relays:
                if relay.process.poll() is not None:
                    self.problems.append(f"the relay {relay.name} ended with status {relay.process.returncode}")
                elif any(word.startswith(f"{self._epoch}: ") for word in relay.client.status().chain_broken):
                    self.num_relinked += 1
                    self._arrange(relays)

    def _arrange(self, relays: list[Relay]) -> None:
        self._epoch += 1
        relays[1].client.arrange(self._epoch, "first", None)
        relays[0].client.arrange(self._epoch, None, relays[1].neighbour)

    def _publish(self, client: RelayClient) -> None:
        self._step += 1
        version = Version(self._step, 0)
        self._weights[self._step % STRIDE :: STRIDE] += 1
        buffer = client.begin(version, self._manifest, 0, 1)
        if buffer is None:
            self.num_superseded += 1
            time.sleep(0.1)  # every slot is read or filled
            return
        np.copyto(np.frombuffer(buffer, np.uint16)[: len(self._weights)], self._weights)
        client.commit(version)
        self.num_published += 1

    def _judge(self, relays: list[Relay], readers: dict[tuple[str, str], "subprocess.Popen[str]"]) -> None:
        print(
            f"{self.num_published} versions of {self.num_bytes // MIB} MiB published, {self.num_superseded} superseded, ",
            end="",
        )
        print(
            f"{self.num_relinked} times linked anew, in {self.seconds:g} s\n\n| relay | reader | reads verified | versions |"
        )
        print("|---|---|---|---|")
        for (name, kind), reader in readers.items():
            out, log = reader.communicate(timeout=LIMIT_S)
            if reader.returncode:
                self.problems.append(f"the {kind} reader at {name}: {log.strip().splitlines()[-1:]}")
                continue
            found = json.loads(out)
            print(f"| {name} | {kind} | {found['reads']} | {found['versions']} |")
            if found["versions"] < 2:
                self.problems.append(f"the {kind} reader at {name} saw {found['versions']} versions")
        limit = (self.slots + SPARE) * self.num_bytes
        print("\n| relay | most resident memory, in models | limit |\n|---|---|---|")
        for relay in relays:
            peak = relay.peak_bytes()
            print(f"| {relay.name} | {peak / self.num_bytes:.3f} | {limit / self.num_bytes:g} |")
            if peak > limit:
                self.problems.append(f"{relay.name} took {peak} bytes, allowed are {limit:.0f}")


def main() -> int:
    options = _parse()
    if options.read:
        read(Path(options.read[0]), float(options.read[1]), float(options.read[2]))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was made is unmade
    soak = Soak(options.mib, options.seconds, options.slots)
    try:
        soak.run()
    except RelayError as error:
        soak.problems.append(str(error))
    for problem in soak.problems:
        print(f"VIOLATED: {problem}", file=sys.stderr)
    print("\nno torn read, memory within the limit" if not soak.problems else "\nNOT as promised, see above")
    return 1 if soak.problems else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--read", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
