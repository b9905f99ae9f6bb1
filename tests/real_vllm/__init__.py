"""Tests with a real vLLM; what its cases (processes of their own) and the tests of what they saw share."""

from pathlib import Path

import pods_rl

TINY = Path(pods_rl.__file__).parent / "policies" / "tiny"  # the shipped policy
