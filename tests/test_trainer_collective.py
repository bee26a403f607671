"""Which network interface the ranks of several hosts use."""

import os

import psutil
import pytest

from laminar.workers.trainer.collective import interface_of, use_own_interface


def own_address() -> tuple[str, str]:
    """(interface, IPv4 address) of this machine that others can reach, as far as it has one."""
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family.name == "AF_INET" and not address.address.startswith("127."):
                return name, address.address
    pytest.skip("this machine has a loopback interface only")


def test_ranks_of_several_hosts_use_the_interface_of_their_address_unless_told_another(monkeypatch: pytest.MonkeyPatch):
    name, address = own_address()
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "told")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    use_own_interface(address, num_nodes=1)
    assert environment() == (None, "told"), "ranks of one host need none"
    use_own_interface(address, num_nodes=2)
    assert environment() == (name, "told")


def environment() -> tuple[str | None, str | None]:
    return os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "203.0.113.9", "no such host."])
def test_a_loopback_address_or_a_foreign_one_is_on_no_interface_of_its_own(host: str):
    assert interface_of(host) is None
