"""``headrace doctor``: what this machine offers, and what to mend."""

from __future__ import annotations

import click

from headrace.cli.common import json_option, set_up_logs, write_json

_EPILOG = """\b
Examples:
  headrace doctor
  headrace doctor --json | jq '.findings[] | select(.verdict == "warning")'

Exit codes: 0 a worker can run here, 1 something stops it.
"""


@click.command("doctor", epilog=_EPILOG, short_help="What this machine offers, and what to mend.")
@json_option("Print all findings as one JSON object on stdout.")
def command(*, as_json: bool) -> int:
    """Look at ONNX Runtime, the GPU, shared memory, threads, limits and the clock of this machine."""
    set_up_logs()
    from headrace.doctor import Verdict, examine, this_host

    findings = examine(this_host())
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
