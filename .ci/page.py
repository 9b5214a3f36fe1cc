"""The page at /, in a headless Chromium, against the real server: `python .ci/page.py`.

A chat of two turns by keyboard, with the origins of its tokens; twenty requests seen running; stop;
a key; the recorded session of docs/replay, played and searched; no request to any other host, and
no error in the console. Needs playwright and Chromium (apt-get install chromium).
"""

import http.client
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from checks import require
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parent.parent
REPLAY = ROOT / "docs" / "replay" / "index.html"
PATIENCE = 60.0  # seconds
# Stop is clicked when the answer has begun.
STOP_EARLY = """
new MutationObserver((changes, observer) => {
  if (document.querySelector(".assistant .said span")) {
    observer.disconnect();
    document.getElementById("stop").click();
  }
}).observe(document.getElementById("log"), {childList: true, subtree: true});
"""


# ---- The server


class Server:
    """serve.py with the pair of models that is in the repository, on a port that is free."""

    def __init__(self, *flags: str):
        command = [sys.executable, "serve.py", "--device", "cpu", "--draft", "tiny-draft"]
        self.process = subprocess.Popen(
            [*command, "--port", "0", *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for line in self.process.stderr:
            found = re.search(r"http://(127\.0\.0\.1:\d+)/", line)
            if found:
                self.host = found[1]
                return
        require(False, "serve.py begins")

    def complete(self, prompt: str) -> None:
        connection = http.client.HTTPConnection(self.host)
        body = {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "temperature": 0.8}
        connection.request("POST", "/v1/completions", json.dumps(body))
        connection.getresponse().read()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE)


# ---- The checks


def wait(page: Page, expression: str) -> None:
    """Until it is true. (The page's policy forbids the `eval` of playwright's own.)"""
    for _ in range(int(20 * PATIENCE)):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    require(False, f"within {PATIENCE:.0f} s: {expression}")


def letters(pieces: list[list[str]]) -> list[tuple[str, str]]:
    """(character, origin) of each character that can be seen."""
    return [(c, origin) for text, origin in pieces for c in text if not c.isspace()]


def sent_pieces(stream: str) -> list[list[str]]:
    """All `origins` of a recorded stream."""
    pieces = []
    for line in stream.split("\n"):
        if line.startswith("data: {"):
            pieces += json.loads(line[6:]).get("origins", [])
    return pieces


def shown_pieces(page: Page, answers: str) -> list[list[str]]:
    """[text, class] of each piece of these answers."""
    words = "(spans) => spans.map((span) => [span.textContent, span.className])"
    return page.locator(f"{answers} > span").evaluate_all(words)


def check_chat(page: Page) -> None:
    """Two turns by keyboard; what is shown is what was sent, each piece with its class."""
    page.evaluate("document.getElementById('max-tokens').value = 60")
    for turn, text in enumerate(("Once upon a time", "One day Tom"), 1):
        page.focus("#prompt")
        page.keyboard.insert_text(text)
        with page.expect_response("**/chat/completions") as answer:
            page.keyboard.press("Enter")
        sent = sent_pieces(answer.value.text())
        wait(page, "document.getElementById('stop').disabled")
        shown = shown_pieces(page, ".assistant:last-child .said")
        require(
            bool(shown) and letters(shown) == letters(sent),
            f"turn {turn}: {len(shown)} pieces have the origins that the server sent",
        )
    require(page.evaluate("messages.length") == 4, "the second turn was sent with the first")


def check_batch(page: Page, server: Server) -> None:
    """Twenty requests run while the page looks: sixteen places, a queue, and blocks of both."""
    prompts = [f"Once upon a time there was a little girl with {n} cats" for n in range(20)]
    requests = [Thread(target=server.complete, args=[prompt]) for prompt in prompts]
    for request in requests:
        request.start()
    wait(page, "picture.running === 16 && picture.waiting === 4")
    wait(page, "document.querySelectorAll('#texts tr').length === 20")
    states = page.evaluate(
        "[...new Set([...document.querySelectorAll('#texts .state')].map((s) => s.textContent))]"
    )
    require("writing" in states and "waiting" in states, f"20 requests are seen: {states}")
    for request in requests:
        request.join()
    wait(page, "picture.running === 0 && document.querySelectorAll('#texts tr').length === 0")


def check_stop(page: Page) -> None:
    """Texts that are stopped, in the chat or beside it, leave the batch."""
    fill = "document.getElementById('fill').click()"
    page.evaluate(fill)
    wait(page, "picture.running >= 10 && picture.cache.counts.shared > 0")
    page.evaluate(fill)
    wait(page, "picture.running === 0 && filling === null")
    page.evaluate("document.getElementById('new').click()")
    page.evaluate(STOP_EARLY)
    page.evaluate("void send('Once upon a time')")
    wait(page, "document.getElementById('log').textContent.includes('stopped')")
    wait(page, "picture.running === 0")
    require(True, "texts that are stopped leave the batch")


class Watched:
    """What a page asks for, and the errors in its console."""

    def __init__(self, page: Page):
        self.addresses: list[str] = []
        self.errors: list[str] = []
        page.on("request", lambda request: self.addresses.append(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self.hear)

    def hear(self, message) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def check(self, address: str) -> None:
        known = (address, "data:", "about:")
        others = {address for address in self.addresses if not address.startswith(known)}
        require(not others, f"no request to any other host {sorted(others)}")
        require(not self.errors, f"no error in the console {self.errors}")


def check_key(page: Page) -> None:
    """A server with a key: the page asks for it once, and sends it."""
    server = Server("--api-key", "sesame")
    try:
        watched = Watched(page)
        page.goto(f"http://{server.host}/")
        wait(page, "document.getElementById('key-dialog').open")
        page.keyboard.insert_text("sesame")
        page.keyboard.press("Enter")
        ready = "picture !== null && !document.getElementById('key-dialog').open"
        wait(page, ready)
        watched.errors = [error for error in watched.errors if "401" not in error]
        watched.check(f"http://{server.host}/")
        require(True, "the page asks for the key, and sends it")
    finally:
        server.close()


def check_replay(page: Page) -> None:
    """The recording, opened as a file, plays by itself. The slider goes to its end and back, and
    the page shows what was sent by then."""
    watched = Watched(page)
    page.goto(REPLAY.as_uri())
    wait(page, "shown > 0.2 && playing")
    page.focus("#play")
    page.keyboard.press("Space")
    page.focus("#time")
    for key in ("End", "PageDown", "PageDown", "Home"):
        page.keyboard.press(key)
        sent = page.evaluate("recording.events.filter(([at]) => at <= shown)")
        pieces = [piece for _, kind, data in sent if kind == "chunk" for piece in data["origins"]]
        rows = [data["requests"] for _, kind, data in sent if kind == "picture"][-1]
        told = (letters(shown_pieces(page, ".assistant .said")), page.locator("#texts tr").count())
        require(
            told == (letters(pieces), len(rows)), f"{len(sent)} events of the session are shown"
        )
    require(page.evaluate("!playing && shown === 0"), "it stops, and goes back")
    watched.check(REPLAY.parent.as_uri())


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        path = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def main() -> None:
    server = Server()
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1440, "height": 1040})
        page.set_default_timeout(1e3 * PATIENCE)
        watched = Watched(page)
        try:
            page.goto(f"http://{server.host}/")
            wait(page, "picture !== null")
            check_chat(page)
            check_batch(page, server)
            check_stop(page)
            watched.check(f"http://{server.host}/")
        finally:
            server.close()
        check_key(browser.new_page())
        check_replay(browser.new_page())


if __name__ == "__main__":
    main()
