import pytest

from layercast.testing.transport_laws import SECRET, TransportLaws
from layercast.transport.memory import MemoryHub, MemoryTransport


class TestMemoryTransport(TransportLaws):
    @pytest.fixture(autouse=True)
    def _hub(self):
        self.hub = MemoryHub()
        yield
        assert self.hub.transports == {}

    def make_transport(self, secret=SECRET, **limits):
        return MemoryTransport(self.hub, secret, **limits)
