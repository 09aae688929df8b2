"""The command line: ``headrace up | broker | worker | push | watch | status | demo | simulate ...``.

Results go to stdout (JSON with ``--json``), everything else to stderr. An error is one line that names
what was wrong and what would be right; the exit codes are in docs/configuration.md. Commands import what
they need when they run, so that ``headrace --help`` answers at once.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import click

from headrace import __version__, logs
from headrace.build_kind import build_kind
from headrace.cli import (
    bench,
    broker,
    demo,
    doctor,
    export,
    plan_classes,
    prepare,
    push,
    record,
    reload,
    simulate,
    status,
    up,
    watch,
    worker,
)
from headrace.cli.common import put, say
from headrace.errors import HeadraceError, UnreachableError
from headrace.exit_codes import ExitCode, exit_code_of
from headrace.signals import ignore_echoes

_EPILOG = """\b
Examples:
  headrace demo                                 see it work, nothing to prepare
  headrace up --model model.onnx                broker and worker on this machine
  headrace push video.mp4 --stream cam-1        send a video to them
  headrace watch cam-1                          see the results
  headrace worker --connect tcp://HOST:5555     add a machine

Exit codes: 0 done, 1 failed (frames not delivered), 2 usage, 65 model, 69 broker or device
unavailable, 70 bug, 78 configuration. docs/configuration.md has them all.
"""


@click.group(
    epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(
    __version__, prog_name="headrace", message=f"%(prog)s, version %(version)s ({build_kind()})"
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error (also HEADRACE_DEBUG=1).")
def cli(debug: bool) -> None:
    """Send frames of video to GPUs in batches, and get one result for each.

    A broker takes frames from producers, sorts them by size and priority, and hands them in batches to
    workers that run an ONNX model. Results are published per stream.
    """
    if debug:
        os.environ["HEADRACE_DEBUG"] = "1"


for _command in (
    up.command,
    broker.command,
    worker.command,
    push.command,
    watch.command,
    status.command,
    demo.command,
    doctor.command,
    bench.command,
    simulate.command,
    plan_classes.command,
    prepare.command,
    export.command,
    record.command,
    reload.command,
):
    cli.add_command(_command)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; errors are written to stderr as one line."""
    try:
        result = cli.main(args=arguments, prog_name="headrace", standalone_mode=False)
        return result if isinstance(result, int) else int(ExitCode.OK)
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        _say("interrupted")
        return int(ExitCode.INTERRUPTED)
    except UnreachableError as error:
        _report(error, f"error: {error}: start one with `headrace up`, or name another with --connect")
        return exit_code_of(error)
    except HeadraceError as error:
        _report(error, f"error: {error}")
        return exit_code_of(error)
    except OSError as error:
        if error.filename is None:
            return _internal(error)
        # A folder that is not there, a file that may not be written: the person can mend it, we can't.
        _report(error, f"error: {error.filename}: {error.strerror}")
        return int(ExitCode.FAILED)
    except Exception as error:  # noqa: BLE001 - a process edge: a bug of ours ends with a code of its own
        return _internal(error)


def main() -> None:
    """Entry point of the command ``headrace``."""
    code = run()
    ignore_echoes()
    sys.exit(code)


def _internal(error: Exception) -> int:
    _report(error, f"internal error, please report it: {type(error).__name__}: {error}")
    return int(ExitCode.INTERNAL)


def _report(error: Exception, line: str) -> None:
    if os.environ.get("HEADRACE_DEBUG", "") not in {"", "0"}:
        put("".join(traceback.format_exception(error)))
    _say(" ".join(line.split()))


def _say(line: str) -> None:
    logs.flush()  # so that counts of repeated log lines do not push the reason off the end
    say(f"headrace: {line}")
