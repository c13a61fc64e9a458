"""Copies that fail on a server's request (``--worker-extension-cls``)."""

from typing import Literal

from vllm.distributed.kv_transfer import get_kv_transfer_group

from tests.faults.backend import Fault
from tests.faults.connector import SimpleCPUOffloadConnector


class FailingCopies:
    """Methods that vLLM's worker gets, for ``POST /collective_rpc``. The server's connector is
    ``tests.faults.connector``."""

    def let_fail(self, *directions: Literal["load", "store"]) -> None:
        """From now on, all copies of these directions fail, and no others."""
        connector = get_kv_transfer_group()
        assert isinstance(connector, SimpleCPUOffloadConnector)
        connector.faults.set_plan(*(Fault(each, "fail", every=1) for each in directions))
