"""Commands: ``sim`` runs seeds, ``canary`` shows that planted bugs are caught, ``speed`` times the core.

``make sim SEED=123`` runs one seed and prints its options, ``SEEDS=500`` the seeds 0 to 499, ``MINUTES=60``
fresh seeds for that long. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys

from hr_sim.canary import CANARIES, catch
from hr_sim.options import draw
from hr_sim.runner import fresh_seeds, run_seeds
from hr_sim.speed import measure


def main() -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(prog="hr_sim", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    sim = commands.add_parser("sim")
    sim.add_argument("--seed", type=int)
    sim.add_argument("--seeds", type=int, default=50)
    sim.add_argument("--first", type=int, default=0, help="the first seed of --seeds")
    sim.add_argument("--minutes", type=float)
    sim.add_argument("-v", "--verbose", action="store_true")
    canary = commands.add_parser("canary")
    canary.add_argument("names", nargs="*", help="only these bugs")
    canary.add_argument("--seeds", type=int, default=400, help="seeds that a bug has to show in")
    commands.add_parser("speed")
    arguments = parser.parse_args()
    if arguments.command == "canary":
        return _run_canaries(arguments.names, arguments.seeds)
    if arguments.command == "speed":
        print(json.dumps(measure()))
        return 0
    if arguments.seed is not None:
        print(f"seed {arguments.seed}\noptions:\n{draw(arguments.seed).lines()}", flush=True)
        return run_seeds([arguments.seed], processes=1, is_verbose=arguments.verbose)
    if arguments.minutes is not None:
        return run_seeds(fresh_seeds(arguments.minutes), is_verbose=arguments.verbose)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    return run_seeds(seeds, is_verbose=arguments.verbose)


def _run_canaries(names: list[str], seeds: int) -> int:
    chosen = {name: CANARIES[name] for name in names} if names else CANARIES
    needed: dict[str, int | None] = {}
    for name in chosen:
        seed_count, finding = catch(name, seeds)
        needed[name] = seed_count
        verdict = "slipped through" if seed_count is None else f"caught by seed number {seed_count}"
        print(f"{name}: {verdict}: {finding}", flush=True)
    print(
        json.dumps(
            {"planted": len(needed), "caught": sum(v is not None for v in needed.values()), "seeds": needed}
        )
    )
    return 1 if None in needed.values() else 0


if __name__ == "__main__":
    sys.exit(main())
