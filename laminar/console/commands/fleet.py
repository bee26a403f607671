"""Look at replicas, relays and weight versions."""

from collections import Counter

from laminar.console import subjects
from laminar.console.answers import Answer, Cell, Table, table
from laminar.console.commands import stories
from laminar.console.language import Command
from laminar.console.view import View
from laminar.core import groups, health, story, versions, waits
from laminar.core.records import Replica, VersionRecord
from laminar.ids import Version, WorkerId, format_id

STORY_ROWS = 8  # of a replica's story, at the end of what is shown of it
USUAL = (health.Health.GENERATING, health.Health.DRAINING)
"""What needs no note: `why r3` has the reason."""
FLEET = "replica health version behind generating running waiting kv_share admits host note"


def show_fleet(view: View, words: list[str]) -> Answer:
    """Every replica, one a row, or those that have all of the words in their row."""
    rows = [_row(view, worker, status) for worker, status in health.overview(view.turn).items()]
    chosen = rows
    for word in words:
        chosen = _with(subjects.written(view, word), chosen)
    if words and not chosen:
        return Answer(
            lines=[f"no replica has {' and '.join(map(repr, words))} in its row; `fleet` shows all {len(rows)}"]
        )
    return Answer(tables=[table("", FLEET, chosen)], lines=[_summary(view, rows)])


def _with(word: str, rows: list[list[Cell]]) -> list[list[Cell]]:
    """Rows of which a cell is the word, `v1` and not `v12`; if none is, those of which a cell has it in it."""
    return [row for row in rows if word in row] or [row for row in rows if any(word in str(cell) for cell in row)]


def _row(view: View, worker: WorkerId, status: health.Status) -> list[Cell]:
    """Also of one that was lost and is not back."""
    replica = view.state.replicas.get(worker)
    if replica is None:
        return [worker, status.health.value, "–", None, 0, 0, 0, None, None, "", status.reason]
    return [
        replica.id,
        status.health.value,
        str(replica.version or "–"),
        _behind(view, replica.version),
        replica.num_generating,
        replica.num_running,
        replica.num_waiting,
        replica.kv_tokens / replica.kv_tokens_max if replica.kv_tokens_max else None,
        max(0, replica.admit_left) if view.settings.refresh_policy == "batch" else None,
        replica.host,
        "" if status.health in USUAL else status.reason,
    ]


def _behind(view: View, version: Version | None) -> int | None:
    """Trainer steps from a version to what the trainer holds now."""
    return versions.staleness(view.state.branches, view.turn.trainer_version, version) if version else None


def _summary(view: View, rows: list[list[Cell]]) -> str:
    by_health = Counter(str(row[1]) for row in rows)
    by_version = Counter(str(r.version) for r in view.state.replicas.values() if r.version)
    parts = [", ".join(f"{num} {name}" for name, num in counts.items()) for counts in (by_health, by_version) if counts]
    return f"{len(rows)} replicas: {'; '.join(parts)}" if rows else "there are no replicas yet"


def show_replica(view: View, words: list[str]) -> Answer:
    """One replica: what it does and holds, what it waits for, and what happened to it last."""
    replica = subjects.replica(view, words[0])
    status, waiting = health.status(view.turn, replica), waits.of_replica(view.turn, replica)
    restart = view.state.restarts.get(replica.id)
    facts: dict[str, Cell] = {
        "replica": replica.id,
        "health": f"{status.health.value}: {status.reason}",
        "waits_for": waiting.what + (f" ({', '.join(waiting.on)})" if waiting.on else ""),
        "version": str(replica.version) if replica.version else None,
        "pulls": str(replica.target) if replica.target else None,
        "behind_the_trainer": _behind(view, replica.version),
        "host": replica.host,
        "incarnation": replica.incarnation,
        "restarts": restart.num if restart else 0,
        "requests": f"{replica.num_generating} generating ({replica.num_running} running, {replica.num_waiting} waiting), "
        f"at most {replica.num_requests_max}",
        "kv_tokens": replica.kv_tokens,
        "kv_tokens_max": replica.kv_tokens_max,
        "kv_tokens_at_the_last_repack_check": replica.kv_previous,
        "local_batch": f"{max(0, replica.admit_left)} groups left" if view.settings.refresh_policy == "batch" else None,
        "on_their_way_here": len(replica.incoming),
        "told_to_stop_here": len(replica.leaving),
        "last_progress_s": view.since_s(replica.progress_at),
        "repack": view.state.repack.reasons.get(replica.id),
    }
    told = stories.rows(view, view.core.story.of(story.worker(replica.id)), rows_max=STORY_ROWS)
    note = f"`why {words[0]}` says why it is so, `story {words[0]}` all that happened to it"
    return Answer(facts=facts, tables=[_on(view, replica), told], lines=[note])


