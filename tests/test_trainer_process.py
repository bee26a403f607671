"""Trainer ranks as they are started in a run: torchrun, a real channel, a real relay."""

import asyncio
import contextlib
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
from aiohttp import WSMsgType, web
from controller_end import TOKEN, ControllerEnd
from trainer_ranks import Batch, MainRanks, make_config, make_model

from laminar import wire
from laminar.config import Config, ControllerConfig
from laminar.ids import Version
from laminar.workers.relay import paths
from laminar.workers.relay.daemon import RelayServer
from laminar.workers.relay.versions import Versions

START_S = 60.0


class RankEnd(ControllerEnd):
    """The controller's end of one rank's channel, under the run id of the test's relay."""

    def __init__(self, config: Config, run_id: str) -> None:
        super().__init__(config)
        self.run_id = run_id

    async def serve(self, ws: web.WebSocketResponse) -> None:
        config = msgspec.msgpack.encode(self.config)
        self._ws = ws
        welcome = wire.Welcome(
            protocol=wire.PROTOCOL, boot=1, run_id=self.run_id, received=self.session.received, config=config
        )
        await ws.send_bytes(self.session.unreliable(welcome))
        beat = asyncio.create_task(self._beat(ws))
        try:
            await self._read(ws)
        finally:
            beat.cancel()
            self._ws = None
            await self._notify()


