"""Who is looked at in which step."""

from hypothesis import given
from hypothesis import strategies as st

from layercast.connector.vllm.rota import Rota

NAMES = "abcd"


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 4), st.sets(st.sampled_from(NAMES))), max_size=40))
def test_nobody_is_looked_at_before_its_turn_nor_passed_over_after_it(steps):
    rota, due = Rota(), {}
    for number, (name, wait, scheduled) in enumerate(steps):
        rota.later(name, wait)
        due[name] = number + wait
        looked = rota.begin(scheduled)
        # `number + 1` steps have begun, so a turn after `wait` steps from step `number` is in step `number + wait`.
        assert sorted(looked) == sorted(who for who in scheduled if due.get(who, 99) <= number + 1)
        for who in looked:
            rota.drop(who)
            del due[who]


def test_one_who_is_always_looked_at_has_no_other_turn():
    rota = Rota()
    rota.later("a", 2)
    rota.always("a")
    assert [rota.begin({"a"}) for _ in range(3)] == [["a"]] * 3
    rota.later("a", 2)
    assert [rota.begin({"a"}) for _ in range(3)] == [[], ["a"], []]


def test_one_who_has_gone_is_never_looked_at_again():
    rota = Rota()
    rota.later("a", 1)
    rota.drop("a")
    assert rota.begin({"a"}) == []
    assert not rota._later
