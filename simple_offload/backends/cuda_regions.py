"""AlikeRegions: regions of the device and the host, by the size of their pages."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from simple_offload.backends.base import Direction
from simple_offload.backends.plan import Regions, of_similar_size

if TYPE_CHECKING:
    from simple_offload.backends.cuda_kernel import KernelRegions


@dataclass(frozen=True, eq=False)
class AlikeRegions:
    """Regions of both sides whose pages are of similar size."""

    device: Regions
    host: Regions
    kernel: "dict[Direction, KernelRegions]"
    """Empty where there is no kernel."""

    @cached_property
    def page(self) -> int:
        """Bytes of the largest."""
        return int(self.device.pages.max())

    @cached_property
    def block_bytes(self) -> int:
        """What a block has in all of them."""
        return self.device.block_bytes

    def sides(self, direction: Direction) -> tuple[Regions, Regions]:
        """Source and destination."""
        both = self.device, self.host
        return both if direction is Direction.STORE else both[::-1]


def match_regions(device: Regions, host: Regions, *, kernels: bool) -> list[AlikeRegions]:
    """The regions of both sides, those together whose pages are alike; ``kernels``: with what
    the copy kernel has to know of them."""
    sides = []
    for chosen in of_similar_size(device.pages):
        alike = AlikeRegions(device.take(chosen), host.take(chosen), {})
        if kernels:
            from simple_offload.backends.cuda_kernel import KernelRegions

            alike.kernel.update(
                {direction: KernelRegions(*alike.sides(direction)) for direction in Direction}
            )
        sides.append(alike)
    return sides