class RunEnd(ControllerEnd):
    """A controller that gives each rank a channel of its own, and serves the tokens of one batch."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.run_id = f"test-{uuid.uuid4().hex[:12]}"
        self.batch = Batch()
        self.ranks: dict[int, RankEnd] = {}
        self.token_answers = []

    async def _channel(self, request: web.Request) -> web.StreamResponse:
        if not self._authorised(request):
            return web.Response(status=401)
        ws = web.WebSocketResponse(max_msg_size=wire.FRAME_BYTES_MAX)
        await ws.prepare(request)
        first = await ws.receive()
        assert first.type is WSMsgType.BINARY
        hello = wire.decode_from_worker(first.data).message
        assert isinstance(hello, wire.Hello)
        name, rank = hello.worker.split("/")
        assert (name, hello.role) == ("trainer-0", "trainer")
        end = self.ranks.setdefault(int(rank), RankEnd(self.config, self.run_id))
        await self._notify()
        await end.serve(ws)
        return ws

    async def _tokens(self, request: web.Request) -> web.Response:
        body = msgspec.msgpack.decode(await request.read(), type=wire.TokenRequest)
        missing = [trajectory for trajectory in body.trajectories if trajectory not in self.batch.store]
        if missing or not self._authorised(request):
            return web.Response(status=404, text=f"no tokens of trajectory {missing[0]}")
        return web.Response(body=msgspec.msgpack.encode(self.batch.fetch(list(body.trajectories))))

    async def joined(self, num_ranks: int) -> None:
        await self.until(lambda: len(self.ranks) == num_ranks, START_S)
        for end in self.ranks.values():
            await end.until(lambda end=end: bool(end.of(wire.TrainerReady)), START_S)

    async def command(self, message: wire.Message) -> None:
        for end in self.ranks.values():
            await end.send(message)

    async def answer(self, kind: type, count: int = 1):
        await self.ranks[0].until(lambda: len(self.ranks[0].of(kind)) == count, START_S)
        return self.ranks[0].of(kind)[-1]


@contextlib.asynccontextmanager
async def run_end(tmp_path: Path, **controller: float) -> AsyncIterator[RunEnd]:
    base = make_config(make_model(tmp_path / "model"), packing="group")
    config = Config(
        model=base.model,
        rollout=base.rollout,
        trainer=base.trainer,
        controller=ControllerConfig(**controller),  # type: ignore[arg-type]
    )
    end = RunEnd(config)
    await end.start()
    try:
        yield end
    finally:
        for rank in end.ranks.values():
            rank.drop()
        await end.stop()


@contextlib.asynccontextmanager
async def torchrun(end: RunEnd, num_ranks: int) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"),
        *("-m", "laminar.workers.trainer", "--controller", end.url, "--name", "trainer-0"),
        env=os.environ | {"LAMINAR_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()


@contextlib.contextmanager
def ranks(end: RunEnd, num_ranks: int, directory: Path) -> Iterator[MainRanks]:
    started = MainRanks(num_ranks, directory, ["--controller", end.url, "--name", "trainer-0"], TOKEN)
    try:
        yield started
    finally:
        started.kill()


async def ended(process: asyncio.subprocess.Process) -> tuple[int, str]:
    _, log = await asyncio.wait_for(process.communicate(), START_S)
    assert process.returncode is not None
    return process.returncode, log.decode()


async def test_two_torchrun_ranks_train_publish_save_and_stop(tmp_path: Path) -> None:
    async with run_end(tmp_path) as end:
        directory = paths.create(end.run_id, "")
        server = RelayServer(Versions(directory, 2, lambda event: None))
        await server.start()
        try:
            async with torchrun(end, 2) as process:
                await end.joined(2)
                await end.command(wire.Publish(version=Version(0, 0)))
                assert (await end.answer(wire.ShardsWritten)).stall_s > 0
                await end.command(wire.StartStep(step=1, attempt=4, rows=end.batch.rows))
                done = await end.answer(wire.StepDone)
                assert (done.step, done.attempt) == (1, 4)
                assert done.metrics["mismatch_kl/mean"] > 0
                assert sorted(end.batch.asked) == sorted(end.batch.store)
                path = str(tmp_path / "step-1")
                await end.command(wire.SaveCheckpoint(step=1, path=path, data_state=b"state"))
                assert (await end.answer(wire.CheckpointSaved)).path == path
                await end.command(wire.Stop(reason="done"))
                code, log = await ended(process)
                assert code == 0, log
                assert "Traceback" not in log
                assert end.ranks[1].of(wire.Goodbye)
                assert not end.ranks[1].of(wire.StepDone)
        finally:
            await server.close()
            paths.remove(directory)
        ready = end.ranks[1].of(wire.TrainerReady)[0]
        assert (ready.rank, ready.world_size, ready.step, ready.data_state) == (1, 2, 0, b"")


async def test_a_batch_whose_tokens_are_gone_fails_the_step_and_all_ranks_name_the_cause(tmp_path: Path) -> None:
    async with run_end(tmp_path) as end:
        with ranks(end, 2, tmp_path) as started:
            await end.joined(2)
            lost = end.batch.store.popitem()[0]
            await end.command(wire.StartStep(step=1, attempt=1, rows=end.batch.rows))
            results = await asyncio.to_thread(started.ended)
        cause = f"no tokens of trajectory {lost}"
        for rank, (code, log) in enumerate(results):
            assert (code, cause in log) == (1, True)
            (failed,) = end.ranks[rank].of(wire.StepFailed)
            (gone,) = end.ranks[rank].of(wire.WorkerFailed)
            assert cause in failed.reason
            assert cause in gone.reason
            assert "Traceback" in gone.detail
            assert not end.ranks[rank].of(wire.Goodbye)


async def test_a_rank_without_a_controller_exits_with_code_3(tmp_path: Path) -> None:
    async with run_end(tmp_path, orphan_timeout_s=0.5, heartbeat_s=0.1) as end:
        with ranks(end, 1, tmp_path) as started:
            await end.joined(1)
            await end.stop()
            end.ranks[0].drop()
            ((code, log),) = await asyncio.to_thread(started.ended)
        assert code == 3, log
        assert "no controller at" in log


async def test_sigterm_ends_a_rank_at_once(tmp_path: Path) -> None:
    async with run_end(tmp_path) as end:
        with ranks(end, 1, tmp_path) as started:
            await end.joined(1)
            started.processes[0].terminate()
            ((code, _),) = await asyncio.to_thread(started.ended)
        assert code == -signal.SIGTERM


async def test_a_missing_model_is_reported(tmp_path: Path) -> None:
    async with run_end(tmp_path) as end:
        (tmp_path / "model" / "config.json").unlink()
        with ranks(end, 1, tmp_path) as started:
            ((code, log),) = await asyncio.to_thread(started.ended)
        assert code == 1
        assert "no config.json there" in end.ranks[0].of(wire.WorkerFailed)[0].reason
        assert "no config.json there" in log
