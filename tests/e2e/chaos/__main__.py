"""``python -m chaos --minutes 15 --seed 1``: faults at random on real processes, and the account of it.

A broker, 3 workers, 4 producers and 3 subscribers run on this machine while they are killed (kill -9),
stopped and continued, and their links delayed, throttled, cut and silenced. The last line is one JSON
object; the exit code is 1 when any check failed, and the files of the run are then kept. The seed gives the
same faults at the same times again; what the machine makes of them is its own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from chaos.run import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--min-kills", type=int, default=0, help="fail when there were fewer")
    parser.add_argument("--keep", type=Path, help="folder for the files of the run; kept in any case")
    arguments = parser.parse_args()
    seconds = arguments.seconds or (arguments.minutes or 1.0) * 60

    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    report = run(folder, arguments.seed, seconds)
    if report["kills"] < arguments.min_kills:
        report["failures"].append(f"{report['kills']} kills, {arguments.min_kills} are wanted")
    for failure in report["failures"]:
        sys.stderr.write(f"chaos: {failure}\n")
    if report["failures"]:
        sys.stderr.write(f"chaos: the files of the run are in {folder}\n")
    elif arguments.keep is None:
        shutil.rmtree(folder)
    sys.stdout.write(json.dumps(report) + "\n")
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
