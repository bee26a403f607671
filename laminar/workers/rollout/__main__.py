"""`python -m laminar.workers.rollout --controller URL --name rollout-0`: one rollout worker.

Exit status: 0 after Stop or a signal, 3 without a controller for `orphan_timeout_s`, 1 after any other failure,
which is one line on stderr (with its traceback when it is a bug).
"""

import argparse
import asyncio
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

import structlog

from laminar import descriptors
from laminar.errors import LaminarError
from laminar.logs import Lossy
from laminar.workers.link import Link, Orphaned
from laminar.workers.rollout.engines import ENGINES, EngineChoice
from laminar.workers.rollout.worker import RolloutWorker

EXIT_STOPPED, EXIT_FAILED, EXIT_ORPHANED = 0, 1, 3


def main() -> NoReturn:
    """Run the worker and end the process."""
    arguments = _parse()
    descriptors.raise_limit()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(Lossy(sys.stderr)))
    status = EXIT_FAILED
    try:
        status = _new_loop().run_until_complete(_run(arguments))
    except Exception:  # the last boundary: a bug  # noqa: BLE001
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a thread in the middle of reading a model would hold up a stop for minutes.
    os._exit(status)


async def _run(arguments: argparse.Namespace) -> int:
    link = Link(arguments.controller, worker=arguments.name, role="rollout")
    engine = EngineChoice(
        name=arguments.engine,
        max_concurrent=arguments.max_concurrent,
        gpus=arguments.gpus,
        vllm_python=arguments.vllm_python,
        vllm_url=arguments.vllm_url,
        vllm_flags=tuple(arguments.vllm_flags),
    )
    worker = RolloutWorker(link, name=arguments.name, engine=engine, relay_directory=arguments.relay)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, worker.stop, signal.Signals(number).name)
    try:
        reason = await worker.run()
    except LaminarError as error:
        print(f"{arguments.name} failed: {error}", file=sys.stderr)
        return EXIT_ORPHANED if isinstance(error, Orphaned) else EXIT_FAILED
    print(f"{arguments.name} stopped: {reason}", file=sys.stderr)
    return EXIT_STOPPED


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m laminar.workers.rollout",
        description="Generate and score trajectories with one engine replica (run token in LAMINAR_TOKEN).",
    )
    parser.add_argument("--controller", required=True, metavar="URL", help="http://host:port of the controller")
    parser.add_argument("--name", required=True, help="this worker's name, for example rollout-0")
    parser.add_argument("--engine", choices=ENGINES, default="embedded")
    parser.add_argument(
        "--max-concurrent", type=int, default=0, metavar="N", help="most requests at once (0 = rollout.max_concurrent)"
    )
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="vllm: GPUs of this replica (0 = CPU)")
    parser.add_argument("--vllm-python", default="", metavar="PATH", help="interpreter of an environment with vLLM")
    parser.add_argument("--vllm-url", default="", metavar="URL", help="a vLLM server that runs already, instead")
    parser.add_argument("--relay", type=Path, metavar="DIR", help="the relay's directory (default: that of this run)")
    parser.add_argument("vllm_flags", nargs="*", metavar="-- FLAGS", help="further flags of vLLM, after --")
    arguments = parser.parse_args()
    if not arguments.controller.startswith(("http://", "https://")):
        parser.error(f"--controller {arguments.controller}: http://host:port is expected")
    if arguments.max_concurrent < 0:
        parser.error(f"--max-concurrent {arguments.max_concurrent}: 0 or more")
    return arguments


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


if __name__ == "__main__":
    main()
