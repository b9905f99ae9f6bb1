"""Files that start jobs elsewhere are read by what will read them there: accelerate and bash; and a Dockerfile."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

import pods_rl

ROOT = Path(__file__).parents[1]
RECIPES = Path(pods_rl.__file__).parent / "recipes"
SCRIPTS = [*sorted((ROOT / "examples").glob("*.sh")), RECIPES / "verl" / "launch.sh"]
LAYOUTS = sorted((RECIPES / "accelerate").glob("*.yaml"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash_and_may_be_run(script):
    assert os.access(script, os.X_OK)
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# -- accelerate -------------------------------------------------------------------------------------------------------


def of_node(tmp_path: Path, **variables: str) -> tuple[list[str], dict]:
    """What `nodes.sh` runs on a node, and the configuration that it makes for it."""
    pods = tmp_path / "pods"
    pods.write_text(
        f"""#!/bin/sh
case "$1" in recipes) echo {RECIPES}/accelerate/$3.yaml;; *) cp "$3" {tmp_path}/used.yaml; echo "$@";; esac
""",
        "utf-8",
    )
    (tmp_path / "scontrol").write_text("#!/bin/sh\nprintf 'node-a\\nnode-b\\n'\n", "utf-8")
    for name in ("pods", "scontrol"):
        (tmp_path / name).chmod(0o755)
    command = ["bash", str(ROOT / "examples" / "nodes.sh"), "--config", "my.yaml"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TMPDIR": str(tmp_path), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    used = tmp_path / "used.yaml"
    load_config_from_file(str(used))
    values = yaml.safe_load(used.read_text("utf-8"))
    # accelerate ignores unknown keys of its groups
    options = {action.dest for action in launch_command_parser()._actions}
    for group in ("fsdp_config", "deepspeed_config"):
        assert set(values.get(group, ())) <= options
    return done.stdout.split(), values


@pytest.mark.parametrize("layout", [path.stem for path in LAYOUTS])
def test_every_node_gets_its_configuration(tmp_path, layout):
    """By variables, and under Slurm."""
    given = {"NODES": "2", "NODE": "1", "HEAD_ADDRESS": "10.0.0.1"}
    of_slurm = {"SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "node-[a-b]"}
    for variables, rank, address in ((given, 1, "10.0.0.1"), (of_slurm, 0, "node-a")):
        words, values = of_node(tmp_path, GPUS="8", LAYOUT=layout, **variables)
        assert words[:2] == ["train", "--accelerate_config"]
        assert words[3:] == ["--num_processes", "16", "--config", "my.yaml"]
        shipped = yaml.safe_load((RECIPES / "accelerate" / f"{layout}.yaml").read_text("utf-8"))
        assert shipped["num_machines"] == 1
        place = {"num_machines": 2, "machine_rank": rank, "main_process_ip": address, "main_process_port": 29500}
        assert values == shipped | place
        if "deepspeed_config" in values:  # without it accelerate starts pdsh, and writes the environment into a file
            assert values["deepspeed_config"]["deepspeed_multinode_launcher"] == "standard"


# -- Docker ------------------------------------------------------------------------------------------------------------


def test_the_dockerfile_copies_what_is_there():
    """`.dockerignore` leaves out all else."""
    allowed = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text("utf-8"), flags=re.MULTILINE)
    copied = re.findall(r"^COPY (.*) \S+$", (ROOT / "Dockerfile").read_text("utf-8"), flags=re.MULTILINE)
    assert copied
    for source in " ".join(copied).split():
        assert (ROOT / source).exists()
        assert source in allowed
