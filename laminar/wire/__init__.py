"""Messages between the controller and its workers, and their encoding (msgpack through msgspec).

One WebSocket per worker carries binary frames. Each frame is one `Envelope`: a frame number (0 = unreliable,
not resent), the highest frame number received from the other side, and one message. `laminar.channel` keeps
the numbers; this package only names (a module per role, whose last lines say which messages go each way) and
encodes (`codec`). Its users say `wire.NAME` whatever the module.

Arrays travel as little-endian bytes (`pack_i64` …), so a frame of a replica costs one decode, not one per token.
Nothing here is pickled.
"""

from laminar.packed import *
from laminar.wire.codec import *
from laminar.wire.relay import *
from laminar.wire.rollout import *
from laminar.wire.session import *
from laminar.wire.trainer import *
