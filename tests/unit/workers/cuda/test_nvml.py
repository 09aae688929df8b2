"""The driver's figures, from a stand-in for pynvml."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from headrace.workers.cuda.nvml import GPM_METRICS, Nvml


class NotSupportedError(Exception):
    pass


class FakeNvml:
    """The part of pynvml that is used. ``has_gpm``: Hopper or later. ``missing`` calls are not supported."""

    NVMLError = NotSupportedError
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRIC_SM_OCCUPANCY, NVML_GPM_METRIC_ANY_TENSOR_UTIL = 2, 3, 5
    NVML_GPM_METRIC_DRAM_BW_UTIL, NVML_GPM_METRIC_PCIE_TX_PER_SEC, NVML_GPM_METRIC_PCIE_RX_PER_SEC = (
        10,
        20,
        21,
    )

    def __init__(self, *, has_gpm: bool, missing: frozenset[str] = frozenset()) -> None:
        self.has_gpm = has_gpm
        self.missing = missing
        self.calls: list[str] = []
        self.samples_taken = 0

    def _call(self, name: str, answer: Any) -> Any:
        self.calls.append(name)
        if name in self.missing:
            raise NotSupportedError(name)
        return answer

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetHandleByUUID": "device",
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=75, memory=10),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=10, total=40),
            "nvmlDeviceGetTemperature": 55,
            "nvmlDeviceGetPowerUsage": 300_000,
            "nvmlGpmSampleFree": None,
        }
        if name not in answers:
            raise AttributeError(name)
        return lambda *_: self._call(name, answers[name])

    def nvmlDeviceGetClockInfo(self, device: str, clock: int) -> int:
        return self._call("nvmlDeviceGetClockInfo", {1: 1980, 2: 2619}[clock])

    def nvmlGpmQueryDeviceSupport(self, device: str) -> Any:
        return self._call("nvmlGpmQueryDeviceSupport", SimpleNamespace(isSupportedDevice=int(self.has_gpm)))

    def nvmlGpmSampleAlloc(self) -> list[int]:
        return []

    def nvmlGpmSampleGet(self, device: str, sample: list[int]) -> None:
        self._call("nvmlGpmSampleGet", None)
        self.samples_taken += 1
        sample[:] = [self.samples_taken]

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        metrics = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(len(GPM_METRICS))]
        return SimpleNamespace(version=0, numMetrics=0, sample1=None, sample2=None, metrics=metrics)

    def nvmlGpmMetricsGet(self, wanted: Any) -> None:
        assert wanted.version == 1
        assert wanted.sample2[0] == wanted.sample1[0] + 1  # two samples that follow each other
        for metric in wanted.metrics[: wanted.numMetrics]:
            metric.value = 50.0
            metric.nvmlReturn = 3 if metric.metricId == 3 else 0  # occupancy is not supported


def test_a_gpu_without_gpm_tells_the_basic_figures() -> None:
    """In units that need no table: shares, bytes, hertz, watts."""
    nvml = Nvml(FakeNvml(has_gpm=False), "GPU-1")

    assert nvml.figures() == {
        "gpu_busy_ratio": 0.75,
        "gpu_memory_used_bytes": 10,
        "gpu_memory_total_bytes": 40,
        "gpu_temperature_celsius": 55,
        "gpu_sm_clock_hertz": 1.98e9,
        "gpu_memory_clock_hertz": 2.619e9,
        "gpu_power_watts": 300,
    }


def test_gpm_figures_are_means_between_two_polls() -> None:
    """Each poll compares its sample with the last one's; what is not supported is left out."""
    nvml = Nvml(FakeNvml(has_gpm=True), "GPU-1")

    for _ in range(3):
        found = nvml.figures()

    gpm = {name: value for name, value in found.items() if name in {metric[0] for metric in GPM_METRICS}}
    assert gpm == {
        "gpu_sm_busy_ratio": 0.5,
        "gpu_tensor_busy_ratio": 0.5,
        "gpu_memory_bandwidth_ratio": 0.5,
        "gpu_pcie_sent_bytes_per_second": 50 * 2**20,
        "gpu_pcie_received_bytes_per_second": 50 * 2**20,
    }


def test_what_a_gpu_can_not_tell_is_left_out() -> None:
    """In MIG mode there is no utilisation; an old driver knows no GPM."""
    missing = frozenset(
        {"nvmlDeviceGetUtilizationRates", "nvmlGpmQueryDeviceSupport", "nvmlDeviceGetPowerUsage"}
    )
    nvml = Nvml(FakeNvml(has_gpm=True, missing=missing), "GPU-1")

    found = nvml.figures()

    assert "gpu_busy_ratio" not in found
    assert "gpu_power_watts" not in found
    assert found["gpu_memory_used_bytes"] == 10


def test_a_failing_gpm_sample_costs_the_gpm_figures_alone() -> None:
    """A profiler that holds the counters makes the call fail."""
    api = FakeNvml(has_gpm=True)
    nvml = Nvml(api, "GPU-1")
    api.missing = frozenset({"nvmlGpmSampleGet"})

    assert set(nvml.figures()) >= {"gpu_busy_ratio", "gpu_memory_used_bytes"}
    assert "gpu_sm_busy_ratio" not in nvml.figures()
    nvml.close()
    assert api.calls[-3:] == ["nvmlGpmSampleFree", "nvmlGpmSampleFree", "nvmlShutdown"]
