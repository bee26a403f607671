"""What `/v1/status` tells of a core."""

import json

from test_core_moves import check, tailing

from laminar.controller.status import status_of


def test_the_status_says_why_each_replica_was_emptied_or_not_and_what_moved() -> None:
    driver = tailing()
    (moving,) = driver.generating("r0")
    check(driver)
    driver.report("r0", {moving: 5}, aborted=[moving])
    told = json.loads(json.dumps(status_of(driver.core)))
    assert told["repack"].pop("reasons") == driver.core.state.repack.reasons
    checked_at = driver.core.state.repack.checked_at
    assert told["repack"] == {"checked_at": checked_at, "checks": 3, "emptied": 1, "moves": 1, "moved_tokens": 5}
    assert told["replicas"]["r1"]["generating"] == 3
    assert told["replicas"]["r0"]["version"] == "v0"
