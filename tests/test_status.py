"""What `/v1/status` tells of a core."""

import json

from core_world import Driver, settings
from test_core_moves import check, tailing

from laminar.console.view import View
from laminar.controller.console import reported
from laminar.controller.status import status_of
from laminar.core import events
from laminar.core.operator_records import Condition
from laminar.ids import Version, WorkerId
from laminar.wire import Progress, RelayReport, SlotReport


def test_the_status_says_why_each_replica_was_emptied_or_not_and_what_moved() -> None:
    driver = tailing()
    (moving,) = driver.generating("r0")
    check(driver)
    driver.report("r0", {moving: 5}, aborted=[moving])
    told = json.loads(json.dumps(status_of(driver.core, {})))
    assert told["repack"].pop("reasons") == driver.core.state.repack.reasons
    checked_at = driver.core.state.repack.checked_at
    assert told["repack"].pop("moved_reasons") == driver.core.state.repack.moved_reasons
    numbers = {"checks": 3, "emptied": 1, "moves": 1, "moved_tokens": 5}
    assert told["repack"] == {"checked_at": checked_at, "moved_at": checked_at, **numbers}
    assert told["replicas"]["r1"]["generating"] == 3
    assert told["replicas"]["r0"]["version"] == "v0"


def test_the_status_tells_the_chain_and_how_trajectories_of_lost_replicas_went_on() -> None:
    driver = Driver(settings())
    driver.start("r0", "r1")
    num = len(driver.generating("r0"))
    driver.lost("r0")
    told = json.loads(json.dumps(status_of(driver.core, {})))
    assert told["relays"] == {
        "epoch": 1,
        "order": ["relay-0"],
        "master": "relay-0",
        "held": {"relay-0": ["v0"]},
        "links": {},
    }
    assert told["failovers"] == {"same_version": num, "relay": 0, "checkpoint": 0, "restarted": 0}


def test_the_status_says_what_holds_new_groups_back() -> None:
    driver = Driver(settings(buffer_groups_max=4, batch_groups=4, local_batch_groups=4, steps=1))
    assert str(status_of(driver.core, {})["new_groups"]).startswith("begin wherever")
    driver.start("r0")
    assert "enough for the remaining steps" in str(status_of(driver.core, {})["new_groups"])
    longer = Driver(settings(buffer_groups_max=4, batch_groups=4, local_batch_groups=4, steps=9))
    longer.start("r0")
    assert (
        status_of(longer.core, {})["new_groups"] == "held back by buffer.max_groups: 4 of 4 are in flight or buffered"
    )


def test_the_status_tells_what_each_relay_uses_and_how_far_it_is():
    driver = Driver(settings())
    driver.start("r0")
    driver.relay("relay-1", host="h1")
    coming = Progress(version=Version(1, 0), num_bytes=3 << 20, total_bytes=4 << 20)
    filling = SlotReport(state="filling", version=Version(1, 0), num_leases=1)
    report = RelayReport(
        transport="ucx over TCP",
        sent_bytes=8 << 20,
        wire_bytes=1 << 20,
        receiving=coming,
        slots=[filling, SlotReport(state="free")],
        slot_bytes=4 << 20,
    )
    gone = RelayReport(transport="tcp over TCP")
    told = json.loads(json.dumps(status_of(driver.core, {WorkerId("relay-1"): report, WorkerId("relay-9"): gone})))
    assert list(told["relays"]["links"]) == ["relay-1"]
    link = told["relays"]["links"]["relay-1"]
    assert (link["transport"], link["sent_bytes"], link["wire_bytes"]) == ("ucx over TCP", 8 << 20, 1 << 20)
    assert link["receiving"] == {"version": "v1", "bytes": 3 << 20, "of": 4 << 20}
    assert link["sending"] is None
    free = {"state": "free", "version": None, "leases": 0}
    assert link["slots"] == [{"state": "filling", "version": "v1", "leases": 1}, free]
    assert link["slot_bytes"] == 4 << 20
    view = View(driver.core, target="live", now=0.0, began=0.0)
    own, said = reported({WorkerId("relay-1"): report, WorkerId("relay-9"): gone})(view, []).tables
    assert [row[1] for row in own.rows] == ["relay-0", "relay-1"]
    (row,) = said.rows
    assert dict(zip(said.columns, row, strict=True)) == {
        "relay": "relay-1",
        "slots": "v1 filling, free",
        "slot_bytes": 4 << 20,
        "leases": 1,
        "receiving": "v1 75%",
        "sending": "",
        "sent_bytes": 8 << 20,
        "wire_bytes": 1 << 20,
        "kept": "",
        "kept_bytes": 0,
        "links": "ucx over TCP",
    }


def test_the_status_tells_what_an_operator_holds_and_has_changed() -> None:
    driver = Driver(settings(steps=9))
    driver.start("r0")
    driver.send(events.BreakpointSet(where="sample", conditions=[Condition("step", "==", 1)]))
    driver.send(events.SettingsChanged(changes={"buffer_groups_max": 8}))
    driver.send(events.SamplerChanged(reference="fifo"))
    driver.send(events.StopAfterStep(step=3))
    driver.send(events.HoldChanged(pass_name="dispatch", held=True, mode="pause"))
    driver.complete_all("r0")
    told = json.loads(json.dumps(status_of(driver.core, {})))["operator"]
    assert told == {
        "holds": [
            "the pass dispatch is paused by an operator",
            "the pass sample is held by breakpoint 1, decision 1 waits for a word",
        ],
        "held": {"1": "step 1 gets a batch of 2 groups"},
        "breakpoints": {"1": {"at": "sample when step == 1", "hits": 1}},
        "settings": {"buffer.max_groups": 8},
        "sampler": "fifo",
        "stop_after_step": 3,
    }
