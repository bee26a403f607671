"""`python -m laminar.workers.remote.supervise`: the end of an ssh connection that belongs to one process of a run.

It starts a supervisor for the process (`laminar.workers.remote.supervisor`), or finds the one that is there; hands its stdin,
stdout and stderr over to it; and waits for the status to pass on. What goes over them: `laminar.remote`.

    sshd ── stdin, stdout, stderr ── this process ── the same descriptors ──► supervisor ── process
                                                  ◄─ one byte: the status ──
                                                   ── the same: taken ─────►
"""

import io
import os
import socket
import sys

import msgspec

from laminar import processes
from laminar.remote import GONE, LOST, NOT_STARTED, Attach, Order
from laminar.workers.remote.supervisor import STREAMS, Connection, socket_of, supervise


def main() -> int:
    """The exit status that stands for the process's end."""
    line = io.FileIO(0, closefd=False).readline()  # unbuffered: what follows it is the supervisor's
    if not line:  # the client has ended already
        return NOT_STARTED
    order: Order | Attach = msgspec.json.decode(line, type=Order | Attach)
    return _start(order) if isinstance(order, Order) else _attach(order)


def _start(order: Order) -> int:
    control, supervised = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        control.close()
        supervise(order, Connection(supervised, [os.dup(stream) for stream in STREAMS]))
        return 0
    supervised.close()
    return _follow(control)


def _attach(order: Attach) -> int:
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        control.connect(str(socket_of({processes.TOKEN: order.token, processes.NAME: order.name})))
        socket.send_fds(control, [msgspec.json.encode(order)], STREAMS)
    except OSError:
        print(f"{order.name} has no supervisor here", file=sys.stderr)
        return GONE
    return _follow(control)


def _follow(control: socket.socket) -> int:
    """Wait for what the supervisor says in the end; LOST if it was killed or listens to another connection now."""
    status = b""
    try:
        status = control.recv(1)
        if status:
            control.send(status)
    except OSError:  # a supervisor that leaves waits for no answer
        pass
    return status[0] if status else LOST


if __name__ == "__main__":
    sys.exit(main())
