"""Two tensor-parallel ranks in real vLLM."""

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def facts(drive):
    return drive("ranks")


def test_each_rank_loads_its_half_and_the_answer_is_the_same(facts):
    assert facts["ranks"] == 2
    assert facts["warm"]["tokens"] == facts["cold"]["tokens"]
    assert facts["warm"]["cached"] == 6 * facts["block"]
    ended = list(zip(facts["warm"]["ends"], facts["warm"]["bytes"], strict=True))
    loads = [nbytes for end, nbytes in ended if end == "landed"]
    assert len(loads) == 2
    assert len(set(loads)) == 1
    assert {end for end, _ in ended} <= {"landed", "saved"}, "what the first answer generated may be told of here"


def test_a_block_is_there_once_both_ranks_have_saved_it(facts):
    assert facts["cold"]["ends"].count("saved") >= 2
    assert facts["turn"]["cached"] == 7 * facts["block"]


def test_ranks_of_another_engine_bring_up_their_own_halves(drive, tmp_path):
    kv = tmp_path / "kv"
    first, other = (drive("ranks", str(kv)) for _ in range(2))
    assert sorted(path.name for path in kv.iterdir()) == ["rank-0-of-2", "rank-1-of-2"]
    assert first["cold"]["cached"] == 0
    assert other["cold"]["cached"] == 6 * other["block"]
    assert other["cold"]["tokens"] == first["cold"]["tokens"]
    assert other["turn"]["cached"] == 7 * other["block"]
    assert other["idle"]


def test_nothing_is_left(facts):
    assert facts["idle"]
