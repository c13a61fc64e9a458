"""A small trace of agents."""

import json
from pathlib import Path


def save_sessions(
    folder: Path,
    *,
    sessions: int = 3,
    first_ids: int = 8,
    more_ids: int = 2,
    requests: int = 4,
    answer_tokens: int = 8,
    id_tokens: int = 64,
    every: float = 10.0,
) -> Path:
    """A file of Claude Code sessions. A prompt has ``more_ids`` more than the one before. An
    answer takes a second. One comes each ``every`` seconds."""
    rows = [
        [
            [every * turn, 64 * num_ids + session, answer_tokens, 0.0, 1.0, 0, [[1, num_ids]]]
            for turn, num_ids in enumerate(range(first_ids, 999, more_ids)[:requests])
        ]
        for session in range(sessions)
    ]
    path = folder / "agents.json"
    traces = [{"rows": each} for each in rows]
    path.write_text(json.dumps({"block_size": id_tokens, "traces": traces}))
    return path
