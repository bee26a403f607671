"""The hosts file: what it means, and that every mistake is named with its line."""

import re
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.errors import ConfigError
from laminar.hosts import HOSTS_MAX, is_local, load, parse

TRAINER = "trainer0 trainer\n"


def addresses(text: str, role: str = "rollout") -> list[str]:
    return [host.address for host in parse(TRAINER + text, "hosts.txt") if host.role == role]


def message(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, "hosts.txt")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def line_message(line: str) -> str:
    """The message for a wrong third line of a file that is right otherwise."""
    text = message(f"{TRAINER}r0 rollout\n{line}\n")
    assert text.startswith("hosts.txt:3: expected ")
    return text


def test_the_example_of_the_documentation_is_understood():
    hosts = parse(
        """
        # address        role      options
        trainer[0-1]     trainer   gpus=8
        rollout[00-15]   rollout   gpus=8 tp=4    # two replicas each
        localhost        rollout   engine=embedded replicas=2
        """,
        "hosts.txt",
    )
    assert [host.address for host in hosts[:4]] == ["trainer0", "trainer1", "rollout00", "rollout01"]
    assert len(hosts) == 19
    assert hosts[17].address == "rollout15"
    assert (hosts[0].gpus, hosts[0].ranks, hosts[0].line) == (8, 8, 3)
    assert (hosts[2].replicas, hosts[2].tp, hosts[2].gpus) == (2, 4, 8)
    assert (hosts[18].engine, hosts[18].replicas, hosts[18].gpus) == ("embedded", 2, 0)


def test_options_that_are_not_given_have_their_defaults():
    trainer, rollout = parse("t trainer\nr rollout\n", "hosts.txt")
    assert (trainer.gpus, trainer.ranks, trainer.python) == (0, 1, "")
    assert (rollout.engine, rollout.replicas, rollout.tp, rollout.max_concurrent) == ("embedded", 1, 1, 0)


def test_options_are_read():
    trainer, rollout = parse(
        "t trainer ranks=2\nr rollout python=/opt/a#b/python max_concurrent=64 engine=vllm", "hosts.txt"
    )
    assert trainer.ranks == 2
    assert (rollout.python, rollout.max_concurrent, rollout.engine) == ("/opt/a#b/python", 64, "vllm")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("r[0-2]", ["r0", "r1", "r2"]),
        ("r[08-11].rack", ["r08.rack", "r09.rack", "r10.rack", "r11.rack"]),
        ("r[8-11]", ["r8", "r9", "r10", "r11"]),
        ("r[1,3,5-7]", ["r1", "r3", "r5", "r6", "r7"]),
        ("r[0-1]n[0-1]", ["r0n0", "r0n1", "r1n0", "r1n1"]),
        ("10.0.0.[7-8]", ["10.0.0.7", "10.0.0.8"]),
        ("fe80::1", ["fe80::1"]),
        ("::1", ["::1"]),
    ],
)
def test_ranges_stand_for_their_hosts_in_order(pattern, expected):
    assert addresses(f"{pattern} rollout") == expected


@given(st.integers(0, 2000), st.integers(0, 50), st.integers(1, 5))
def test_a_padded_range_has_every_number_at_its_width(low, more, width):
    text = f"{low:0{width}}-{low + more:0{width}}"
    found = addresses(f"r[{text}] rollout")
    width = width if f"{low:0{width}}".startswith("0") else 0
    assert found == [f"r{value:0{width}}" if width else f"r{value}" for value in range(low, low + more + 1)]


