"""What a simulated run notes down at regular moments: KV use, and the experience buffer."""

from typing import TYPE_CHECKING

from laminar.core import dispatch
from laminar.core.turn import Turn
from laminar.sim import queues

if TYPE_CHECKING:
    from laminar.sim.world import World


def begin(world: "World") -> None:
    """Every `sample_s` from now on."""

    def sample() -> None:
        _note_kv_use(world)
        _note_buffer(world)
        world.after(world.sample_s, sample)

    world.after(world.sample_s, sample)


def _note_kv_use(world: "World") -> None:
    used = 0
    for engine in world.rollouts.engines.values():
        engine.replica.advance(world.now)
        used += engine.replica.kv_tokens
    total = world.cluster.num_replicas * world.cluster.kv_tokens_max
    world.measures.kv_use.append((world.now, used / total))


def _note_buffer(world: "World") -> None:
    core = world.core
    buffered, turn = len(core.state.buffer), Turn(core.state, core.settings, core.story)
    world.measures.buffered.append((world.now, buffered))
    world.measures.queue.samples.append(
        queues.Sample(
            at=world.now,
            buffered=buffered,
            in_flight=dispatch.num_outstanding(core.state) - buffered,
            held_back=not dispatch.gate_is_open(turn),
        )
    )
