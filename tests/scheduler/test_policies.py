"""The policy for a configuration."""

import pytest

from simple_offload.scheduler.policies.admission import MIN_COUNTED
from simple_offload.scheduler.policies.eager import EagerPolicy
from simple_offload.scheduler.policies.lazy import LazyPolicy
from tests.scheduler.conftest import MakeDriver


@pytest.mark.parametrize(("lazy", "policy"), [(False, EagerPolicy), (True, LazyPolicy)])
@pytest.mark.parametrize("store_threshold", [1, 4])
def test_the_policy_is_made(
    drive: MakeDriver, lazy: bool, policy: type, store_threshold: int
) -> None:
    made = drive(lazy=lazy, store_threshold=store_threshold).scheduler._policy
    assert isinstance(made, policy)
    assert isinstance(made, EagerPolicy | LazyPolicy)
    assert made._admission.threshold == store_threshold
    assert made._admission.max_counted == MIN_COUNTED
