from layercast.move.gates import CpuGate
from layercast.testing.gate_laws import GateLaws


class TestCpuGate(GateLaws):
    def make_gate(self):
        return CpuGate()
