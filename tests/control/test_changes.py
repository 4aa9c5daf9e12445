"""What a listener hears of a directory, replayed, is what can be found in it."""

import random

from layercast.control.directory import Directory
from layercast.errors import Full


def keys_of(number, count):
    return [f"{number}-{i}".encode() for i in range(count)]


def directory(slots=8):
    made = Directory((slots,), lambda: 0.0, 10.0)
    made.record()
    return made


def save(made, keys, tokens=()):
    reservation = made.reserve("r", [keys], None, tokens)
    if reservation.blocks:
        assert made.commit(reservation.id)


def test_a_saved_prefix_is_told_in_runs_with_the_key_before_each():
    made, keys = directory(), keys_of(0, 6)
    save(made, keys[:2], tuple(range(6)))
    made.forget(0, [keys[0]])
    save(made, keys, tuple(range(6)))
    first, gone, again, rest = made.changes.take()
    assert (first.keys, first.first, first.parent, first.tokens) == (tuple(keys[:2]), 0, None, tuple(range(6)))
    assert (gone.stored, gone.keys) == (False, (keys[0],))
    assert (again.keys, again.first, again.parent) == ((keys[0],), 0, None)
    assert (rest.keys, rest.first, rest.parent) == (tuple(keys[2:]), 2, keys[1])
    assert made.changes.take() == []


def test_nothing_is_told_of_a_save_that_failed_or_is_under_way():
    made = directory()
    reservation = made.reserve("r", [keys_of(0, 2)])
    assert made.changes.take() == []
    made.revoke(reservation.id)
    assert made.changes.take() == []


def test_without_a_listener_nothing_is_kept():
    made = Directory((8,), lambda: 0.0, 10.0)
    save(made, keys_of(0, 2))
    made.disown()
    assert made.changes is None


def test_what_is_disowned_is_told_as_dropped():
    made = directory()
    save(made, keys_of(0, 3))
    made.disown()
    _, gone = made.changes.take()
    assert (gone.stored, sorted(gone.keys)) == (False, keys_of(0, 3))


def test_what_is_disowned_is_told_once_and_takes_no_room():
    """It was told again whenever all was disowned again, and once more as its slots were needed."""
    made = directory()
    save(made, keys_of(0, 3))
    lease = made.lease("reader", [keys_of(0, 1)])
    made.disown()
    made.changes.take()
    assert made.room() == (made.slots[0] - 1,)
    made.disown()
    save(made, keys_of(1, made.slots[0] - 1))
    assert [change.stored for change in made.changes.take()] == [True]
    made.release(lease)
    made.disown()
    assert made.room() == made.slots
    made.check()


def test_replayed_changes_are_what_is_stored():
    for seed in range(50):
        draw, made, heard = random.Random(seed), directory(), set()
        for _ in range(40):
            keys = keys_of(draw.randrange(4), draw.randrange(1, 7))
            if draw.random() < 0.2:
                made.forget(0, keys[-1:])
            else:
                try:
                    save(made, keys)
                except Full:
                    continue
            for change in made.changes.take():
                (heard.update if change.stored else heard.difference_update)(change.keys)
            assert heard == set(made._shelves[0].stored)
