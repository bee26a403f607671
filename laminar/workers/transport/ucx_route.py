"""One link's way through UCX: a worker of its own, an endpoint to the peer's worker, and what that really moves bytes over.

By the low-level interface of `ucxx`: it blocks nobody and needs no event loop. Loading this module loads UCX.
"""

import contextlib
import ctypes
import os
import select
import socket
import threading
import time
from typing import Any

ENVIRONMENT = {
    "UCX_POSIX_ERROR_HANDLING": "y",  # else shared memory is out of the question for endpoints that notice a dead peer
    "UCX_RNDV_SCHEME": "get_zcopy",
    "UCX_TCP_TX_SEG_SIZE": "1m",  # with the default of 8 KiB a third of the throughput
    "UCX_TCP_RX_SEG_SIZE": "1m",
    "UCX_TCP_SNDBUF": "4m",
    "UCX_TCP_RCVBUF": "4m",
    "UCX_WARN_UNUSED_ENV_VARS": "n",  # ucxx sets some for CUDA that a build without it does not know
}
"""What UCX is told unless the environment says otherwise; read when the library is loaded."""
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

import ucxx._lib.libucxx as ucx  # noqa: E402
from ucxx._lib.arr import Array  # noqa: E402

from laminar.workers.transport.base import RDMA, SHARED_MEMORY, TCP  # noqa: E402

WAIT_S = 0.02  # longest sleep without a look at the clock
CLOSE_LIMIT_S = 1.0  # for a request that was cancelled to say so
_ALL_BITS = (1 << 64) - 1


class Route:
    """A worker of this process, and the endpoint that leads to the peer's. One thread at a time is inside UCX."""

    def __init__(self, worker: Any, address: bytes, tag: int, their_tag: int) -> None:
        self._worker = worker
        worker.init_blocking_progress_mode()
        self._endpoint = worker.create_endpoint_from_worker_address(ucx.UCXAddress.create_from_buffer(address), True)
        self._tag, self._their_tag = ucx.UCXXTag(tag), ucx.UCXXTag(their_tag)
        self._mask = ucx.UCXXTagMask(_ALL_BITS)
        self._events = worker.epoll_file_descriptor
        self._turn = threading.Lock()

    def send(self, piece: memoryview) -> Any:
        """The request; `piece` must stay until it is done."""
        with self._turn:
            return self._endpoint.tag_send(Array(piece), self._their_tag)

    def next_message(self) -> Any:
        """The next one that has come, taken off the queue; false if there is none."""
        with self._turn:
            return self._worker.tag_probe(self._tag, self._mask, True)

    def receive(self, target: memoryview, message: Any) -> Any:
        """The request that takes it."""
        with self._turn:
            return self._worker.tag_recv_with_handle(Array(target), message)

    def progress(self) -> bool:
        """Whether anything moved."""
        with self._turn:
            return bool(self._worker.progress_once())

    def sleep(self, life: socket.socket) -> bool:
        """Until something may move, or a little while; whether the peer's end of the connection is still open."""
        waiting, descriptor = select.poll(), life.fileno()
        waiting.register(self._events, select.POLLIN)
        waiting.register(descriptor, select.POLLIN | select.POLLRDHUP)
        # It cannot be armed while there is something to progress, nor with an endpoint whose peer has died.
        with self._turn:
            wait_s = WAIT_S if self._worker.arm() else 0.0
        return all(ready != descriptor for ready, _ in waiting.poll(1e3 * wait_s))

    def abort(self, request: Any) -> None:
        """End the endpoint, so that the request ends, whatever the peer does."""
        self._close_endpoint()
        deadline = time.monotonic() + CLOSE_LIMIT_S
        while not request.completed and time.monotonic() < deadline:
            self.progress()

    def transports(self) -> list[str]:
        """Names of UCX transports that the endpoint uses."""
        return _transports_of(self._endpoint.handle)

    def close(self) -> None:
        """Release all of it."""
        self._close_endpoint()
        self._endpoint = self._worker = None

    def _close_endpoint(self) -> None:
        with self._turn, contextlib.suppress(Exception):  # it is in an error state, or closed already
            self._endpoint.close_blocking()


# ---- what it runs over -------------------------------------------------------------------------------------

_SHARED = ("posix", "sysv", "cma", "knem", "xpmem", "self")


def medium_of(transports: list[str]) -> str:
    """What UCX transports of these names move bytes over; the best of them."""
    if any(name.startswith(("rc", "dc", "ud", "srd", "ib", "gga")) for name in transports):
        return RDMA
    if any(name in _SHARED for name in transports):
        return SHARED_MEMORY
    return TCP


def resources_of(info: str) -> list[str]:
    """Transports in UCX's own description of a context: lines such as ``# resource 3 : md 1 dev 2 flags -- tcp/eth0``."""
    return [line.split()[-1].split("/")[0] for line in info.splitlines() if " resource " in line and "/" in line]


class _Transport(ctypes.Structure):
    """ucp_transport_entry_t"""

    _fields_ = (("name", ctypes.c_char_p), ("device", ctypes.c_char_p))


class _EndpointAttributes(ctypes.Structure):
    """ucp_ep_attr_t, of UCX 1.12 and later"""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local", ctypes.c_char * 128),
        ("remote", ctypes.c_char * 128),
        ("entries", ctypes.POINTER(_Transport)),
        ("num_entries", ctypes.c_uint),
        ("entry_size", ctypes.c_size_t),
        ("user_data", ctypes.c_void_p),
    )


_FIELD_TRANSPORTS = 1 << 3
_LANES_MAX = 64


def _transports_of(endpoint: int) -> list[str]:
    """By ucp_ep_query, which ucxx does not offer; the library is loaded already."""
    entries = (_Transport * _LANES_MAX)()
    asked = _EndpointAttributes(
        field_mask=_FIELD_TRANSPORTS, entries=entries, num_entries=_LANES_MAX, entry_size=ctypes.sizeof(_Transport)
    )
    library = ctypes.CDLL("libucp.so.0")
    library.ucp_ep_query.argtypes = (ctypes.c_void_p, ctypes.POINTER(_EndpointAttributes))
    if library.ucp_ep_query(endpoint, ctypes.byref(asked)):
        return []
    return [entries[at].name.decode() for at in range(asked.num_entries)]
