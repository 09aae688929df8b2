"""``headrace doctor``: what this machine offers, and what to mend."""

from __future__ import annotations

import click

from headrace.cli.common import json_option, load_config, set_up_logs, write_json

_EPILOG = """\b
Examples:
  headrace doctor
  headrace doctor --config pool.toml          and what its models would take of a GPU
  headrace doctor --json | jq '.findings[] | select(.verdict == "warning")'

Exit codes: 0 a worker can run here, 1 something stops it.
"""


@click.command("doctor", epilog=_EPILOG, short_help="What this machine offers, and what to mend.")
@click.option(
    "--config",
    "config_name",
    metavar="FILE|PRESET",
    help="Estimate too what its models would take of a GPU, and which CUDA graphs worker.gpu_memory_mb leaves"
    " out.",
)
@json_option("Print all findings as one JSON object on stdout.")
def command(*, config_name: str | None, as_json: bool) -> int:
    """Look at ONNX Runtime, the GPU, shared memory, threads, limits and the clock of this machine."""
    loaded = load_config(config_name, {}) if config_name else None
    set_up_logs()
    from headrace.doctor import Verdict, examine, this_host

    host = this_host()
    findings = examine(host)
    if loaded is not None:
        from headrace.doctor_memory import examine_memory

        findings += examine_memory(loaded, host.gpu)
    is_fit = all(finding.verdict is not Verdict.STOPS for finding in findings)
    if as_json:
        rows = [
            {"check": each.check, "verdict": each.verdict.value, "text": each.text, "remedy": each.remedy}
            for each in findings
        ]
        write_json({"ok": is_fit, "findings": rows})
        return 0 if is_fit else 1
    for each in findings:
        click.echo(f"{each.verdict.value:8} {each.check}: {each.text}")
        if each.remedy:
            click.echo(f"{'':8} -> {each.remedy}")
    return 0 if is_fit else 1
