"""The report on a run with faults is clean when nothing is wrong, and finds what is: databases are doctored one thing at a time."""

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from laminar.chaos import evidence, verdicts
from laminar.chaos.evidence import Evidence
from laminar.chaos.journal import Strike
from laminar.core import events
from laminar.errors import ConfigError
from laminar.ids import Version, make_id
from tests.chaos_world import Cluster, broken, doctor, doctor_event, judged, leave

ANY_TRAINED = "(SELECT min(id) FROM trajectories WHERE step IS NOT NULL)"


def ended(seed: int = 1, faults: float = 0.0) -> Cluster:
    world = Cluster(seed, faults)
    world.run()
    return world


@pytest.mark.parametrize("seed", range(4))
def test_a_run_in_which_nothing_is_wrong_is_clean(tmp_path: Path, seed: int) -> None:
    world = ended(seed)
    report = judged(world, leave(world, tmp_path / "run"))
    assert report.clean, broken(report)
    assert (report.num_steps, report.num_faults) == (6, 0)
    assert report.drawn == sum(report.places.values()) > 0
    assert report.tokens == sum(report.token_places.values()) > 0


def test_workers_that_are_lost_without_a_fault_are_found(tmp_path: Path) -> None:
    world = ended(seed=3, faults=0.1)
    report = judged(world, leave(world, tmp_path / "run"))
    assert list(broken(report)) == ["no loss without a fault"]
    assert "while no fault was at work" in broken(report)["no loss without a fault"][0]


def rows(statement: str) -> Callable[[Path], None]:
    return lambda run: doctor(run, statement)


