"""The documentation as a site: it builds without a warning, and nothing in it leads nowhere."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

from documents import ROOT, pages

SITE = ROOT / "scripts" / "site" / "mkdocs.yml"


def test_the_site_builds_without_warnings_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", str(SITE)]
    done = subprocess.run(
        [*build, "--site-dir", str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for page in (*pages(), "ARCHITECTURE.md", "CHANGELOG.md"):
        name = "index.md" if page == "README.md" else page.removeprefix("docs/")
        assert (tmp_path / name).with_suffix(".html").is_file(), page
    for path in tmp_path.rglob("*.html"):
        if path.name == "404.html":
            # It is shown in the place of any page, so its links are absolute.
            continue
        for link in re.findall(r'(?:href|src)="?([^"\s>#?]+)', path.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:", link):
                assert (path.parent / unquote(link)).exists(), f"{path.relative_to(tmp_path)}: {link}"
