"""LetGo: each block counts at its last place."""

from simple_offload.scheduler.tier.let_go import LetGo
from simple_offload.transfer import as_array


def make_let_go(*parts: list[int]) -> LetGo:
    let_go = LetGo()
    let_go.grow(8)
    for part in parts:
        let_go.add(as_array(part))
    return let_go


def test_a_block_counts_at_its_last_place() -> None:
    let_go = make_let_go([1, 2, 3], [2], [4, 1])
    assert len(let_go) == 6
    assert [let_go.pop_oldest() for _ in range(3)] == [[3], [2], [4, 1]]
    assert len(let_go) == 0


def test_nothing_is_kept_of_no_blocks() -> None:
    let_go = make_let_go([], [], [5])
    assert let_go.pop_oldest() == [5]


def test_clear() -> None:
    let_go = make_let_go([1, 2])
    let_go.clear()
    assert len(let_go) == 0
    let_go.add(as_array([3]))
    assert let_go.pop_oldest() == [3]
