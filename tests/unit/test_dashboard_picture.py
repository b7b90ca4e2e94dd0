"""`scripts/dashboard_picture.py`: the panels of Grafana's dashboard, from Prometheus, as a picture."""

import http.server
import json
import shutil
import threading
import time
from pathlib import Path

import pytest
from PIL import Image

import dashboard_picture

SHOWN = json.loads(dashboard_picture.DASHBOARD.read_text(encoding="utf-8"))


def test_all_panels_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra bench")
    found = [{"a": ([0.0, 2.0], [0.0, 1.0]), "b": ([0.0, 2.0], [0.0, 0.0])} for _ in SHOWN["panels"]]
    found[1], found[5] = {}, {}
    dashboard_picture.draw(SHOWN, found, tmp_path / "dashboard.png")
    with Image.open(tmp_path / "dashboard.png") as picture:
        assert picture.width > 1000 and len(picture.convert("RGB").getcolors(1 << 24) or []) > 20


class Metrics(http.server.BaseHTTPRequestHandler):
    """Answers with metrics, as a server of models does."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"openvino_coverage_ratio 0.75\nopenvino_waiting_requests 3\n")

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.mark.slow
def test_prometheus_is_asked_what_the_panels_ask() -> None:
    if (program := shutil.which("prometheus")) is None:
        pytest.skip("Prometheus is not installed (Debian's package prometheus)")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metrics) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        target = f"127.0.0.1:{server.server_address[1]}"
        with dashboard_picture.prometheus(program, target, "/metrics", "net") as url:
            panels = {panel["title"]: panel for panel in SHOWN["panels"]}
            start = time.time() - 10
            asked = [
                dashboard_picture.query_range(url, panels[title], "net", start, start + 10)
                for title in ("Coverage", "Waiting requests", "Requests")
            ]
        server.shutdown()
    assert [{name: values[-1] for name, (_, values) in each.items()} for each in asked] == [
        {"net": 0.75}, {"net": 3.0}, {}
    ]  # fmt: skip


@pytest.mark.slow
def test_a_server_that_cannot_be_read() -> None:
    if (program := shutil.which("prometheus")) is None:
        pytest.skip("Prometheus is not installed (Debian's package prometheus)")
    with (
        pytest.raises(SystemExit, match="cannot read 127.0.0.1:9/metrics"),
        dashboard_picture.prometheus(program, "127.0.0.1:9", "/metrics", "net", patience=3),
    ):
        pass
