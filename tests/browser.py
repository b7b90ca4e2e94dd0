"""Opens a page in a real browser (QtWebEngine, a Chromium) without a screen, and says what happened.

    python tests/browser.py PAGE STEPS RESULT [PICTURE]

STEPS is a JSON list of `["script", expression]`, whose value is kept, and of `["hover" | "click", selector]`, with the
mouse.
RESULT gets the values, the requests that left the page, and what its console says.
"""

import json
import sys
from pathlib import Path
from typing import Any

from PySide6.QtCore import QEventLoop, QPoint, Qt, QTimer, QUrl
from PySide6.QtTest import QTest
from PySide6.QtWebEngineCore import QWebEnginePage, QWebEngineProfile, QWebEngineUrlRequestInterceptor
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication

_PATIENCE_MS = 30_000
_CENTER = """(selector => {
  const element = document.querySelector(selector);
  element.scrollIntoView({block: "center", behavior: "instant"});
  const box = element.getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2];
})"""


class Requests(QWebEngineUrlRequestInterceptor):
    """Notes each request and blocks those that leave this machine."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def interceptRequest(self, info: Any) -> None:
        self.urls.append(info.requestUrl().toString())
        info.block(info.requestUrl().scheme() not in {"file", "data"})


class Page(QWebEnginePage):
    """A page whose console is kept."""

    def __init__(self, profile: QWebEngineProfile) -> None:
        super().__init__(profile)
        self.console: list[str] = []

    def javaScriptConsoleMessage(self, level: Any, message: str, line: int, source: str) -> None:
        self.console.append(f"{level.name} {line}: {message}")


class Browser:
    """One page in a window."""

    def __init__(self) -> None:
        # A profile without a name keeps nothing.
        self.profile, self.requests = QWebEngineProfile(), Requests()
        self.profile.setUrlRequestInterceptor(self.requests)
        self.page, self.view = Page(self.profile), QWebEngineView()
        self.view.setPage(self.page)
        self.view.resize(1100, 900)
        self.view.show()

    def open(self, path: Path) -> bool:
        return bool(self._wait(self.page.loadFinished.connect, lambda: self.view.load(QUrl.fromLocalFile(str(path)))))

    def script(self, code: str) -> Any:
        text = self._wait(lambda done: self.page.runJavaScript(f"JSON.stringify({code})", done))
        return json.loads(text) if text else None

    def point(self, kind: str, selector: str) -> None:
        x, y = self.script(f"{_CENTER}({json.dumps(selector)})")
        target, position = self.view.focusProxy(), QPoint(round(x), round(y))
        QTest.mouseMove(target, position + QPoint(1, 1))
        QTest.mouseMove(target, position)
        if kind == "click":
            QTest.mouseClick(target, Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier, position)
        QTest.qWait(300)

    @staticmethod
    def _wait(begin: Any, then: Any = lambda: None) -> Any:
        loop, values = QEventLoop(), []

        def done(value: Any = None) -> None:
            values.append(value)
            loop.quit()

        begin(done)
        then()
        QTimer.singleShot(_PATIENCE_MS, loop.quit)
        if not values:
            loop.exec()
        return values[0]


def main(page: str, steps: str, result: str, picture: str = "") -> None:
    application = QApplication(["browser"])
    browser = Browser()
    loaded, values = browser.open(Path(page).resolve()), []
    for kind, argument in json.loads(Path(steps).read_text(encoding="utf-8")):
        if kind == "script":
            values.append(browser.script(argument))
        else:
            browser.point(kind, argument)
    if picture:
        height = int(browser.script("(window.scrollTo(0, 0), document.documentElement.scrollHeight)"))
        browser.view.resize(1100, min(height, 4000))
        QTest.qWait(800)
        browser.view.grab().save(picture)
    facts = {"loaded": loaded, "values": values, "requests": browser.requests.urls, "console": browser.page.console}
    Path(result).write_text(json.dumps(facts), encoding="utf-8")
    browser.view.setPage(None)
    del browser.page
    application.quit()


if __name__ == "__main__":
    main(*sys.argv[1:])
