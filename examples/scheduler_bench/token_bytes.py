"""Host bytes of a token: what one prompt takes of a server's host memory."""

from contextlib import closing

from examples.bench.connectors import Contender
from examples.scheduler_bench.engine import Engine, Shape
from examples.scheduler_bench.planned import Planned

PROMPT_TOKENS = 65_536
ANSWER_TOKENS = 300


def bytes_of_a_token(contender: Contender, planned: Planned) -> float:
    """Of the prompt, on the whole server, as the connector's own tables count host blocks after the
    answer. Raises RuntimeError if not all were stored."""
    num_blocks = sum(
        # Windows have their blocks of a chunk at once.
        PROMPT_TOKENS // group.block_tokens + 2 * group.num_boundary_blocks
        for group in planned.sizes.groups
    )
    with closing(Engine(contender, Shape(num_blocks + 64, num_blocks + 64), planned)) as engine:
        text = list(range(PROMPT_TOKENS + ANSWER_TOKENS))
        engine.add("0", text[:PROMPT_TOKENS], text[PROMPT_TOKENS:])
        engine.drain()
        side, connector = engine.side, engine.connector
        used, room = side.num_used(connector), side.num_host_blocks(connector)
        if not 0 < used < room - 1:
            raise RuntimeError(f"{used} of {room} host blocks are used")
        return engine.host_memory.num_bytes * used / room / PROMPT_TOKENS