DOCTORED = {
    "a group half of which was trained in another step": (
        rows(f"UPDATE trajectories SET step = step + 1 WHERE id = {ANY_TRAINED}"),
        ("no group trained twice", "rows as the log gives them"),
    ),
    "a trajectory without a row": (
        rows(f"DELETE FROM trajectories WHERE id = {ANY_TRAINED}"),
        ("rows as the log gives them", "every trajectory accounted for"),
    ),
    "a trajectory that ended nowhere": (
        rows(f"UPDATE trajectories SET step = NULL WHERE id = {ANY_TRAINED}"),
        ("rows as the log gives them", "every trajectory accounted for"),
    ),
    "tokens that were not received": (
        rows(f"UPDATE trajectories SET num_tokens = num_tokens + 1 WHERE id = {ANY_TRAINED}"),
        ("rows as the log gives them", "every trajectory accounted for"),
    ),
    "a sibling of another version": (
        rows(f"UPDATE trajectories SET behavior_version = 'v77' WHERE id = {ANY_TRAINED}"),
        ("rows as the log gives them", "one version per trajectory"),
    ),
    "a digest that is not the published one": (
        rows(f"UPDATE trajectories SET digest = 'other' WHERE id = {ANY_TRAINED}"),
        ("rows as the log gives them", "one version per trajectory"),
    ),
    "a version that was never published": (
        rows("DELETE FROM versions WHERE step = 0"),
        ("one version per trajectory",),
    ),
    "an event of which the core can make nothing": (
        lambda run: doctor_event(run, events.ReplicaReported, 3, trajectories=b"123"),
        ("ledger closed after every event",),
    ),
    "a version with two digests": (
        lambda run: doctor_event(run, events.ReplicaRefreshed, 1, digest="other"),
        ("one digest per version",),
    ),
    "an event that is missing": (
        rows("DELETE FROM events WHERE kind = 'StepFinished' AND seq = (SELECT max(seq) FROM events WHERE kind = 'StepFinished')"),
        ("ledger closed after every event",),
    ),
    "a step that the log tells under another number": (
        lambda run: doctor_event(run, events.StepFinished, 1, step=9),
        ("rows as the log gives them",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DOCTORED)
def test_a_doctored_run_is_not_clean(tmp_path: Path, name: str) -> None:
    change, expected = DOCTORED[name]
    world = ended()
    run = leave(world, tmp_path / "run")
    assert judged(world, run).clean
    change(run)
    report = judged(world, run)
    assert not report.clean
    assert set(expected) <= set(broken(report)), broken(report)


def test_a_prompt_that_was_drawn_twice_is_found(tmp_path: Path) -> None:
    world = ended()
    found = Evidence(leave(world, tmp_path / "run"), world.core.settings)
    assert verdicts.prompts_once(found, []) == []
    first, second, *_ = found.prompts
    found.prompts[second] = found.prompts[first]
    assert verdicts.prompts_once(found, []) == [f"prompt {found.prompts[first]} was drawn 2 times in 1 epochs"]


def test_a_corrupt_version_that_a_replica_used_is_found(tmp_path: Path) -> None:
    world = ended()
    pulls = [event for event in decoded(world) if isinstance(event, events.ReplicaRefreshed)]
    last = pulls[-1]
    facts = {"version": str(last.version)}
    early = Strike(number=1, kind="corrupt", target="relay-0", at=last.at - 5.0, until=last.at - 5.0, facts=facts)
    late = Strike(number=1, kind="corrupt", target="relay-0", at=last.at, until=last.at, facts=facts)
    run = leave(world, tmp_path / "early", early)
    set_hosts(run)
    found = broken(judged(world, run)).get("no corrupt version used", [])
    assert any("which was corrupted in relay-0" in finding for finding in found)
    run = leave(world, tmp_path / "late", late)
    set_hosts(run)
    assert "no corrupt version used" not in broken(judged(world, run))


def decoded(world: Cluster) -> list[events.AnyEvent]:
    return [msgspec.msgpack.decode(body, type=events.AnyEvent) for body in world.log]


def set_hosts(run: Path) -> None:
    """All workers of the world are on one host."""
    doctor_event(run, events.RelayJoined, 0, host="h")


def test_a_run_that_goes_on_is_judged_as_of_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = ended()
    run = leave(world, tmp_path / "run")
    with contextlib.closing(sqlite3.connect(run / "run.db")) as database:
        database.execute("PRAGMA journal_mode = WAL")
    read = evidence._tables

    def read_while_it_goes_on(database: sqlite3.Connection, boots: list[tuple[object, ...]]) -> evidence.Tables:
        doctor(run, "INSERT INTO trajectories (id, prompt, group_id) VALUES (?, 7, 7)", make_id(1, 777_777))
        return read(database, boots)

    monkeypatch.setattr(evidence, "_tables", read_while_it_goes_on)
    assert judged(world, run).clean
    monkeypatch.undo()
    assert "rows as the log gives them" in broken(judged(world, run))


def test_what_a_run_did_before_it_went_on_from_a_checkpoint_is_no_part_of_it(tmp_path: Path) -> None:
    world = ended()
    run = leave(world, tmp_path / "run")
    doctor(run, "INSERT INTO trajectories (id, prompt, group_id, step) VALUES (?, 7, 7, 1)", make_id(0, 7))
    assert judged(world, run).clean


def test_what_is_no_run_with_faults_is_refused(tmp_path: Path) -> None:
    world = ended()
    with pytest.raises(ConfigError, match="no faults were injected there"):
        judged(world, tmp_path)
    run = leave(world, tmp_path / "run")
    doctor(run, "DELETE FROM events WHERE seq < 9")
    with pytest.raises(ConfigError, match=r"the first 8 events have left the log \(log.max_mib\)"):
        judged(world, run)
    doctor(run, "UPDATE boots SET code = '0.0.0'")
    with pytest.raises(ConfigError, match=r"made by Laminar 0\.0\.0"):
        judged(world, run)
    (run / "chaos.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        judged(world, run)


def test_versions_are_named_as_the_database_names_them() -> None:
    for version in (Version(3, 0), Version(3, 2)):
        assert verdicts._name(version.step, version.branch) == str(version)
