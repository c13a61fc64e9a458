"""What must not leave the tier."""

from simple_offload.scheduler.kept import Kept
from tests.scheduler.tiers import key, prefixes


def test_the_first_blocks_of_each_group_and_some_more() -> None:
    keys = [[key(name, group) for name in prefixes("abcd")] for group in range(2)]
    kept = Kept(keys)
    assert key("a") not in kept
    kept.keep_first(0, 2)
    kept.keep_first(1, 1)
    kept.keep((key("abcd", 1),))
    wanted = {key("a"), key("ab"), key("a", 1), key("abcd", 1)}
    assert {each for group in keys for each in group if each in kept} == wanted


def test_it_only_grows() -> None:
    keys = [[key("a"), key("ab")]]
    kept = Kept(keys)
    kept.keep_first(0, 2)
    kept.keep_first(0, 1)
    assert key("ab") in kept


def test_keys_that_become_known_later() -> None:
    keys = [[key("a")]]
    kept = Kept(keys)
    kept.keep_first(0, 1)
    assert key("a") in kept
    keys[0].append(key("ab"))
    assert key("ab") not in kept
    kept.keep_first(0, 2)
    assert key("ab") in kept
    assert None not in kept
