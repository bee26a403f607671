"""The directory of checkpoints: what is complete, undamaged, superseded."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar import checkpoints
from laminar.errors import StartError


def checkpoint(directory: Path, step: int) -> Path:
    path = directory / f"step-{step}"
    (path / "state").mkdir(parents=True)
    (path / "data_state.bin").write_bytes(b"state of %d" % step)
    (path / "state" / "__0_0.distcp").write_bytes(b"weights" * 1000)
    names = ("data_state.bin", "state/__0_0.distcp")
    checkpoints.write_manifest(path, {name: checkpoints.digest(path / name) for name in names})
    return path


def damage_of(path: Path) -> str:
    manifest = checkpoints.read_manifest(path)
    return manifest if isinstance(manifest, str) else checkpoints.damage(path, list(manifest.files), manifest)


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "gone"),
    [
        (2, 0, [2, 4, 6, 8]),
        (1, 0, [2, 4, 6, 8, 10]),
        (0, 0, [2, 4, 6, 8, 10]),
        (9, 0, []),
        (2, 4, [2, 6]),
        (1, 5, [2, 4, 8]),
        (1, 1, []),
        (1, 100, [2, 4, 6, 8, 10]),
    ],
)
def test_the_last_few_checkpoints_and_the_first_of_every_so_many_steps_stay(
    keep_last: int, keep_every: int, gone: list[int]
) -> None:
    assert checkpoints.superseded([12, 2, 4, 10, 6, 8], keep_last, keep_every) == gone


@given(steps=st.sets(st.integers(1, 99), max_size=30), keep_last=st.integers(-1, 5), keep_every=st.integers(0, 40))
def test_the_newest_checkpoint_is_never_superseded_and_a_kept_one_stays_kept(
    steps: set[int], keep_last: int, keep_every: int
) -> None:
    left: set[int] = set()
    for number, step in enumerate(sorted(steps), start=1):
        left.add(step)
        left -= set(checkpoints.superseded(left, keep_last, keep_every))
        assert step in left
        assert len(left) >= min(number, keep_last)
    at_once = steps - set(checkpoints.superseded(steps, keep_last, keep_every))
    assert left == at_once, "pruning after each step or once at the end leaves the same"


def test_a_checkpoint_is_undamaged_as_long_as_its_bytes_are_those_that_were_written(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 4)
    assert damage_of(path) == ""
    (path / "data_state.bin").write_bytes(b"state of 5")
    assert damage_of(path) == "data_state.bin has other bytes than were written"
    (path / "data_state.bin").write_bytes(b"state of 44")
    assert damage_of(path) == "data_state.bin has 11 bytes, 10 were written"
    (path / "data_state.bin").unlink()
    assert damage_of(path) == "data_state.bin is missing"
    (path / "manifest.json").write_bytes(b'{"files": {}')
    assert damage_of(path).startswith("manifest.json is no manifest: ")
    (path / "manifest.json").unlink()
    assert damage_of(path) == "manifest.json is missing"
    assert damage_of(tmp_path / "step-9") == "it is missing"


def test_the_controller_goes_on_from_the_newest_checkpoint_in_which_its_own_part_is_undamaged(tmp_path: Path) -> None:
    two, four, six, eight = (checkpoint(tmp_path, step) for step in (2, 4, 6, 8))
    (eight / "data_state.bin").write_bytes(b"state of 9")
    (six / "manifest.json").write_bytes(b'{"format": 2, "files": {}}')
    (four / "state" / "__0_0.distcp").write_bytes(b"the trainer has to see this")
    found = checkpoints.newest_data_state(eight)
    assert (found.path, found.data_state) == (four, b"state of 4")
    assert found.damaged == {
        eight: "data_state.bin has other bytes than were written",
        six: "data_state.bin is not in its manifest.json",
    }
    for path in (four, two):
        (path / "data_state.bin").unlink()
    with pytest.raises(
        StartError, match=r"step-8: no checkpoint there is undamaged: .*; step-2: data_state\.bin is missing"
    ):
        checkpoints.newest_data_state(eight)


def test_what_cannot_be_read_for_another_reason_says_nothing_about_its_bytes(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 4)
    (path / "state" / "__0_0.distcp").unlink()
    (path / "state" / "__0_0.distcp").mkdir()
    with pytest.raises(checkpoints.UnreadableError, match=r"state/__0_0\.distcp cannot be read: Is a directory"):
        damage_of(path)
    (path / "manifest.json").write_bytes(b'{"format": 3, "files": {}}')
    with pytest.raises(checkpoints.UnreadableError, match="it has checkpoint format 3, this Laminar reads 2"):
        damage_of(path)


def test_only_what_is_complete_counts_and_what_is_half_written_or_half_deleted_is_swept(tmp_path: Path) -> None:
    for step in (10, 9, 2):
        checkpoint(tmp_path, step)
    for name in ("step-11.writing-01ab", "step-3.deleted", "step-4.old", "step-8.damaged", "notes"):
        (tmp_path / name / "state").mkdir(parents=True)
    assert [path.name for path in checkpoints.complete(tmp_path)] == ["step-2", "step-9", "step-10"]
    assert [path.name for path in checkpoints.until(tmp_path / "step-9")] == ["step-9", "step-2"]
    checkpoints.sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"step-2", "step-9", "step-10", "step-8.damaged", "notes"}


def test_a_checkpoint_replaces_one_of_its_name_and_is_deleted_under_another(tmp_path: Path) -> None:
    old, staging = checkpoint(tmp_path, 4), tmp_path / "step-4.writing-1"
    staging.mkdir()
    (staging / "new").touch()
    checkpoints.publish(staging, old)
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]
    assert (old / "new").exists()
    checkpoints.set_aside(old)
    assert [path.name for path in tmp_path.iterdir()] == ["step-4.damaged"]
    checkpoints.delete(checkpoint(tmp_path, 6))
    checkpoints.delete(tmp_path / "step-7")
    assert [path.name for path in tmp_path.iterdir()] == ["step-4.damaged"]
