"""Host memory that ranks share: who stores what, and where each rank's own contents are."""

from simple_offload.replicas import Replicas
from simple_offload.scheduler.rank_reports import TransferLedger
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.worker.rank_pool import RankPool
from simple_offload.worker.worker import OffloadWorker
from tests.simulation.mutations.registry import always, mutation
from tests.simulation.mutations.situations import (
    DYING_RANKS,
    MIXED_RANKS,
    RANKS_WITH_THE_SAME_KV,
    SLOW_RANKS,
)

# Stripes

give_two_ranks_one_stripe = mutation(
    RankPool.own_part, "(self.place, self.place + 1)", "(0, 1)", RANKS_WITH_THE_SAME_KV
)
skip_the_last_stripe = mutation(
    RankPool.own_part,
    "shared[start:stop]",
    "shared[start : stop * (self.place < self.size - 1)]",
    RANKS_WITH_THE_SAME_KV,
)
load_a_stripe_only = mutation(
    RankPool.own_part, "direction is Direction.LOAD or ", "", RANKS_WITH_THE_SAME_KV
)

# All ranks of a pool

# Blocks are unpinned, and keys committed, while the others still copy.
end_with_the_first_rank = mutation(TransferLedger.begin, "self.num_ranks", "1", SLOW_RANKS)
# As if others had copied the dead rank's stripe.
take_no_notice_of_a_dead_thread = mutation(
    OffloadWorker._note, "", "completion = completion._replace(error=None)", DYING_RANKS
).also(OffloadWorker.drain_report, "any(lane.is_broken for lane in self.lanes.values())", "False")

# Private groups

take_all_groups_for_shared = always(CpuTier.share, None, MIXED_RANKS)
give_all_places_the_blocks_of_the_first = mutation(
    CpuTier.slots_by_place,
    "count = self._groups.num_sub_blocks",
    "return np.tile(slots, (self._num_places, 1))",
    MIXED_RANKS,
)
# They never come back.
leave_the_blocks_that_another_stood_for = mutation(
    CpuTier._split, "return [*blocks, *others]", "return blocks", MIXED_RANKS
)
share_every_group = mutation(Replicas.find, "if each % count", "if False", MIXED_RANKS)
