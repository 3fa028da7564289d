"""Time of ``--help`` and of a wrong key, compared with TRL's script.

python benchmarks/startup.py [--rounds 5] [--output build/startup.json]
"""

from __future__ import annotations

import subprocess
import sys
import time

from harness import build_parser, compare, run_script, spread, write_results

COMMANDS = {
    "ours --help": [sys.executable, "recipes/sft.py", "--help"],
    "ours, a wrong key": [sys.executable, "recipes/sft.py", "--learning_rat", "1e-5"],
    "TRL --help": [sys.executable, "-m", "trl.scripts.sft", "--help"],
}


def main() -> None:
    """Time each command as a whole process."""
    parser = build_parser(__doc__, rounds=5)
    parser.add_argument("--measure", choices=COMMANDS)
    options = parser.parse_args()
    if options.measure:
        start = time.perf_counter()
        subprocess.run(COMMANDS[options.measure], capture_output=True, check=False)
        print(f'{{"seconds": {time.perf_counter() - start}}}')
        return
    results = run_script(COMMANDS, options.rounds)
    table = [["command", "seconds (min / median / max)", "TRL / this"]]
    for name in COMMANDS:
        table.append([name, spread(results[name], "seconds"), compare(results, "seconds", name, "TRL --help")])
    write_results(options.output, "Start-up", table, results)


if __name__ == "__main__":
    main()
