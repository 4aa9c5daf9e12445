import json
from contextlib import nullcontext

import pytest
from host_device import KERNEL, HostDevice
from hypothesis import given, settings
from hypothesis import strategies as st

from layercast.move import cuda_costs
from layercast.move.costs import DEFAULT_COSTS, CostFile, Costs, Direction
from layercast.move.cuda import CudaMover
from layercast.move.cuda_costs import measure, measured_costs, read, write
from layercast.move.cuda_issue import plain_issue

ABOUT = CostFile("gpu-0", 13000, "0.1.0", True, {})
FIGURES = st.floats(0.001, 1e9)
COSTS = st.builds(Costs, FIGURES, FIGURES, FIGURES, FIGURES)


class Watched:
    """A mover over a device of host memory; says what it was last told to prefer, and how much it copied."""

    def __init__(self, device, kernel=KERNEL):
        issue = plain_issue(device.calls, device.batch_attributes)
        self.mover = CudaMover(device, kernel, issue, lambda: 1, 3 << 23)
        self.driver, self.preferred, self.copies = device, {}, 0

    def prefer(self, costs):
        self.preferred |= costs
        self.mover.prefer(costs)

    def submit_all(self, batches):
        self.copies += 1
        return self.mover.submit_all(batches)


def prefer_measured(watched, **given):
    watched.prefer(measured_costs(watched, **given))


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch):
    """The figures don't matter here; no cores to keep busy either."""
    monkeypatch.setattr(cuda_costs, "ROUNDS", 1)
    monkeypatch.setattr(cuda_costs, "LONG", 16 << 20)
    monkeypatch.setattr(cuda_costs, "BATCHES", 2)
    monkeypatch.setattr(cuda_costs.measure, "__kwdefaults__", {"beside": lambda _: nullcontext()})


@pytest.fixture
def watched():
    watched = Watched(HostDevice())
    yield watched
    watched.mover.close(10)
    assert not watched.driver.live
    assert not watched.driver.memory, "what measuring took is given back"


def kept_in(folder):
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("direction", Direction)
def test_every_link_has_four_positive_figures(watched, direction, kernel):
    costs = measure(watched, direction, watched.driver, kernel=kernel)
    assert min(costs.gbps, costs.piece_us, costs.row_us, costs.kernel_gbps) > 0
    assert (costs.kernel_gbps == DEFAULT_COSTS[direction].kernel_gbps) is not kernel


@pytest.mark.parametrize("direction", Direction)
def test_a_kernel_is_timed_beside_compute_where_the_host_is_at_one_end(watched, direction):
    kept_busy = []
    costs = measure(
        watched, direction, watched.driver, kernel=True, beside=lambda device: kept_busy.append(device) or nullcontext()
    )
    assert costs.kernel_gbps > 0
    assert bool(kept_busy) is (direction in (Direction.UP, Direction.DOWN))


def test_the_second_start_measures_nothing_and_prefers_the_same(watched, tmp_path):
    prefer_measured(watched, kernel=True, folder=tmp_path)
    first, copies = dict(watched.preferred), watched.copies
    prefer_measured(watched, kernel=True, folder=tmp_path)
    assert watched.copies == copies
    assert watched.preferred == first
    assert first[Direction.UP] != DEFAULT_COSTS[Direction.UP]


def test_another_device_of_the_machine_is_one_more_link(watched, tmp_path):
    prefer_measured(watched, kernel=True, folder=tmp_path)
    copies, other = watched.copies, HostDevice()
    other.uuid = "11" * 16
    prefer_measured(watched, kernel=True, peers=[other], folder=tmp_path)
    assert watched.copies > copies
    links = json.loads(kept_in(tmp_path).read_text())["links"]
    assert set(links) == {"up", "down", "local", f"peer {other.uuid}"}
    assert watched.preferred[Direction.PEER].gbps == links[f"peer {other.uuid}"]["gbps"]
    assert not other.memory


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"device": 3}'])
def test_a_damaged_file_is_measured_again(watched, tmp_path, damage):
    prefer_measured(watched, kernel=True, folder=tmp_path)
    copies, path = watched.copies, kept_in(tmp_path)
    path.write_bytes(damage)
    prefer_measured(watched, kernel=True, folder=tmp_path)
    assert watched.copies == 2 * copies
    assert set(json.loads(path.read_text())["links"]) == {"up", "down", "local"}


@pytest.mark.parametrize("change", [{"device": "gpu-1"}, {"driver": 12080}, {"layercast": "0.2.0"}, {"kernel": False}])
def test_costs_of_another_device_driver_version_or_kernel_are_not_used(tmp_path, change):
    path, links = tmp_path / "costs.json", {"up": DEFAULT_COSTS[Direction.UP]}
    write(path, CostFile("gpu-0", 13000, "0.1.0", True, links))
    about = {"device": "gpu-0", "driver": 13000, "layercast": "0.1.0", "kernel": True}
    assert read(path, CostFile(**about, links={})) == links
    assert read(path, CostFile(**{**about, **change}, links={})) == {}


@settings(deadline=None)
@given(links=st.dictionaries(st.text(max_size=8), COSTS, max_size=3), wrong=st.sampled_from([0.0, -1.0]))
def test_a_file_holds_what_was_kept_and_nothing_that_costs_nothing(tmp_path_factory, links, wrong):
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    write(path, CostFile("gpu-0", 13000, "0.1.0", True, links))
    assert read(path, ABOUT) == links
    text = json.loads(path.read_text())
    text["links"]["up"] = {"gbps": 1.0, "piece_us": wrong, "row_us": 1.0, "kernel_gbps": 1.0}
    path.write_text(json.dumps(text))
    assert read(path, ABOUT) == {}


def test_without_memory_to_measure_in_the_figures_of_an_h100_serve_and_nothing_is_kept(watched, tmp_path, caplog):
    watched.driver.room = 1 << 20
    prefer_measured(watched, kernel=True, folder=tmp_path)
    assert watched.preferred[Direction.UP] == DEFAULT_COSTS[Direction.UP]
    assert "could not be measured" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_costs_a_message(watched, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    prefer_measured(watched, kernel=True, folder=tmp_path / "file")
    assert "can't be written" in caplog.text
    assert watched.preferred[Direction.UP] != DEFAULT_COSTS[Direction.UP]
