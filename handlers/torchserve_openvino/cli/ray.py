"""`torchserve-openvino ray deploy|config`."""

import importlib.util
import json
import os
import signal
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchserve_openvino.cli.console import fail, steps
from torchserve_openvino.errors import TorchServeOpenVINOError

if TYPE_CHECKING:
    from torchserve_openvino.hosts.ray import AppArgs

BUILDER = "torchserve_openvino.hosts.ray:app"
# Ray's switch for HAProxy in the place of its own proxy, and the one for less work beside each request.
HAPROXY, OPTIMIZED = "RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_THROUGHPUT_OPTIMIZED"
# Seconds between two looks of Ray's controller at all replicas. With Ray's 0.1 it takes 3 % of a core from the models.
CONTROL_LOOP, CONTROL_SECONDS = "RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.5"

# Whether nodes of one cluster talk to each other; if not, all of Ray's processes listen on loopback only.
MORE_NODES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
# Where Ray notes the cluster that `ray start` started on this machine, which `ray.init` joins by itself.
_CURRENT_CLUSTER = Path(tempfile.gettempdir()) / "ray" / "ray_current_cluster"
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}

ray = typer.Typer(help="Serve archives on Ray Serve.", no_args_is_help=True)

Archives = Annotated[list[Path], typer.Argument(help="The .mar files; each model is at /predictions/NAME.")]
Replicas = Annotated[int, typer.Option(min=1, help="Replicas of each model.")]
MaxReplicas = Annotated[int | None, typer.Option(min=1, help="Scale up to so many by ongoing requests.")]
Cpus = Annotated[float, typer.Option(min=0.1, help="CPUs of each replica, which sets its threads.")]
Name = Annotated[str, typer.Option(help="Name of the application.")]


def _args(archives: list[Path], replicas: int, max_replicas: int | None, cpus: float) -> "AppArgs":
    if importlib.util.find_spec("ray") is None:
        fail("Ray is not installed: pip install 'torchserve-openvino[ray]'")
    # Imported here: the other commands do not need Ray.
    from torchserve_openvino.hosts.model_settings import ModelSettings
    from torchserve_openvino.hosts.ray import AppArgs

    for archive in archives:
        ModelSettings.of(archive)
    paths = [str(archive.resolve()) for archive in archives]
    return AppArgs(archives=paths, cpus=cpus, replicas=replicas, max_replicas=max_replicas)


@ray.command()
def deploy(
    archives: Archives,
    replicas: Replicas = 1,
    max_replicas: MaxReplicas = None,
    cpus: Cpus = 1,
    name: Name = "models",
    address: Annotated[str | None, typer.Option(help="The cluster; else RAY_ADDRESS, or a new local one.")] = None,
    host: Annotated[
        str, typer.Option(help="Address that a new local one listens on; with loopback, Ray's own ports do, too.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of a new local one.")] = 8000,
    haproxy: Annotated[
        bool,
        typer.Option(
            "--haproxy",
            help="A new local one that answers through HAProxy, not through Ray's proxy in Python: 1.4 times as many "
            "requests/s. HAProxy also shows its statistics (ports 8404 and 9101), on all network interfaces.",
        ),
    ] = False,
    detach: Annotated[bool, typer.Option(help="Return once all are READY; a local cluster then ends.")] = False,
) -> None:
    """Serves archives, or updates an application that runs: its replicas are replaced one by one.

    Examples:

      torchserve-openvino ray deploy net.mar --replicas 2 --cpus 2

      torchserve-openvino ray deploy net.mar --haproxy

      torchserve-openvino ray deploy a.mar b.mar --max-replicas 8 --address auto --detach
    """
    if haproxy:
        if address:
            fail(f"--haproxy is for a new cluster. Before `ray start`, set {HAPROXY}=1 and {OPTIMIZED}=1 on each node")
        # Ray reads them when it is imported, and the processes that it starts inherit them.
        os.environ |= {HAPROXY: "1", OPTIMIZED: "1"}
        os.environ.setdefault(CONTROL_LOOP, CONTROL_SECONDS)
        address = "local"
    if host in _LOOPBACK and not address and "RAY_ADDRESS" not in os.environ and not _CURRENT_CLUSTER.exists():
        address = "local"
    is_own = address == "local" or not (address or "RAY_ADDRESS" in os.environ or _CURRENT_CLUSTER.exists())
    if host in _LOOPBACK and address == "local":
        os.environ.setdefault(MORE_NODES, "0")
    try:
        args = _args(archives, replicas, max_replicas, cpus)
    except TorchServeOpenVINOError as error:
        fail(str(error))
    # Imported here: the other commands do not need Ray.
    import ray as cluster
    from ray import serve

    from torchserve_openvino.hosts.ray import app

    with steps(lambda text: typer.echo(text, err=True)) as step:
        step("connecting to Ray")
        try:
            cluster.init(address=address, log_to_driver=False, logging_level="warning", include_dashboard=False)
            serve.start(http_options={"host": host, "port": port})
        except (ConnectionError, RuntimeError, ValueError) as error:
            fail(f"Ray Serve does not start: {error}")
        step("loading and verifying on each replica")
        try:
            serve.run(app(args), name=name, route_prefix="/")
        except RuntimeError as error:
            fail(f"{error}\n`serve status` and Ray's logs say why a replica did not start.")
    where = f"http://{host}:{port}" if is_own else "the cluster's address for HTTP"
    typer.echo(f"READY: {', '.join(path.stem for path in archives)} on {where}/predictions/NAME")
    if not detach:
        _wait_for_the_end()
        serve.shutdown()
    cluster.shutdown()


def _wait_for_the_end() -> None:
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    typer.echo("Ctrl-C ends it.", err=True)
    ended.wait()


@ray.command()
def config(
    archives: Archives,
    replicas: Replicas = 1,
    max_replicas: MaxReplicas = None,
    cpus: Cpus = 1,
    name: Name = "models",
) -> None:
    """Prints a config file for Ray's own `serve deploy` and `serve run`.

    Example:

      torchserve-openvino ray config net.mar --replicas 2 > serve.yaml && serve run serve.yaml
    """
    try:
        args = _args(archives, replicas, max_replicas, cpus)
    except TorchServeOpenVINOError as error:
        fail(str(error))
    application: dict[str, Any] = {
        "name": name, "route_prefix": "/", "import_path": BUILDER, "args": args.model_dump(exclude_defaults=True)
    }  # fmt: skip
    # JSON is YAML, and Ray reads it as such.
    typer.echo(json.dumps({"applications": [application]}, indent=2))
