from contextlib import closing
from types import SimpleNamespace

import pytest
from async_device import AsyncDevice

torch = pytest.importorskip("torch", reason="torch is not installed")

from layercast.bench import busy  # noqa: E402
from layercast.errors import Refused  # noqa: E402


def refused(*_, **__):
    raise Refused("as if the mover were closed")


def test_a_measurement_that_fails_leaves_no_stream_waiting_and_gives_everything_back(monkeypatch):
    device = AsyncDevice(patience_s=1.0)
    streams = {name: device.stream(urgent=False) for name in ("compute", "copying")}
    events = [device.event() for _ in range(2)]
    made = [SimpleNamespace(cuda_event=event, record=lambda: None) for event in events]
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: made.pop())
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    told = {name: SimpleNamespace(cuda_stream=stream) for name, stream in streams.items()}
    here = SimpleNamespace(device=SimpleNamespace(driver=device, **told), step=lambda **_: None)
    with pytest.raises(Refused), closing(busy._Clock(SimpleNamespace(here=here))) as clock:
        clock.ms(SimpleNamespace(submit_all=refused))
    for event in events:
        device.drop_event(event)
    for stream in streams.values():
        device.drop_stream(stream)
    device.close()
    assert device.memory == {}
