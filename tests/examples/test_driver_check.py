"""The check of cuMemcpyBatchAsync. Whether a driver copies in any order depends on the driver."""

import subprocess
import sys

import pytest

from examples import driver_check


@pytest.mark.gpu
def test_the_order_that_this_connector_uses_is_right() -> None:
    command = [sys.executable, "-m", "examples.driver_check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert len(lines) == 1 + len(driver_check.CASES) * len(driver_check.ORDERS), done.stderr
    orders = driver_check.ORDERS[1:]
    assert all(line.endswith(": right") for line in lines if any(f", {o}:" in line for o in orders))
