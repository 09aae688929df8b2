"""What the driver says of one GPU: utilisation, memory, clocks, temperature, power, and on Hopper how busy
its parts are (GPM: SMs, tensor cores, memory, PCIe).

"Utilisation" of a GPU is the share of time in which any kernel ran; a full one may still leave most of its
SMs idle, which the GPM figures tell. PCIe throughput without GPM is not asked: that call blocks for 20 ms.

Not measured on a GPU: the calls and fields are those of nvidia-ml-py 13.
"""

from __future__ import annotations

from typing import Any

import structlog

log = structlog.get_logger()

#: GPM metrics: our name, NVML's constant, and the factor to our unit (shares 0 to 1, bytes a second).
GPM_METRICS: tuple[tuple[str, str, float], ...] = (
    ("gpu_sm_busy_ratio", "NVML_GPM_METRIC_SM_UTIL", 0.01),
    ("gpu_sm_occupancy_ratio", "NVML_GPM_METRIC_SM_OCCUPANCY", 0.01),
    ("gpu_tensor_busy_ratio", "NVML_GPM_METRIC_ANY_TENSOR_UTIL", 0.01),
    ("gpu_memory_bandwidth_ratio", "NVML_GPM_METRIC_DRAM_BW_UTIL", 0.01),
    ("gpu_pcie_sent_bytes_per_second", "NVML_GPM_METRIC_PCIE_TX_PER_SEC", 1024.0 * 1024.0),
    ("gpu_pcie_received_bytes_per_second", "NVML_GPM_METRIC_PCIE_RX_PER_SEC", 1024.0 * 1024.0),
)


class Nvml:
    """One GPU, by UUID: CUDA and NVML number GPUs differently. Owned by the thread that polls.

    A figure that the GPU or driver does not have is left out; ``api`` is the module pynvml.
    """

    def __init__(self, api: Any, uuid: str) -> None:
        self._api = api
        api.nvmlInit()
        self._device = api.nvmlDeviceGetHandleByUUID(uuid)
        self._samples: list[Any] = []
        try:
            if api.nvmlGpmQueryDeviceSupport(self._device).isSupportedDevice:
                self._samples = [api.nvmlGpmSampleAlloc() for _ in range(2)]
                api.nvmlGpmSampleGet(self._device, self._samples[0])
        except api.NVMLError as error:
            self._samples = []
            log.info("GPU has no performance monitoring", reason=str(error))

    def figures(self) -> dict[str, float]:
        """Return what can be told now; the GPM figures are means since the last call."""
        api, device = self._api, self._device
        found: dict[str, float] = {}
        self._ask(found, "gpu_busy_ratio", lambda: api.nvmlDeviceGetUtilizationRates(device).gpu / 100)
        self._ask(found, "gpu_memory_used_bytes", lambda: api.nvmlDeviceGetMemoryInfo(device).used)
        self._ask(found, "gpu_memory_total_bytes", lambda: api.nvmlDeviceGetMemoryInfo(device).total)
        self._ask(
            found,
            "gpu_temperature_celsius",
            lambda: api.nvmlDeviceGetTemperature(device, api.NVML_TEMPERATURE_GPU),
        )
        for name, clock in (("gpu_sm_clock_hertz", "SM"), ("gpu_memory_clock_hertz", "MEM")):
            which = getattr(api, f"NVML_CLOCK_{clock}")
            self._ask(found, name, lambda which=which: api.nvmlDeviceGetClockInfo(device, which) * 1e6)
        self._ask(found, "gpu_power_watts", lambda: api.nvmlDeviceGetPowerUsage(device) / 1000)
        if self._samples:
            found |= self._gpm()
        return found

    def close(self) -> None:
        """Free the samples and NVML."""
        for sample in self._samples:
            self._api.nvmlGpmSampleFree(sample)
        self._samples = []
        self._api.nvmlShutdown()

    def _ask(self, found: dict[str, float], name: str, ask: Any) -> None:
        try:
            found[name] = float(ask())
        except self._api.NVMLError:
            return  # not on this GPU, in this MIG mode, or with this driver

    def _gpm(self) -> dict[str, float]:
        api = self._api
        first, second = self._samples
        try:
            api.nvmlGpmSampleGet(self._device, second)
            wanted = api.c_nvmlGpmMetricsGet_t()
            wanted.version = api.NVML_GPM_METRICS_GET_VERSION
            wanted.numMetrics = len(GPM_METRICS)
            wanted.sample1, wanted.sample2 = first, second
            for index, (_, constant, _) in enumerate(GPM_METRICS):
                wanted.metrics[index].metricId = getattr(api, constant)
            api.nvmlGpmMetricsGet(wanted)
        except api.NVMLError:
            return {}
        self._samples = [second, first]
        return {
            name: float(wanted.metrics[index].value) * factor
            for index, (name, _, factor) in enumerate(GPM_METRICS)
            if wanted.metrics[index].nvmlReturn == 0
        }


def open_nvml(uuid: str) -> Nvml | None:
    """Return the GPU's figures, None (and why, in the log) where NVML is not there."""
    try:
        import pynvml
    except ImportError:
        log.warning("no GPU telemetry", reason="nvidia-ml-py is not installed (pip install 'headrace[gpu]')")
        return None
    try:
        return Nvml(pynvml, uuid)
    except pynvml.NVMLError as error:
        log.warning("no GPU telemetry", reason=str(error))
        return None
