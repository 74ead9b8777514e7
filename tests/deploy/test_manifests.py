"""Manifests of Kubernetes and SkyPilot: typed by kubectl without a cluster, and every command a valid config."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gspo.config import load

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
RAY_JOB = {
    *("entrypoint", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "backoffLimit", "rayClusterSpec"),
    *("submissionMode", "runtimeEnvYAML", "activeDeadlineSeconds", "suspend"),
}
RAY_CLUSTER = {"rayVersion", "headGroupSpec", "workerGroupSpecs", "enableInTreeAutoscaling", "autoscalerOptions"}
RAY_GROUP = {"rayStartParams", "template", "groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts"}
SKY = {"name", "resources", "workdir", "envs", "file_mounts", "setup", "run", "num_nodes"}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


def ray_groups() -> list[dict[str, Any]]:
    spec = documents("rayjob.yaml")[0]["spec"]["rayClusterSpec"]
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def pod(group: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": group["template"]["spec"]}


def typed(document: dict[str, Any]) -> dict[str, Any]:
    """The document as kubectl's own types have it: a field that a type does not know is gone.

    Setting an image makes kubectl read and write a document without a cluster.
    """
    words = ["kubectl", "set", "image", "--local", "-f", "-", "-o", "json", "*=gspo:other"]
    done = subprocess.run(words, input=json.dumps(document), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.replace("gspo:other", "gspo:cuda"))


def missing(wanted: Any, found: Any, path: str = "") -> list[str]:
    """Where `found` lacks something of `wanted`. A quantity may be written as a number or as a text."""
    if isinstance(wanted, dict):
        gone = [f"{path}.{key}" for key in wanted if key not in (found or {})]
        return gone + [
            m for key in wanted if key in (found or {}) for m in missing(wanted[key], found[key], f"{path}.{key}")
        ]
    if isinstance(wanted, list):
        pairs = zip(wanted, found if isinstance(found, list) else [None] * len(wanted))
        return [m for i, (w, f) in enumerate(pairs) for m in missing(w, f, f"{path}[{i}]")]
    return [] if str(wanted) == str(found) else [path]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
@pytest.mark.parametrize("name", ["job", "head", "worker"])
def test_kubectl_knows_every_field(name: str) -> None:
    document = {"job": documents("job.yaml")[1], "head": pod(ray_groups()[0]), "worker": pod(ray_groups()[1])}[name]
    assert missing(document, typed(document)) == []


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_a_misspelt_field_is_noticed() -> None:
    document = documents("job.yaml")[1]
    document["spec"]["template"]["spec"]["restartPolcy"] = "Never"
    assert missing(document, typed(document)) == [".spec.template.spec.restartPolcy"]


def test_a_ray_job_has_the_fields_of_kuberay() -> None:
    (job,) = documents("rayjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert set(job["spec"]) <= RAY_JOB and set(job["spec"]["rayClusterSpec"]) <= RAY_CLUSTER
    assert all(set(group) <= RAY_GROUP for group in ray_groups())
    assert all(isinstance(v, str) for group in ray_groups() for v in group["rayStartParams"].values())
    locked = next(line for line in (ROOT / "requirements.lock").read_text().splitlines() if line.startswith("ray=="))
    assert job["spec"]["rayClusterSpec"]["rayVersion"] == locked.removeprefix("ray==").split()[0]
    nodes = sum(group.get("replicas", 0) for group in ray_groups())
    assert f"trainer.nnodes={nodes} " in job["spec"]["entrypoint"]


def test_volumes_that_are_mounted_exist() -> None:
    claim, job = documents("job.yaml")
    specs = [job["spec"]["template"]["spec"], *(group["template"]["spec"] for group in ray_groups())]
    for spec in specs:
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert {m["name"] for c in spec["containers"] for m in c["volumeMounts"]} == set(volumes)
        assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_every_command_is_a_config_that_gspo_accepts() -> None:
    sky = yaml.safe_load((ROOT / "deploy" / "skypilot.yaml").read_text())
    job = documents("job.yaml")[1]["spec"]["template"]["spec"]["containers"][0]["args"]
    entry = shlex.split(documents("rayjob.yaml")[0]["spec"]["entrypoint"])
    run = next(shlex.split(line) for line in sky["run"].splitlines() if "gspo train" in line)
    for words in (["gspo", *job], entry, run):
        assert Path(words[0]).name == "gspo" and words[1] == "train"
        load(None, words[3:])  # words[2] is the config file


def test_the_sky_file_has_known_sections_and_shell_that_parses() -> None:
    sky = yaml.safe_load((ROOT / "deploy" / "skypilot.yaml").read_text())
    assert set(sky) <= SKY
    for section in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=sky[section], text=True, check=True)
    assert "$CONFIG" in sky["run"] and "CONFIG" in sky["envs"]
