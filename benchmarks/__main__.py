"""Everything that is measured on an NVIDIA GPU, one benchmark after the other.

    python -m benchmarks [NAME ...] [--output FOLDER]

Each checks what it times and refuses to time, or to print a time for, what it could not confirm. The results go to
FOLDER, one JSON file each; the exit status is 1 if any check failed.
"""

import argparse
import subprocess
import sys
from pathlib import Path

NAMES = ("kernels", "matmul", "causal_conv", "selective_scan", "ssd", "steps", "prompts")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {' '.join(NAMES)}")
    parser.add_argument("--output", type=Path, default=Path("results"), metavar="FOLDER")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(NAMES))
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(NAMES)}")
    args.output.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in args.names or NAMES:
        print(f"# benchmarks.{name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", "-o", args.output / f"{name}.json"]
        if subprocess.run(command).returncode:
            failed.append(name)
    if failed:
        print(f"not all of it was confirmed and timed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
