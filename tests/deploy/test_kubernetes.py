"""The Kubernetes manifests: valid objects, whose parts fit together, with commands that `realm` accepts."""

import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from realm import cli

FOLDER = Path(__file__).parent.parent.parent / "deploy" / "kubernetes"
OBJECTS = {
    f"{file.stem} {one['kind']}": one
    for file in sorted(FOLDER.glob("*.yaml"))
    for one in yaml.safe_load_all(file.read_text())
}
TRAIN, SERVE = OBJECTS["train Job"]["spec"], OBJECTS["serve Deployment"]["spec"]


@pytest.mark.parametrize("name", [name for name, one in OBJECTS.items() if "ray.io" not in one["apiVersion"]])
def test_every_object_of_kubernetes_itself_is_valid(name: str) -> None:
    kubernetes_validate.validate(OBJECTS[name], kubernetes_validate.latest_version(), strict=True)


def test_the_machines_of_the_ray_cluster_are_valid_pods() -> None:
    cluster = OBJECTS["index RayJob"]["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, **group["template"]}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


def test_every_command_is_accepted_by_the_parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("kb", "model"):  # the parser looks a workspace up
        (tmp_path / part).mkdir()
    index = shlex.split(OBJECTS["index RayJob"]["spec"]["entrypoint"])
    (trained,) = TRAIN["template"]["spec"]["containers"]
    (served,) = SERVE["template"]["spec"]["containers"]
    train = [*trained["command"], *trained["args"]]
    assert index[0] == "realm" and train[0] == "torchrun"
    for words in (index[1:], train[train.index("realm") + 1 :], served["args"]):
        cli._parser().parse_args([word.replace("/shared/manual", str(tmp_path)) for word in words])


def test_pods_find_each_other_and_their_volumes() -> None:
    service = OBJECTS["train Service"]
    (trained,) = TRAIN["template"]["spec"]["containers"]
    options = dict(word.partition("=")[::2] for word in (*trained["command"], *trained["args"]))
    name = OBJECTS["train Job"]["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name} and service["spec"]["clusterIP"] == "None"
    assert TRAIN["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert options["--rdzv-endpoint"].startswith(f"{name}-0.{service['metadata']['name']}:")
    assert int(options["--nnodes"]) == TRAIN["completions"] == TRAIN["parallelism"]
    assert int(options["--nproc-per-node"]) == trained["resources"]["limits"]["nvidia.com/gpu"]
    labels = SERVE["template"]["metadata"]["labels"]
    assert OBJECTS["serve Service"]["spec"]["selector"] == SERVE["selector"]["matchLabels"] == labels
    (port,) = OBJECTS["serve Service"]["spec"]["ports"]
    (served,) = SERVE["template"]["spec"]["containers"]
    ports = {
        served[probe]["httpGet"]["port"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert ports == {port["targetPort"], *(one["containerPort"] for one in served["ports"])}
    for pod in (TRAIN["template"]["spec"], SERVE["template"]["spec"]):
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_image_runs_realm_as_the_group_that_owns_the_volumes() -> None:
    pods: list[dict[str, Any]] = [TRAIN["template"]["spec"], SERVE["template"]["spec"]]
    cluster = OBJECTS["index RayJob"]["spec"]["rayClusterSpec"]
    pods += [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    user = next(line for line in (FOLDER.parent / "Containerfile").read_text().splitlines() if "USER" in line)
    assert {f"USER 10001:{pod['securityContext']['fsGroup']}" for pod in pods} == {user}
