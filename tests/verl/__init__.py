"""The plug-ins against the real verl, TransferQueue and a local Ray (`make test-verl`)."""

import os

# Ray ends its own start, or a worker's, when they need longer than this, which they do on a loaded machine. It reads
# the variables when it is imported. One wait has no setting: see `start_ray` in conftest.py.
os.environ.setdefault("RAY_agent_register_timeout_ms", "600000")
os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "600")
os.environ.setdefault("RAY_worker_register_timeout_seconds", "600")
