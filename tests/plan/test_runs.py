from hypothesis import given
from hypothesis import strategies as st

from layercast.plan.runs import checked_ids, runs_of, single_run

stretches = st.builds(
    lambda first, count, down: list(range(first, first + count))[:: -1 if down else 1],
    st.integers(0, 20),
    st.integers(1, 20),
    st.booleans(),
)
few = st.lists(st.integers(0, 7), unique=True)


@given(st.tuples(stretches, stretches) | st.tuples(few, few))
def test_runs_are_as_long_as_they_can_be_and_have_each_pair_once(sides):
    count = min(map(len, sides))
    source, target = (side[:count] for side in sides)
    ids = checked_ids((source, target), (50, 50), "g")
    runs = runs_of(ids)
    if single := single_run(ids):
        assert [array.tolist() for array in single] == [array.tolist() for array in runs]
    wanted, left = [], sorted(zip(source, target, strict=True))
    for pair in left:
        if wanted and _goes_on(wanted[-1], pair):
            wanted[-1].append(pair)
        else:
            wanted.append([pair])
    found = [
        [(first + nth, there + nth * step) for nth in range(count)]
        for first, there, count, step in zip(*(array.tolist() for array in runs[:4]), strict=True)
    ]
    assert found == wanted
    assert [*zip(*(ids.tolist() for ids in runs.pairs), strict=True)] == left


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=5))
def test_pairs_that_name_a_block_twice_are_no_single_run(pairs):
    run = single_run(checked_ids(([a for a, _ in pairs], [b for _, b in pairs]), (5, 5), "g"))
    assert run is None or all(len({*side}) == len(pairs) for side in zip(*pairs, strict=True))


def _goes_on(run, pair):
    """Whether a pair continues a run: it lies behind it on the source, and as all before it on the target."""
    (source, target), (first, there) = pair, run[-1]
    steps = (1, -1) if len(run) == 1 else (there - run[-2][1],)
    return source == first + 1 and target - there in steps
