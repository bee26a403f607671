"""`python -m laminar.workers.relay`: the relay daemon of one host.

With `--controller` it serves a run, tells the controller which versions are ready, and stops on its order or when
orphaned. With `--run-id` it stands alone (benchmarks, tests, tools). It removes its directory however it ends, short
of SIGKILL; what that leaves is swept by the next relay that starts on the host.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import structlog

from laminar import descriptors
from laminar.config import RelayConfig
from laminar.errors import LaminarError, StartError
from laminar.logs import Lossy
from laminar.wire import (
    ArrangeChain,
    LinkBroken,
    LinkSlow,
    RelayReady,
    RelayReport,
    RetainVersions,
    Stop,
    VersionLost,
    WorkerFailed,
)
from laminar.workers.link import Link
from laminar.workers.relay import paths
from laminar.workers.relay.chain import Place
from laminar.workers.relay.chain_frames import SIGN_OF_LIFE_S
from laminar.workers.relay.daemon import RelayServer
from laminar.workers.relay.delta import MODES
from laminar.workers.relay.pacing import CHUNK_BYTES_MAX
from laminar.workers.relay.versions import Told, Versions
from laminar.workers.transport import RDMA, STREAMS_MAX, TRANSPORTS, make_transport

log = structlog.get_logger("laminar.relay")

REPORT_S = 1.0  # for people
ROOM_S = 120.0  # a relay that is started again finds the room of its slots taken: by then somebody may have made some
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> int:
    """Exit status: 0 after a stop that was asked for, 1 otherwise."""
    arguments = _parse()
    descriptors.raise_limit()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(Lossy(sys.stderr)))
    try:
        return asyncio.run(_run(arguments))
    except LaminarError as error:
        log.error("relay_failed", reason=str(error))
        return 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m laminar.workers.relay", description="Keep weight versions in shared memory."
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--controller", metavar="URL", help="serve the run of this controller (token in LAMINAR_TOKEN)")
    where.add_argument("--run-id", help="stand alone, under this name")
    parser.add_argument("--name", default="relay-0", help="this worker's name (default: %(default)s)")
    parser.add_argument("--slots", type=int, help="version slots (default: relay.slots of the run, or 3)")
    parser.add_argument(
        "--listen", metavar="HOST[:PORT]", type=_address, help="take part in a chain, with links to this address"
    )
    parser.add_argument("--transport", choices=TRANSPORTS, help="as relay.transport")
    parser.add_argument("--streams", type=int, metavar="N", help="as relay.streams")
    parser.add_argument("--require-rdma", action="store_true", help="as relay.require_rdma")
    parser.add_argument("--progress-timeout", type=float, metavar="S", help="as relay.link_timeout_s")
    parser.add_argument("--chunk-mib", type=int, metavar="N", help="as relay.chunk_mib")
    parser.add_argument("--rate-limit-mbit", type=float, metavar="N", help="as relay.rate_limit_mbit")
    parser.add_argument("--deltas", choices=MODES, help="as relay.deltas")
    arguments = parser.parse_args()
    if not 0 <= (arguments.chunk_mib or 0) <= CHUNK_BYTES_MAX >> 20:
        parser.error(f"--chunk-mib {arguments.chunk_mib}: from 0 to {CHUNK_BYTES_MAX >> 20}")
    if (arguments.rate_limit_mbit or 0.0) < 0:
        parser.error(f"--rate-limit-mbit {arguments.rate_limit_mbit:g}: 0 or more")
    if (arguments.progress_timeout or 1.0) < 2 * SIGN_OF_LIFE_S:
        parser.error(f"--progress-timeout {arguments.progress_timeout:g}: at least {2 * SIGN_OF_LIFE_S:g}")
    if arguments.streams is not None and not 1 <= arguments.streams <= STREAMS_MAX:
        parser.error(f"--streams {arguments.streams}: between 1 and {STREAMS_MAX}")
    if arguments.slots is not None and arguments.slots < 2:
        parser.error(f"--slots {arguments.slots}: at least 2 (newest and incoming)")
    return arguments


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":") if text.count(":") == 1 else (text, "", "0")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"expected HOST or HOST:PORT, got {text!r}")
    return host, int(port)


async def _run(arguments: argparse.Namespace) -> int:
    stopped = asyncio.Event()
    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    for path in paths.sweep():
        log.info("relay_swept", directory=path)
    work = _serve_run(arguments) if arguments.controller else _serve_alone(arguments)
    serving = asyncio.create_task(work, name="relay")
    stopping = asyncio.create_task(stopped.wait(), name="signals")
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not serving.done():
        serving.cancel()
        await asyncio.wait({serving})
        if serving.cancelled():
            return 0
    return serving.result()


async def _serve_alone(arguments: argparse.Namespace) -> int:
    directory = paths.create(arguments.run_id, run_directory="")
    share = RelayConfig().old_versions_share
    server = RelayServer(Versions(directory, arguments.slots or 3, _log_event, old_versions_share=share))

    async def for_ever() -> None:
        if arguments.listen is not None:
            server.join_chain(_place(arguments, RelayConfig()), _log_broken, _log_slow)
        await asyncio.Event().wait()

    await _serve(server, for_ever)
    return 0


def _place(arguments: argparse.Namespace, config: RelayConfig) -> Place:
    token = os.environ.get("LAMINAR_TOKEN", "")
    if not token:
        raise StartError("--listen needs the run's token in LAMINAR_TOKEN: links are authenticated with it")
    transport = make_transport(
        arguments.transport or config.transport,
        arguments.progress_timeout or config.link_timeout_s,
        streams=arguments.streams or config.streams,
        require_rdma=arguments.require_rdma or config.require_rdma,
    )
    if transport.name != "tcp" and transport.medium != RDMA:
        log.warning(
            "relay_without_rdma", transport=transport.name, medium=transport.medium, see="docs/relays.md, Transports"
        )
    host, port = arguments.listen
    chunk_mib = config.chunk_mib if arguments.chunk_mib is None else arguments.chunk_mib
    rate_limit_mbit = config.rate_limit_mbit if arguments.rate_limit_mbit is None else arguments.rate_limit_mbit
    return Place(
        arguments.name,
        token,
        transport,
        host,
        port,
        chunk_bytes=chunk_mib << 20,
        bytes_per_s_max=rate_limit_mbit * 1e6 / 8,
        deltas=arguments.deltas or config.deltas,
    )


async def _serve_run(arguments: argparse.Namespace) -> int:
    link = Link(arguments.controller, worker=arguments.name, role="relay")
    failed = False
    try:
        welcome = await link.connect()
        assert link.config is not None
        run = link.config.run
        make = partial(paths.create, welcome.run_id, str(Path(run.dir, run.name)), room_s=ROOM_S)
        directory = await asyncio.to_thread(make)
        config = link.config.relay
        versions = Versions(
            directory, arguments.slots or config.slots, link.send, old_versions_share=config.old_versions_share
        )
        server = RelayServer(versions)
        await _serve(server, partial(_until_told_to_stop, link, server, arguments))
    except LaminarError as error:
        failed = True
        link.send(WorkerFailed(reason=str(error)))
        raise
    finally:
        await link.close(goodbye=not failed)
    return 0


async def _until_told_to_stop(link: Link, server: RelayServer, arguments: argparse.Namespace) -> None:
    assert link.config is not None
    host, port = "", 0
    if arguments.listen is not None:
        place = _place(arguments, link.config.relay)
        host = place.host
        port = server.join_chain(
            place,
            lambda peer, epoch: link.send(LinkBroken(peer=peer, epoch=epoch)),
            lambda peer, epoch: link.send(LinkSlow(peer=peer, epoch=epoch)),
        )
        server.versions.on_unusable = lambda reason: link.send(WorkerFailed(reason=reason))
    reporting = asyncio.create_task(_report(link, server), name="report")
    try:
        await _obey(link, server, host, port)
    finally:
        reporting.cancel()


async def _obey(link: Link, server: RelayServer, host: str, port: int) -> None:
    link.send(RelayReady(directory=str(server.directory), chain_port=port, chain_host=host))
    while not isinstance(order := await link.receive(), Stop):
        if isinstance(order, ArrangeChain):
            server.arrange(order.epoch, order.upstream, order.downstream, order.num_relays)
        elif isinstance(order, RetainVersions):
            server.versions.old.want(order.versions)


async def _report(link: Link, server: RelayServer) -> None:
    told = RelayReport()
    while True:
        await asyncio.sleep(REPORT_S)
        report = server.report()
        if report != told and link.connected:
            link.send(report)
            told = report


async def _serve(server: RelayServer, until: Callable[[], Awaitable[object]]) -> None:
    """Serve until `until` returns, raises or is cancelled; then the directory is gone."""
    try:
        await server.start()
        await until()
    finally:
        try:
            await server.close()
        finally:
            paths.remove(server.directory)


def _log_broken(peer: str, epoch: int) -> None:
    log.warning("relay_link_broken", peer=peer, epoch=epoch)


def _log_slow(peer: str, epoch: int) -> None:
    log.warning("relay_link_slow", peer=peer, epoch=epoch)


def _log_event(event: Told) -> None:
    why = {"reason": event.reason} if isinstance(event, VersionLost) else {}
    log.info("relay_event", event_kind=type(event).__name__, version=str(event.version), **why)


if __name__ == "__main__":
    sys.exit(main())
