"""Leases: what is kept until when. ``test_cpu_tier_machine.py`` has all orders of calls."""

from simple_offload.scheduler.tier.leases import Lease, Leases


def test_leases_end_in_the_order_of_their_ends() -> None:
    leases = Leases()
    leases.extend([1, 2, 3], Lease(5.0, b"r"))
    leases.extend([4, 2], Lease(3.0, b"s"))
    assert leases.get(2) == Lease(5.0, b"r")
    leases.extend([3], Lease(9.0, b"s"))
    assert leases.pop_over(2.0) == []
    assert leases.pop_over(3.0) == [4]
    assert leases.pop_over(8.0) == [1, 2]
    leases.end([3, 7])
    assert not leases
    assert leases.pop_over(10.0) == []


def test_renewed_leases_leave_nothing_behind() -> None:
    leases = Leases()
    for now in range(1000):
        leases.extend([1, 2], Lease(now, b"r"))
        assert len(leases._queue) <= 40
    assert leases.pop_over(998) == []
    assert leases.pop_over(999) == [1, 2]
    assert not leases._queue