def _on(view: View, replica: Replica) -> Table:
    """The groups of which the replica has siblings."""
    here: dict[int, list[int]] = {}
    for trajectory in replica.attempts:
        record = view.state.trajectories[trajectory]
        here.setdefault(record.group, []).append(record.num_tokens)
    rows: list[list[Cell]] = [
        [f"g{format_id(group)}", len(lengths), min(lengths), max(lengths)] for group, lengths in here.items()
    ]
    return table(
        "groups here", "group siblings tokens_min tokens_max", rows, rows_max=20, note=f"`groups {replica.id}`: all"
    )


# ---- weights -----------------------------------------------------------------------------------------------


def show_versions(view: View, words: list[str]) -> Answer:
    """Weight versions in order of publication: who holds them, and what is generated under them."""
    on_replicas = Counter(r.version for r in view.state.replicas.values() if r.version)
    open_states = groups.OPEN_STATES
    live = Counter(t.behavior_version for t in view.state.trajectories.values() if t.state in open_states)
    rows: list[list[Cell]] = [
        [
            str(record.version),
            _publication(record),
            _behind(view, record.version),
            on_replicas[record.version],
            live[record.version],
            len([r for r in view.state.relays.values() if record.version in r.held]),
            view.since_s(record.published_at),
        ]
        for record in view.state.versions
    ]
    columns = "version state behind replicas trajectories relays published_age_s"
    used = [row for row in rows if row[3] or row[4] or row[5] or row is rows[-1]]
    chosen = rows if words == ["all"] else used
    note = "`versions all`: also what nobody holds any more" if len(rows) > len(chosen) else ""
    return Answer(tables=[table("", columns, chosen, left_off=len(rows) - len(chosen), note=note)])


def _publication(record: VersionRecord) -> str:
    if record.ready:
        return "readable"
    if record.deadline:
        return "is being published"
    if record.retry_at:
        return f"is to be tried again: {record.lost}"
    return f"lost: {record.lost}" if record.lost else "not published yet"


def show_relays(view: View, words: list[str]) -> Answer:
    """The chain through which weights flow, and what each relay holds."""
    chain = view.state.chain
    order = {worker: place for place, worker in enumerate(chain.order)}
    relays_ = sorted(view.state.relays.values(), key=lambda relay: order.get(relay.id, len(order)))
    rows: list[list[Cell]] = [
        [
            order.get(relay.id),
            relay.id,
            relay.host,
            relay.rack,
            "master" if relay.id == chain.master else "",
            " ".join(map(str, relay.held)),
            " ".join(map(str, relay.retained)),
            "slow" if relay.slow_since else "",
        ]
        for relay in relays_
    ]
    lost = [worker for worker in view.state.relay_hosts.values() if worker not in view.state.relays]
    lines = [f"chain of epoch {chain.epoch}: {' → '.join(chain.order) or 'no relay yet'}"]
    lines += [f"away: {', '.join(lost)}"] if lost else []
    return Answer(tables=[table("", "place relay host rack role holds retains link", rows)], lines=lines)


COMMANDS = (
    Command(
        name="fleet",
        part="Look",
        usage="fleet [WORD …]",
        summary="all replicas: health, version, requests, KV use, room in their local batch",
        function=show_fleet,
        arguments=(0, 8),
        takes="generating draining syncing suspect dead REPLICA VERSION",
        examples=(
            ("fleet", "all of them"),
            ("fleet draining", "those that drain"),
            ("fleet v12 host-3", "those on host-3 that hold v12"),
        ),
        details="Words choose rows that have all of them. `behind` counts trainer steps from the version that a replica holds "
        "to what the trainer holds now; `admits`, under refresh policy `batch`, the groups that its local batch has room for.",
    ),
    Command(
        name="replica",
        part="Look",
        usage="replica NAME",
        summary="one replica: what it does, holds and waits for, and its last moments",
        function=show_replica,
        arguments=(1, 1),
        takes="REPLICA",
        examples=(("replica r3", "rollout-3, by its short name"), ("replica rollout-3", "the same")),
    ),
    Command(
        name="versions",
        part="Look",
        usage="versions [all]",
        summary="weight versions: who holds them, what is generated under them",
        function=show_versions,
        arguments=(0, 1),
        option="all",
        examples=(
            ("versions", "those that somebody holds or generates under"),
            ("versions all", "all that are remembered"),
        ),
    ),
    Command(
        name="relays",
        part="Look",
        usage="relays",
        summary="the chain of relays, and which versions each holds",
        function=show_relays,
        examples=(("relays", "in the order in which weights flow"),),
    ),
)