def test_one_host_may_have_both_roles():
    assert addresses("trainer0 rollout") == ["trainer0"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("onlyname", "got only 'onlyname'"),
        ("x rolout", "got 'rolout'; did you mean rollout?"),
        ("x rollout gpu=8", "got 'gpu'; did you mean gpus?"),
        ("x rollout replcias=8", "did you mean replicas?"),
        ("x trainer listen=a/b", "expected listen to be a host name or address, got 'a/b'"),
        ("x trainer tp=4", "expected an option of a trainer (gpus, ranks, python, listen), got 'tp'"),
        ("x rollout gpus", "expected key=value without spaces, got 'gpus'"),
        ("x rollout gpus = 8", "expected key=value without spaces, got 'gpus'"),
        ("x rollout =8", "got '=8'"),
        ("x rollout gpus=", "got 'gpus='"),
        ("x rollout gpus=-1", "expected gpus to be a whole number from 0 to 64, got '-1'"),
        ("x rollout gpus=1.5", "got '1.5'"),
        ("x rollout gpus=999999999999999", "got '999999999999999'"),
        ("x rollout replicas=0", "a whole number from 1 to 1024, got '0'"),
        ("x trainer ranks=two", "got 'two'"),
        ("x rollout gpus=1 gpus=1", "expected each option once, got gpus twice"),
        ("x rollout engine=vlm", "got 'vlm'; did you mean vllm?"),
        ("x rollout gpus=6 tp=4", "expected gpus to be a multiple of tp = 4, got gpus=6"),
        ("x rollout tp=2", "got gpus=0"),
        ("r0 rollout", "got r0 rollout again (line 2)"),
        ("R0 rollout", "got r0 rollout again (line 2)"),
        ("R0 trainer", "expected one spelling of a host, got R0 after r0 (line 2)"),
        ("me@x rollout", "got 'me@x'; users and ports are named in ~/.ssh/config"),
        ("x:2222 rollout", "got 'x:2222'; users and ports are named in ~/.ssh/config"),
        ("x[1,1] rollout", "got x1 rollout again (line 3)"),
        ("x[2-1] rollout", "expected a range from low to high, got [2-1]"),
        ("x[0-10000] rollout", f"at most {HOSTS_MAX} hosts, got [0-10000]"),
        ("x[0-999][0-999] rollout", f"at most {HOSTS_MAX} hosts in one line, got 1000000"),
        ("x[] rollout", "got []"),
        ("x[a-b] rollout", "got [a-b]"),
        ("x[1-] rollout", "got [1-]"),
        ("x[0-3 rollout", "expected a host name or address"),
        ("[::1] rollout", "expected a range like"),
        ("-oProxyCommand=x rollout", "expected a host name or address"),
        ("häst rollout", "expected a host name or address"),
    ],
)
def test_a_wrong_line_is_named_with_what_was_expected(line, expected):
    assert expected in line_message(line)


def test_a_file_without_hosts_is_refused():
    assert "got no host at all" in message("")
    assert "got no host at all" in message("# nothing\n\n")


def test_a_file_without_a_trainer_or_a_rollout_is_refused():
    assert "at least one line with role trainer" in message("r rollout\n")
    assert "at least one line with role rollout" in message("t trainer\n")


@given(st.text(max_size=60))
def test_any_text_gives_hosts_or_a_config_error(text):
    try:
        hosts = parse(TRAINER + text, "hosts.txt")
    except ConfigError:
        return
    assert {host.role for host in hosts} == {"trainer", "rollout"}


def test_a_file_is_loaded_with_its_byte_order_mark_and_windows_line_ends(tmp_path):
    path = tmp_path / "hosts.txt"
    path.write_bytes(b"\xef\xbb\xbft trainer\r\nr rollout gpus=1\r\n")
    assert [(host.address, host.gpus) for host in load(path)] == [("t", 0), ("r", 1)]


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"t trainer\xff")
    for path, expected in [
        (tmp_path / "none.txt", "none.txt: cannot read the hosts file: No such file or directory"),
        (tmp_path, "Is a directory"),
        (binary, "expected a text file in UTF-8, got byte 9 = 0xff"),
    ]:
        with pytest.raises(ConfigError, match=expected):
            load(path)


def test_this_machine_is_told_from_others():
    own = socket.gethostname()
    assert all(is_local(name) for name in ("localhost", "LOCALHOST", "127.0.0.1", "::1", own, own.partition(".")[0]))
    assert not any(is_local(name) for name in ("trainer0", "10.0.0.1", "localhost.example"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("vllm.block-size=32", "expected vllm.block-size only with engine=vllm"),
        ("engine=embedded url=http://h:1", "expected url only with engine=vllm"),
        ("engine=vllm vllm.max-num-seqs=64", "--max-num-seqs cannot be set here; use max_concurrent=N"),
        ("engine=vllm vllm.no-enable-prefix-caching=true", "--no-enable-prefix-caching cannot be set here"),
        ("engine=vllm vllm.max_model_len=64", "--max-model-len cannot be set here; use model.context_tokens_max"),
        ("engine=vllm vllm.--block-size=32", "expected vllm.FLAG=VALUE with a flag of vLLM without its dashes"),
        ("engine=vllm url=h:8000", "expected url=http://host:port of a vLLM server, got 'h:8000'"),
        ("engine=vllm url=http://h:1 gpus=4", "expected no gpus beside url"),
        ("engine=vllm url=http://h:1 vllm.block-size=32", "expected no vllm.block-size beside url"),
        ("engine=vllm url=http://h:1 replicas=2", "expected one replica per vLLM server, got replicas=2"),
    ],
)
def test_options_of_a_vllm_server_are_checked(options: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        parse(f"t trainer\nr rollout {options}", "hosts.txt")


def test_flags_of_vllm_are_passed_on_in_their_order() -> None:
    text = (
        't trainer\nr rollout engine=vllm vllm.hf_overrides={"a":1} vllm.enable-lora=true vllm.async-scheduling=false'
    )
    flags = parse(text, "hosts.txt")[1].vllm_flags
    assert flags == ["--hf-overrides", '{"a":1}', "--enable-lora", "--no-async-scheduling"]
