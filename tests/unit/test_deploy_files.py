"""scripts/deploy/: metrics that exist, and files that their own tools accept."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from torchserve_openvino.cli import app

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "scripts" / "deploy"
# Sent by hosts other than TorchServe, whose queue is in its frontend.
BY_HOSTS = {"openvino_waiting_requests"}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", ["alerts.yaml", "grafana.json", "scaling.yaml"])
def test_metrics_are_sent(name: str) -> None:
    sent = set(re.findall(r"openvino_\w+", (ROOT / "model-config" / "metrics.yaml").read_text(encoding="utf-8")))
    named = set(re.findall(r"openvino_\w+", (DEPLOY / name).read_text(encoding="utf-8")))
    assert named and named - sent - BY_HOSTS == set()


def test_alerts_pass_promtool() -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed (Debian's package prometheus)")
    done = subprocess.run(
        [promtool, "check", "rules", DEPLOY / "alerts.yaml"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0 and "8 rules found" in done.stdout, done.stdout + done.stderr


def test_the_dashboard_is_one_of_grafana_s_models() -> None:
    dashboard = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="grafana-foundation-sdk")
    data = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
    read = dashboard.Dashboard.from_json(data)
    assert read.title == "torchserve-openvino" and len(read.panels) == len(data["panels"])
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in data["panels"]]
    assert len(set(places)) == len(places)


def test_kserve_reads_the_runtime_and_the_service() -> None:
    kserve = pytest.importorskip("kserve", reason="needs the extra kserve")
    (service,), (runtime,) = documents("inference-service.yaml"), documents("serving-runtime.yaml")
    # Unknown keys are errors: each model lists its own.
    for kind, value in ((kserve.V1beta1InferenceService, service), (kserve.V1alpha1ServingRuntime, runtime)):
        read(kserve, kind, value)
    assert service["spec"]["predictor"]["model"]["runtime"] == runtime["metadata"]["name"]
    formats = [each["name"] for each in runtime["spec"]["supportedModelFormats"]]
    assert service["spec"]["predictor"]["model"]["modelFormat"]["name"] in formats


def read(kserve: Any, kind: Any, value: Any) -> None:
    """Checks keys and kinds of values by KServe's own generated models, all the way down."""
    names = {api: name for name, api in kind.attribute_map.items()}
    assert value.keys() <= names.keys(), f"{kind.__name__}: {value.keys() - names.keys()}"
    for key, inner in value.items():
        model = re.sub(r"list\[(.*)\]", r"\1", kind.openapi_types[names[key]])
        if hasattr(kserve, model):
            for each in inner if isinstance(inner, list) else [inner]:
                read(kserve, getattr(kserve, model), each)


def test_the_container_has_no_rights() -> None:
    (runtime,) = documents("serving-runtime.yaml")
    (container,) = runtime["spec"]["containers"]
    security = container["securityContext"]
    assert security["runAsNonRoot"] and security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
    written = {each["mountPath"] for each in container["volumeMounts"]}
    recipe = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert set(json.loads(re.search(r"^VOLUME (.*)$", recipe, re.MULTILINE)[1])) == written
    assert re.search(r"^USER [1-9]\d+$", recipe, re.MULTILINE) and recipe.count("FROM ${BASE}") == 1


def test_scaling_follows_the_service() -> None:
    scaled, budget = documents("scaling.yaml")
    (service,) = documents("inference-service.yaml")
    name = service["metadata"]["name"]
    assert scaled["spec"]["scaleTargetRef"]["name"] == f"{name}-predictor"
    assert budget["spec"]["selector"]["matchLabels"]["serving.kserve.io/inferenceservice"] == name
    predictor = service["spec"]["predictor"]
    assert scaled["spec"]["minReplicaCount"] == predictor["minReplicas"] > budget["spec"]["minAvailable"]
    assert scaled["spec"]["maxReplicaCount"] == predictor["maxReplicas"]


def test_probes_and_health_checks_call_ready() -> None:
    (probes,) = documents("probes.yaml")
    calls = [each["exec"]["command"] for each in probes.values() if "exec" in each]
    recipe = (DEPLOY / "Dockerfile.serve").read_text(encoding="utf-8")
    calls.append(json.loads(re.search(r"^HEALTHCHECK .* CMD (.*)$", recipe, re.MULTILINE)[1]))
    assert len(calls) == 3
    for program, *arguments in calls:
        # The options exist, and nothing answers here.
        done = CliRunner().invoke(
            app, [*arguments, "--url", "http://127.0.0.1:9", "--management", "http://127.0.0.1:9"]
        )
        assert program == "torchserve-openvino" and done.exit_code == 1
        assert "no server answers at http://127.0.0.1:9" in done.output, done.output
