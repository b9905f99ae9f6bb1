"""What older versions of transformers compute by rows, or do not have."""

import pytest
import transformers
from packaging.version import Version

TREES_SINCE = "5.23"  # the version whose recurrent and special layers pass a tree on; none between 5.3 and it was tried

needs_newer_transformers = pytest.mark.skipif(
    Version(transformers.__version__) < Version(TREES_SINCE),
    reason=f"transformers {transformers.__version__} computes these by rows: trees are tested from {TREES_SINCE} on",
)
