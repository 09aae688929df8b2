"""Batches compared with the FP32 file, from the configuration to the metrics of a real broker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import hr_models
import hr_plant as hp
import hr_worker
import pytest
from hr_clients import wait_for

from headrace.broker.shell_settings import LocalModel

TIMEOUT_S = 30.0


@pytest.mark.parametrize("bias", [0.0, 0.5])
def test_drift_reaches_status(tmp_path: Path, bias: float) -> None:
    """A file that answers 0.5 too much shows as that, one that agrees as 0. Figures are told every 2 s."""
    model = hp.onnx_model(tmp_path / "p", hr_models.mean_color_plus(bias))
    full = hr_models.write(tmp_path / "p" / "m" / "full", hr_models.mean_color())
    assert model.local is not None
    local = LocalModel("m", "1", model.local.path, fp32_files=(full,))
    spec = replace(model.settings.spec, fp32_sample_share=1.0)
    model = hp.PlantModel(replace(model.settings, spec=spec), local)

    with hp.running_plant(tmp_path, model) as plant:
        plant.outcomes(hr_worker.raw_frame(hp.solid(10, 20, 40)))
        drift: list[dict[str, object]] = []

        def is_told() -> bool:
            drift[:] = plant.caller.call("status").result["drift"]  # type: ignore[arg-type]
            return bool(drift and drift[0]["rows_total"])

        wait_for(is_told, TIMEOUT_S)

    assert drift[0]["model"] == "m:1"
    assert drift[0]["max_abs"] == pytest.approx(bias, abs=1e-4)
    assert drift[0]["max_rel"] == pytest.approx(bias / (40 + bias), abs=1e-5)
