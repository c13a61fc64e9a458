"""A small trace of agents."""

import json
from pathlib import Path


def save_sessions(
    folder: Path, *, sessions: int = 3, first_ids: int = 8, requests: int = 4
) -> Path:
    """A file of Claude Code sessions with ids of 64 tokens. A prompt has two ids more than the one
    before; answers have 8 tokens and take a second, and pauses 9 s."""
    rows = [
        [
            [10.0 * turn, 64 * num_ids + session, 8, 0.0, 1.0, 0, [[1, num_ids]]]
            for turn, num_ids in enumerate(range(first_ids, first_ids + 2 * requests, 2))
        ]
        for session in range(sessions)
    ]
    path = folder / "agents.json"
    path.write_text(json.dumps({"block_size": 64, "traces": [{"rows": each} for each in rows]}))
    return path
