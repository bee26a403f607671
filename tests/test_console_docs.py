"""What docs/console.md and docs/debugging.md say that the console prints of simulated runs is what it prints."""

import pytest
from e2e import ROOT

from scripts import console_docs
from scripts.console_docs import PAGES, Transcript, transcripts

TEXTS = {page: (ROOT / page).read_text() for page in PAGES}
SHOWN = [found for page, text in TEXTS.items() for found in transcripts(page, text)]


@pytest.mark.timeout(180)  # whole simulated runs
@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: f"{shown.page}-{SHOWN.index(shown)}")
def test_a_page_shows_all_that_the_command_prints(shown: Transcript) -> None:
    lines = console_docs.differences(shown, TEXTS[shown.page], console_docs.printed(shown.command))
    assert not lines, "\n".join(["if that is meant: python scripts/console_docs.py --write", *lines])


def test_every_investigation_is_there() -> None:
    assert sum(shown.page == "docs/debugging.md" for shown in SHOWN) == 3
    assert all("whatif" in shown.command for shown in SHOWN if shown.page == "docs/debugging.md")


def test_a_difference_is_found_and_can_be_written() -> None:
    page = (
        "before\n```\n$ python -m laminar.console --sim small \\\n  -c 'x; y'\n> x\nold\n```\nwhy\n```\n> y\nold\n```\n"
    )
    (found,) = transcripts("page", page)
    assert found.command == "python -m laminar.console --sim small   -c 'x; y'"
    output = "> x\nnew\n> y\nold\n"
    assert "-old" in console_docs.differences(found, page, output)
    after = console_docs.written(found, page, output)
    assert after == page.replace("old", "new", 1)
    (again,) = transcripts("page", after)
    assert console_docs.differences(again, after, output) == []
    assert console_docs.differences(again, after, output + "> z\nmore\n"), "all that is printed has to be there"
