from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from layercast.plan.order import DeadlineQueue


def drained(queue: DeadlineQueue) -> list:
    out = []
    while queue:
        out.append(queue.pop())
    assert queue.pop() is None
    return out


def test_layer_0_of_four_requests_comes_before_any_layer_1():
    queue: DeadlineQueue[tuple[str, int, int]] = DeadlineQueue()
    for request in "abcd":
        for layer in range(3):
            for part in range(2):
                queue.push((request, layer, part), layer=layer, owner=request)
    order = drained(queue)
    assert [layer for _, layer, _ in order] == [0] * 8 + [1] * 8 + [2] * 8
    assert [request for request, _, _ in order[:8]] == list("abcdabcd")


def test_while_a_gigabyte_is_loading_another_layer_0_waits_for_at_most_two_batches():
    """32 layers of 32 MiB in batches of 4 MiB; the newcomer may come at any time, also amid layer 0."""
    for begun in range(1, 256):
        queue: DeadlineQueue[str] = DeadlineQueue()
        for layer in range(32):
            for _ in range(8):
                queue.push("big", layer=layer, owner="big")
        for _ in range(begun):
            assert queue.pop() == "big"
        queue.push("small", layer=0, owner="small")
        assert queue.pop() == "small", "so it waits for what is in flight, two batches at most, and for nothing else"


events = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 3), st.sampled_from("abc")),
        st.tuples(st.just("pop"), st.none(), st.none()),
        st.tuples(st.just("remove"), st.none(), st.sampled_from("abc")),
    ),
    max_size=60,
)


@given(events)
def test_every_batch_leaves_once_lowest_layer_first_in_order_within_its_owner(steps):
    queue: DeadlineQueue[tuple[int, str, int]] = DeadlineQueue()
    waiting: list[tuple[int, str, int]] = []
    for number, (what, layer, owner) in enumerate(steps):
        if what == "push":
            queue.push((layer, owner, number), layer=layer, owner=owner)
            waiting.append((layer, owner, number))
        elif what == "pop":
            batch = queue.pop()
            if batch is None:
                assert not waiting
                continue
            least = min(layer for layer, _, _ in waiting)
            assert batch[0] == least
            assert batch == min(entry for entry in waiting if entry[:2] == batch[:2])
            waiting.remove(batch)
        else:
            assert queue.remove(owner) == sorted(entry for entry in waiting if entry[1] == owner)
            waiting = [entry for entry in waiting if entry[1] != owner]
        assert len(queue) == len(waiting)
        assert bool(queue) == bool(waiting)
    assert Counter(drained(queue)) == Counter(waiting)


def test_who_has_had_no_turn_goes_before_those_who_have():
    queue: DeadlineQueue[str] = DeadlineQueue()
    for owner in "aaabbb":
        queue.push(owner, layer=0, owner=owner)
    assert [queue.pop(), queue.pop()] == ["a", "b"]
    for owner in "ccdd":
        queue.push(owner, layer=0, owner=owner)
    assert drained(queue) == list("cdabcdab")


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 6), min_size=1))
def test_owners_of_a_layer_take_turns(counts):
    queue: DeadlineQueue[str] = DeadlineQueue()
    for owner, count in counts.items():
        for _ in range(count):
            queue.push(owner, layer=0, owner=owner)
    turns = [[owner for owner, count in counts.items() if count > turn] for turn in range(max(counts.values()))]
    assert drained(queue) == [owner for turn in turns for owner in turn]
