#!/usr/bin/env python3
"""Find the best tile sizes of every kernel on this GPU, and write down what differs from those of its chip.

    python tools/tune_kernels.py                     # writes pallas_kernels/<op>/tuned/<device>.json
    python tools/tune_kernels.py --only decode/b2    # some launches only; what is known of others stays
    python tools/tune_kernels.py --dry               # one candidate each, interpreted on the CPU; writes nothing

Each launch is timed in each of its shape classes with some ten candidates. One that does not compile, or whose result
is another, is left out with its reason; one that is hardly faster than what is there is not worth an entry.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from gpu_check import prepare

__all__ = ["main"]

_LEAST = 10.0  # seconds, without which no launch is begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="no GPU: one candidate of tiny shapes on the CPU")
    parser.add_argument("--budget", type=float, default=330, metavar="SECONDS", help="by default 330")
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="launches whose name holds this; may be repeated"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write below this folder, not in pallas_kernels")
    args = parser.parse_args()
    prepare(dry=args.dry)
    from gpu.session import open_session, short
    from gpu.tune import describe, tune, write
    from gpu.tuning_cases import LAUNCHES

    from pallas_kernels import tuning

    gpu = tuning.Target("dry run", 90) if args.dry else tuning.target()
    if gpu is None:
        parser.error("there is no NVIDIA GPU here; --dry does without")
    session, results, failed = open_session(args.budget, dry=args.dry), [], 0
    for launch in (launch for launch in LAUNCHES if any(text in launch.name for text in args.only or [""])):
        if session.clock.left < _LEAST:
            print(f"{launch.name}: skipped, no time left")
            continue
        few = dataclasses.replace(launch, candidates=launch.candidates[:1]) if args.dry else launch
        try:
            tuned = tune(few, session, gpu.chip)
        except Exception as error:  # the other launches have their own sizes
            failed += 1
            print(f"{launch.name}: {short(error)}")
            continue
        results.append(tuned)
        print(f"{launch.name}: {describe(tuned.best) or 'as it is'}", flush=True)
        for name, time in sorted(tuned.times.items(), key=lambda item: item[1]):
            print(f"    {time:10.1f} µs  {name}")
        for name, reason in tuned.reasons.items():
            print(f"    {'–':>10}     {name}: {reason}", flush=True)
    folder = args.out or (None if args.dry else Path(tuning.__file__).parent)
    for path in write(folder, gpu.kind, results) if folder else ():
        print(path)
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
