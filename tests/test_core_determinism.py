"""The same events give the same actions: under any hash seed, from any snapshot, in any process."""

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from laminar.core import events
from laminar.core.engine import Core
from laminar.core.records import State
from tests.core_world import World, settings, trace

ROOT = Path(__file__).parent.parent
RICH = {"evaluate": True, "checkpoint_every": 2, "custom_sampler": True, "steps": 5, "group_size": 3}

REPLAY = """
import hashlib, sys
import msgspec
from laminar.core import events
from laminar.core.engine import Core
from tests.core_world import settings

core = Core(settings(**msgspec.json.decode(sys.argv[1])))
digest = hashlib.sha256()
for line in sys.stdin:
    event = msgspec.msgpack.decode(bytes.fromhex(line.strip()), type=events.AnyEvent)
    digest.update(msgspec.msgpack.encode(core.handle(event)))
digest.update(core.snapshot())
print(digest.hexdigest())
"""


def world(seed: int, **changes) -> World:
    made = World(settings(**(RICH | changes)), seed, faults=0.08)
    made.operator = True
    made.run()
    return made


def replay(log: list[bytes], hash_seed: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", REPLAY, msgspec.json.encode(RICH).decode()],
        input="\n".join(event.hex() for event in log),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_recorded_events_give_the_same_actions_under_two_hash_seeds():
    made = world(seed=5)
    assert len(made.log) > 100
    digests = {replay(made.log, hash_seed) for hash_seed in ("1", "4711")}
    assert len(digests) == 1
    core = Core(settings(**RICH))
    expected = hashlib.sha256()
    for event in made.log:
        decoded = msgspec.msgpack.decode(event, type=events.AnyEvent)
        expected.update(msgspec.msgpack.encode(core.handle(decoded)))
    expected.update(core.snapshot())
    assert digests == {expected.hexdigest()}


def test_another_log_gives_another_digest():
    made = world(seed=5)
    assert replay(made.log[:-1], "1") != replay(made.log, "1")


@pytest.mark.parametrize("seed", range(6))
def test_replay_of_the_log_gives_the_live_actions(seed):
    made = world(seed)
    core = Core(settings(**RICH))
    actions = [a for e in made.log for a in core.handle(msgspec.msgpack.decode(e, type=events.AnyEvent))]
    assert msgspec.msgpack.encode(actions) == trace(made)


@pytest.mark.parametrize("seed", range(6))
def test_a_core_restored_at_random_points_goes_on_the_same(seed):
    made = world(seed)
    points = random.Random(seed)
    core = Core(settings(**RICH))
    actions = []
    for event in made.log:
        if points.random() < 0.1:
            core = Core.restore(settings(**RICH), core.snapshot())
        actions += core.handle(msgspec.msgpack.decode(event, type=events.AnyEvent))
    assert msgspec.msgpack.encode(actions) == trace(made)
    assert core.snapshot() == made.core.snapshot()


@pytest.mark.parametrize("every", [1, 7])
def test_a_world_whose_core_is_restored_all_the_time_is_the_same_world(every):
    plain = world(seed=3)
    restored = World(settings(**RICH), 3, faults=0.08)
    restored.operator = True
    restored.restore_each = every
    restored.run()
    assert trace(restored) == trace(plain)


def test_a_snapshot_of_a_restored_core_is_the_same_snapshot():
    made = World(settings(**RICH), 1, faults=0.1)
    made._take(made._begin())
    while not made.core.state.finished:
        made._take(made._next())
        data = made.core.snapshot()
        again = Core.restore(settings(**RICH), data)
        assert again.snapshot() == data
        assert again.state == made.core.state
        assert again.next_deadline() == made.core.next_deadline()


def test_a_snapshot_is_refused_if_it_is_garbage():
    with pytest.raises(msgspec.DecodeError):
        Core.restore(settings(), b"\xc1garbage")


def test_fresh_states_share_nothing():
    one, two = State(), State()
    one.buffer[1] = None
    one.ledger.tokens.dropped["x"] = 1
    one.trainer.ranks["w"] = 1
    assert two == State()
