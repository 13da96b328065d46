"""The Kubernetes manifests: valid objects, whose parts fit together, with commands that `realm` accepts."""

import shlex
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from realm import cli
from realm.settings import read_config
from realm.train.pretrain import PretrainConfig

FOLDER = Path(__file__).parent.parent.parent / "deploy" / "kubernetes"
OBJECTS = {
    f"{file.stem} {one['kind']}": one
    for file in sorted(FOLDER.glob("*.yaml"))
    for one in yaml.safe_load_all(file.read_text())
}
TRAIN, SPLIT = OBJECTS["train Job"]["spec"], OBJECTS["split Job"]["spec"]
SERVE = OBJECTS["serve Deployment"]["spec"]
INDEX = OBJECTS["index RayJob"]["spec"]
RAY_MACHINES: list[dict[str, Any]] = [
    group["template"]["spec"]
    for cluster in (INDEX["rayClusterSpec"], OBJECTS["split RayCluster"]["spec"])
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
]
OTHER_PODS: list[dict[str, Any]] = [one["template"]["spec"] for one in (TRAIN, SPLIT, SERVE)]


def words_of(pod: dict[str, Any]) -> list[str]:
    """The command line of a pod that trains: of the last command, if it runs several in a shell."""
    (container,) = pod["containers"]
    if container["command"] != ["sh", "-c"]:
        return [*container["command"], *container["args"]]
    (script,) = container["args"]
    return shlex.split(script.partition("exec ")[2].replace("\\\n", ""))


@pytest.mark.parametrize("name", [name for name, one in OBJECTS.items() if "ray.io" not in one["apiVersion"]])
def test_every_object_of_kubernetes_itself_is_valid(name: str) -> None:
    kubernetes_validate.validate(OBJECTS[name], kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("machine", RAY_MACHINES)
def test_the_machines_of_the_ray_clusters_are_valid_pods(machine: dict[str, Any]) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": machine}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


def test_every_command_is_accepted_by_the_parser(tmp_path: Path) -> None:
    for part in ("kb", "model"):  # the parser looks a workspace up
        (tmp_path / part).mkdir()
    index = shlex.split(INDEX["entrypoint"])
    train, split = (words_of(job["template"]["spec"]) for job in (TRAIN, SPLIT))
    (served,) = SERVE["template"]["spec"]["containers"]
    assert (index[0], train[0], split[0]) == ("realm", "torchrun", "torchrun")
    trainings = [words[words.index("realm") + 1 :] for words in (train, split)]
    for words in (index[1:], *trainings, served["args"]):
        cli._parser().parse_args([word.replace("/shared/manual", str(tmp_path)) for word in words])


def test_every_machine_that_trains_can_start_builds_on_the_ray_cluster_that_embeds() -> None:
    ((script,),) = (container["args"] for container in SPLIT["template"]["spec"]["containers"])
    assert subprocess.run(["sh", "-n", "-c", script]).returncode == 0
    head = f"{OBJECTS['split RayCluster']['metadata']['name']}-head-svc:6379"  # the name that KubeRay gives
    assert f"ray start --address {head} --num-cpus 0 --num-gpus 0" in script
    words = words_of(SPLIT["template"]["spec"])
    args = cli._parser().parse_args(words[words.index("realm") + 1 :])
    config = read_config(PretrainConfig, args.config, "pretrain", args.set)
    assert (config.refresh.engine, config.refresh.ray_address) == ("ray", head)


@pytest.mark.parametrize("file", ["train", "split"])
def test_machines_that_train_find_each_other(file: str) -> None:
    job, service = OBJECTS[f"{file} Job"], OBJECTS[f"{file} Service"]
    pod, name = job["spec"]["template"]["spec"], job["metadata"]["name"]
    options = dict(word.partition("=")[::2] for word in words_of(pod))
    assert service["spec"]["selector"] == {"job-name": name} and service["spec"]["clusterIP"] == "None"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert options["--rdzv-endpoint"].startswith(f"{name}-0.{service['metadata']['name']}:")
    assert int(options["--nnodes"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(options["--nproc-per-node"]) == pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]


def test_servers_are_found_and_checked_at_their_port() -> None:
    labels = SERVE["template"]["metadata"]["labels"]
    assert OBJECTS["serve Service"]["spec"]["selector"] == SERVE["selector"]["matchLabels"] == labels
    (port,) = OBJECTS["serve Service"]["spec"]["ports"]
    (served,) = SERVE["template"]["spec"]["containers"]
    ports = {
        served[probe]["httpGet"]["port"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert ports == {port["targetPort"], *(one["containerPort"] for one in served["ports"])}


@pytest.mark.parametrize("pod", [*RAY_MACHINES, *OTHER_PODS])
def test_volumes_are_mounted_and_owned_by_the_group_of_the_image(pod: dict[str, Any]) -> None:
    mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    user = next(line for line in (FOLDER.parent / "Containerfile").read_text().splitlines() if "USER" in line)
    assert f"USER 10001:{pod['securityContext']['fsGroup']}" == user
