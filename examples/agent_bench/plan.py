"""The work of every contender: the model, the sizes, the trace and its agents."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.bench.agents import AgentPlan
from examples.bench.connectors import Contender
from examples.bench.models import LLAMA_8B, SMALL
from examples.bench.served import ServedPlan


@dataclass(frozen=True, kw_only=True)
class Plan(ServedPlan):
    """One benchmark. Lengths are in tokens, times in seconds."""

    trace: Path = Path()
    device_tokens: int
    """Capacity of the device's KV space."""
    agents: tuple[int, ...]
    """Numbers of agents. All are measured on one server, one after another."""
    seconds: int
    """Time of each of these measurements, after every agent's first answer."""
    requests: int | None = None
    """Requests of each measurement, at most, the agents' first ones included."""
    scale: int
    """Recorded tokens for each token that is sent."""
    think_scale: int | None = None
    """Recorded seconds for each second of a pause; None: as many as ``scale`` says."""
    max_pause: int
    """Longest pause of an agent."""
    compilation: Mapping[str, Any] | None = None
    """vLLM's ``compilation_config``; None: vLLM's default."""

    longest: int | None = None
    """Longest request with its answer that a server takes which the bench did not start."""

    @property
    def max_tokens(self) -> int:
        """Longest request of an agent with its answer: the device holds two of them."""
        return min(self.device_tokens // 2, self.longest or self.device_tokens)

    @property
    def max_model_len(self) -> int:
        """Of the server."""
        return self.num_blocks(self.max_tokens) * self.block_size

    def replay(self, agents: int) -> AgentPlan:
        """One of the measurements."""
        return AgentPlan(
            trace=self.trace,
            agents=agents,
            requests=self.requests,
            scale=self.scale,
            pause_scale=self.think_scale or self.scale,
            max_pause=self.max_pause,
            max_tokens=self.max_tokens,
            seed=self.seed,
        )

    def server_arguments(self, contender: Contender) -> dict[str, Any]:
        """For vLLM's command line. No more requests run than there are agents, and vLLM captures
        no graphs for more: the start takes less time."""
        arguments = self.vllm_arguments(
            contender,
            max_model_len=self.max_model_len,
            num_device_blocks=self.num_blocks(self.device_tokens) + 1,  # vLLM's null block
        )
        return arguments | {
            "max_num_seqs": max(self.agents),
            "compilation_config": self.compilation,
        }


CPU = Plan(
    device="cpu",
    shape=SMALL,
    block_size=32,
    device_tokens=6144,
    host_bytes=512 << 20,
    agents=(4, 8),
    seconds=20,
    scale=64,
    max_pause=2,
)
"""A small model on two cores: shows that everything works, and the direction of ratios."""
H200 = Plan(
    device="cuda",
    shape=LLAMA_8B,
    block_size=16,
    device_tokens=131072,
    host_bytes=40 << 30,
    agents=(8, 16, 32),
    seconds=60,
    scale=8,
    max_pause=5,
)
"""8 billion parameters on one GPU. With Claude Code sessions, prompts have about 10,000 tokens, and
those of the agents fill the device once to four times. The host tier has room for 2.5 devices."""
PRESETS = {"cpu": CPU, "h200": H200}
