"""A broker as a process of its own, for tests that kill it: prints its addresses as one line of JSON.

Arguments: a JSON object of ShellSettings fields (those that JSON can hold).
"""

from __future__ import annotations

import dataclasses
import json
import sys

import hr_broker as hb

from headrace.broker.process import run
from headrace.protocol.messages import Endpoints


def announce(endpoints: Endpoints) -> None:
    sys.stdout.write(json.dumps(dataclasses.asdict(endpoints)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(run(hb.broker_settings(**json.loads(sys.argv[1])), on_ready=announce))
