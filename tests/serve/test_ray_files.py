"""docker/ray/: the configurations of Ray Serve, of a cluster and of KubeRay name options and modules that exist."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from sdonnx.serve.ray_proxy import CALLBACK_VARIABLE, RayOptions, middlewares

yaml: Any = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "docker" / "ray"
CALLBACK = f"{middlewares.__module__}.{middlewares.__name__}"


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def serve_configs() -> dict[str, Any]:
    """Return the configurations of Ray Serve."""
    service = read("rayservice.yaml")
    return {"serve.yaml": read("serve.yaml"), "rayservice.yaml": yaml.safe_load(service["spec"]["serveConfigV2"])}


@pytest.mark.parametrize("name", serve_configs())
def test_options_of_the_application_exist(name: str) -> None:
    (application,) = serve_configs()[name]["applications"]
    module, _, function = application["import_path"].partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert f"\ndef {function}(" in Path(spec.origin).read_text(encoding="utf-8")
    options = RayOptions.read(application["args"])
    assert options.gpus_per_replica == 1


def test_every_node_has_the_middleware() -> None:
    cluster = read("cluster.yaml")
    for commands in (cluster["head_start_ray_commands"], cluster["worker_start_ray_commands"]):
        assert f"{CALLBACK_VARIABLE}={CALLBACK}" in commands[-1]
    config = read("rayservice.yaml")["spec"]["rayClusterConfig"]
    for group in (config["headGroupSpec"], *config["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        assert {"name": CALLBACK_VARIABLE, "value": CALLBACK} in container["env"]


def test_version_of_ray_is_the_pinned_one() -> None:
    pins = (ROOT / "requirements-ray.txt").read_text(encoding="utf-8").splitlines()
    assert f"ray=={read('rayservice.yaml')['spec']['rayClusterConfig']['rayVersion']}" in pins


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own models of pydantic
def test_files_follow_the_schemas_of_ray() -> None:
    pytest.importorskip("ray")
    import jsonschema
    from ray import autoscaler
    from ray.serve.schema import ServeDeploySchema

    for config in serve_configs().values():
        ServeDeploySchema.model_validate(config)
    schema = json.loads((Path(autoscaler.__file__).parent / "ray-schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(read("cluster.yaml"), schema)
