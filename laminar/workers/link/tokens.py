"""Fetching the tokens of a batch from the controller's token store: `POST {url}/v1/tokens`.

Large requests are cut into parts of `ROWS_PER_REQUEST`, each bounded in time and size and tried again when the
connection breaks; a request has no side effect, so asking twice is harmless.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Callable

import aiohttp
import msgspec

from laminar import wire
from laminar.errors import LaminarError, ProtocolError
from laminar.ids import TrajectoryId

ROWS_PER_REQUEST = 256  # 256 trajectories x 64k tokens x 9 bytes = 150 MB
ANSWER_BYTES_MAX = 1 << 30
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.2, 2.0
TIMEOUT = aiohttp.ClientTimeout(total=120.0, sock_connect=5.0, sock_read=30.0)

_rows = msgspec.msgpack.Decoder(list[wire.TokenRow])


class TokensUnavailable(LaminarError):
    """The controller did not give the tokens of these trajectories."""


async def fetch_tokens(
    http: aiohttp.ClientSession, url: Callable[[], str], trajectories: list[int], patience_s: float
) -> list[wire.TokenRow]:
    """The rows of `trajectories`, in this order. `http` carries the authorisation, `url` says where the controller is now.

    Raises TokensUnavailable when the controller refuses or stays unreachable for `patience_s`, ProtocolError for a wrong answer.
    """
    rows: list[wire.TokenRow] = []
    for start in range(0, len(trajectories), ROWS_PER_REQUEST):
        rows += await _fetch_part(http, url, trajectories[start : start + ROWS_PER_REQUEST], patience_s)
    return rows


async def _fetch_part(
    http: aiohttp.ClientSession, url: Callable[[], str], trajectories: list[int], patience_s: float
) -> list[wire.TokenRow]:
    body = wire.encode(wire.TokenRequest([TrajectoryId(trajectory) for trajectory in trajectories]))
    deadline = time.monotonic() + patience_s
    for attempt in itertools.count():
        try:
            return _check(await _post(http, f"{url()}/v1/tokens", body), trajectories)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            why = str(error) or type(error).__name__
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(attempt, 10)) * random.uniform(0.5, 1.0))
    raise TokensUnavailable(f"{url()}/v1/tokens gave no tokens for {patience_s:g} s ({why}); is the controller alive?")


async def _post(http: aiohttp.ClientSession, url: str, body: bytes) -> bytes:
    async with http.post(url, data=body, timeout=TIMEOUT) as response:
        if 400 <= response.status < 500:
            reason = (await response.content.read(500)).decode("utf-8", "replace")
            raise TokensUnavailable(f"{url} refused the request (HTTP {response.status}): {reason}")
        response.raise_for_status()
        answer = bytearray()
        async for chunk in response.content.iter_chunked(1 << 20):
            answer += chunk
            if len(answer) > ANSWER_BYTES_MAX:
                raise ProtocolError(f"{url} sent more than {ANSWER_BYTES_MAX} bytes for one request")
        return bytes(answer)


def _check(answer: bytes, trajectories: list[int]) -> list[wire.TokenRow]:
    try:
        rows = _rows.decode(answer)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"the answer to a token request is malformed: {error}") from error
    if [row.trajectory for row in rows] != trajectories:
        raise ProtocolError(f"asked for the tokens of {len(trajectories)} trajectories, got {len(rows)} other rows")
    return rows
