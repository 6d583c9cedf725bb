"""The script for torchrun and the manifest for Kubernetes: processes and machines are lost, and the run goes on."""

import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.test_launch import (
    ROOT,
    assert_equal_ends,
    end_of,
    environment,
    folder,  # noqa: F401  # fixtures
    wait_for_step,
    whole,  # noqa: F401
)

pytestmark = pytest.mark.slow
LAUNCH = ROOT / "configs/launch"


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def start_two(command, where, **variables):
    """Start ``command`` as on two machines of one process each, of which the first has the rendezvous."""
    variables = {
        "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"localhost:{free_port()}", "PET_RDZV_ID": "fit",
        **variables,
    }  # fmt: skip
    started = []
    for name in ("first.txt", "second.txt"):
        variables["PET_RDZV_CONF"] = f"last_call_timeout=5,is_host={int(not started)}"  # one address for both
        with open(where / name, "w") as log:
            options = {"env": environment() | variables, "stdout": log, "stderr": log, "start_new_session": True}
            started.append(subprocess.Popen(command, cwd=where, **options))
    return started


def outputs(where):
    return "".join((where / name).read_text() for name in ("first.txt", "second.txt"))


def end(started):
    for one in started:
        if one.poll() is None:
            os.killpg(one.pid, signal.SIGKILL)
        one.wait()


@pytest.mark.weekly
def test_a_machine_that_is_lost_is_done_without(folder):  # noqa: F811
    command = [LAUNCH / "torchrun.sh", "--config=fit.yaml", "--model.pause=0.1"]
    started = start_two(command, folder, PET_NNODES="1:2", PET_NPROC_PER_NODE="1")
    try:
        wait_for_step(folder, 10)
        lost = started[1].pid
        for pid in (lost, *Path(f"/proc/{lost}/task/{lost}/children").read_text().split()):
            os.kill(int(pid), signal.SIGKILL)
        assert started[0].wait(300) == 0, outputs(folder)[-3000:]
    finally:
        end(started)
    output = (folder / "first.txt").read_text()
    assert re.search(r"--ckpt_path auto: going on from .*/epoch=1-step=\d+\.ckpt", output)
    assert "`Trainer.fit` stopped: `max_epochs=5` reached" in output


def inner_kind(kind):
    return kind.removeprefix("list[").removeprefix("dict(str, ").rstrip("])")


def assert_fits(value, kind, where):
    """Hold ``value`` against the OpenAPI type ``kind`` of Kubeflow's and Kubernetes' clients."""
    from kubeflow.training import models
    from kubernetes.client import models as kubernetes

    if kind.startswith("list["):
        assert isinstance(value, list), where
        for number, one in enumerate(value):
            assert_fits(one, inner_kind(kind), f"{where}[{number}]")
    elif kind.startswith("dict("):
        for name, one in value.items():
            assert_fits(one, inner_kind(kind), f"{where}.{name}")
    elif kind in ("str", "int", "bool", "object"):
        assert isinstance(value, {"str": str, "int": int, "bool": bool, "object": object}[kind]), f"{where}: {value!r}"
    else:
        model = getattr(models, kind, None) or getattr(kubernetes, kind)
        names = {json: name for name, json in model.attribute_map.items()}
        assert set(value) <= set(names), f"{where} has no {set(value) - set(names)}"
        for json, one in value.items():
            assert_fits(one, model.openapi_types[names[json]], f"{where}.{json}")
        model(**{names[json]: one for json, one in value.items()})  # which wants what is required


@pytest.fixture
def manifest():
    return yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())


def test_the_manifest_fits_its_schema(manifest):
    pytest.importorskip("kubeflow.training")
    assert_fits(manifest, "KubeflowOrgV1PyTorchJob", "manifest")
    manifest["spec"]["elasticPolicy"]["maxRestart"] = 3
    with pytest.raises(AssertionError, match=r"manifest\.spec\.elasticPolicy has no \{'maxRestart'\}"):
        assert_fits(manifest, "KubeflowOrgV1PyTorchJob", "manifest")


@pytest.mark.weekly
def test_the_command_of_the_manifest_goes_on_when_a_process_is_killed(folder, whole, manifest):  # noqa: F811
    [container] = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    policy = manifest["spec"]["elasticPolicy"]
    command = [word.replace("=auto", "=1") for word in container["command"]]
    [program] = container["args"]
    variables = {one["name"]: one["value"] for one in container["env"]}
    started = start_two(
        [*command, f"{program} --model.pause=0.1"], folder, PET_MAX_RESTARTS=str(policy["maxRestarts"]),
        PET_NNODES=f"{policy['minReplicas']}:{policy['maxReplicas']}", **variables,
    )  # fmt: skip
    try:
        os.kill(wait_for_step(folder, 10), signal.SIGKILL)
        assert [one.wait(300) for one in started] == [0, 0], outputs(folder)[-3000:]
    finally:
        end(started)
    assert outputs(folder).count("--ckpt_path auto: going on from ") == 1
    assert_equal_ends(end_of(folder), whole)
