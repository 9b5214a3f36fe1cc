"""The page at /, in a headless Chromium, against the real server: `python .ci/page.py [FOLDER]`.

A chat of two turns by keyboard, colours of origins, twenty requests seen running, the map of
blocks, stop, a key, contrast in both colour schemes, narrow windows; no other host, no error in the
console.
FOLDER: where screenshots go. Without Chromium nothing is checked, and a line says so.

Chromium is driven by the DevTools protocol over two pipes (--remote-debugging-pipe): messages are
JSON, each followed by a zero byte. https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import http.client
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any

from checks import require

ROOT = Path(__file__).parent.parent
PATIENCE = 60.0  # seconds
ORIGINS = ("accepted", "corrected", "bonus", "plain")
# What the server sends is recorded before the page reads it.
RECORD = """
window.recorded = [];
const original = window.fetch;
window.fetch = async (...request) => {
  const response = await original(...request);
  if (!String(request[0]).endsWith("chat/completions")) return response;
  const [mine, theirs] = response.body.tee();
  new Response(mine).text().then((text) => window.recorded.push(text), () => {});
  return new Response(theirs, response);
};
"""
# Stop is clicked when the answer has begun.
STOP_EARLY = """
new MutationObserver((changes, observer) => {
  if (document.querySelector(".assistant .said span")) {
    observer.disconnect();
    document.getElementById("stop").click();
  }
}).observe(document.getElementById("log"), {childList: true, subtree: true});
"""


# ---- The browser


class Browser:
    """One page of a headless Chromium."""

    def __init__(self, program: str):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.ids = count(1)
        self.buffer = b""
        self.events: list[dict[str, Any]] = []
        commands, self.writer = os.pipe()
        self.reader, replies = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        flags += ["--hide-scrollbars", "--disable-background-networking"]
        flags += [f"--user-data-dir={self.profile.name}"]
        # Chromium reads from its file 3 and writes to its file 4.
        places = f'exec "$@" 3<&{commands} 4>&{replies}'
        self.process = subprocess.Popen(
            ["bash", "-c", places, "bash", program, "--remote-debugging-pipe", *flags],
            pass_fds=(commands, replies),
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(replies)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.do(f"{domain}.enable")
        self.do("Page.addScriptToEvaluateOnNewDocument", source=RECORD)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._send({"method": method, "params": params})

    def do(self, method: str, **params: Any) -> dict[str, Any]:
        """A command for the page."""
        return self._send({"method": method, "params": params, "sessionId": self.session})

    def _send(self, message: dict[str, Any]) -> dict[str, Any]:
        message["id"] = next(self.ids)
        os.write(self.writer, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._read()
            if reply.get("id") == message["id"]:
                if "error" in reply:
                    raise RuntimeError(f"{message['method']}: {reply['error']}")
                return reply["result"]
            if "method" in reply:
                self.events.append(reply)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            if not select.select([self.reader], [], [], PATIENCE)[0]:
                raise TimeoutError("Chromium does not answer")
            part = os.read(self.reader, 1 << 20)
            if not part:
                raise EOFError("Chromium has ended")
            self.buffer += part
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def evaluate(self, expression: str) -> Any:
        reply = self.do(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in reply:
            raise RuntimeError(f"{expression}: {reply['exceptionDetails']}")
        return reply["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Until it is true."""
        return wait_for(lambda: self.evaluate(expression), expression)

    def press(self, key: str, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            code = {"Enter": 13, "Tab": 9}.get(key, 0)
            self.do(
                "Input.dispatchKeyEvent", type=kind, key=key, text=text, windowsVirtualKeyCode=code
            )

    def open(self, address: str) -> None:
        self.do("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && Boolean(document.getElementById('log'))")

    def show(self, width: int, height: int, scheme: str) -> None:
        self.do(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.do("Emulation.setEmulatedMedia", features=[feature])
        time.sleep(0.5)  # several pictures of the batch

    def close(self) -> None:
        self.call("Browser.close")
        self.process.wait(PATIENCE)


def wait_for(holds: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        found = holds()
        if found:
            return found
        time.sleep(0.05)
    require(False, f"within {PATIENCE:.0f} s: {what}")


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


def check_chat(browser: Browser) -> None:
    """Two turns by keyboard; what is shown is what was sent, each piece with its class."""
    browser.evaluate("document.getElementById('max-tokens').value = 60")
    for turn, text in enumerate(("Once upon a time", "One day Tom"), 1):
        browser.evaluate("document.getElementById('prompt').focus()")
        browser.do("Input.insertText", text=text)
        browser.press("Enter", "\r")
        browser.wait(f"recorded.length === {turn} && document.getElementById('stop').disabled")
        shown = browser.evaluate(
            "[...[...document.querySelectorAll('.assistant .said')].at(-1).children]"
            ".map((span) => [span.textContent, span.className])"
        )
        sent = sent_pieces(browser.evaluate("recorded.at(-1)"))
        require(
            bool(shown) and letters(shown) == letters(sent),
            f"turn {turn}: {len(shown)} pieces have the origins that the server sent",
        )
    num_messages = browser.evaluate("messages.length")
    require(num_messages == 4, "the second turn was sent with the first")


def check_colors(browser: Browser) -> None:
    """Each origin has one colour, that of the legend, and all can be read on the panel."""
    told = browser.evaluate(
        f"""{json.dumps(ORIGINS)}.map((origin) => {{
          const colors = [...document.querySelectorAll('b.' + origin + ', span.' + origin)]
            .map((element) => getComputedStyle(element).color);
          return [...new Set(colors)];
        }})"""
    )
    require(all(len(colors) == 1 for colors in told), "tokens have the colours of the legend")
    colors = [colors[0] for colors in told]
    require(len({*colors}) == len(ORIGINS), "each origin has a colour of its own")
    others = browser.evaluate(
        "['.sees', '.waiting', 'button', 'h1'].map((name) => "
        "getComputedStyle(document.querySelector(name) ?? document.body).color)"
    )
    panel = browser.evaluate("getComputedStyle(document.getElementById('chat')).backgroundColor")
    least = min(contrast(color, panel) for color in colors + others)
    require(least >= 4.5, f"contrast is at least 4.5: {least:.1f}")


def contrast(one: str, other: str) -> float:
    """WCAG's ratio of two colours rgb(r, g, b)."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(color: str) -> float:
    parts = []
    for number in re.findall(r"[\d.]+", color)[:3]:
        part = float(number) / 255
        parts.append(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4)
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def check_batch(browser: Browser, server: Server, folder: Path | None) -> None:
    """Twenty requests run while the page looks: sixteen places, a queue, and blocks of both."""
    prompts = [f"Once upon a time there was a little girl with {n} cats" for n in range(20)]
    requests = [Thread(target=server.complete, args=[prompt]) for prompt in prompts]
    for request in requests:
        request.start()
    browser.wait("picture.running === 16 && picture.waiting === 4")
    browser.wait("document.querySelectorAll('#texts tr').length === 20")
    states = browser.evaluate(
        "[...new Set([...document.querySelectorAll('#texts .state')].map((s) => s.textContent))]"
    )
    require("writing" in states and "waiting" in states, f"20 requests are seen: {states}")
    for name, size in (("wide", (1440, 1040)), ("narrow", (420, 900))):
        for scheme in ("light", "dark"):
            browser.show(*size, scheme)
            width = browser.evaluate("document.documentElement.scrollWidth")
            require(width <= size[0], f"{name}, {scheme}: the page is not wider than the window")
            check_colors(browser)
            if folder is not None:
                shot = browser.do("Page.captureScreenshot", captureBeyondViewport=True)
                (folder / f"{name}-{scheme}.png").write_bytes(base64.b64decode(shot["data"]))
    browser.show(1440, 1040, "light")
    for request in requests:
        request.join()
    browser.wait("picture.running === 0 && document.querySelectorAll('#texts tr').length === 0")


def check_blocks(browser: Browser) -> None:
    """Every block in one class; the keyboard goes through the map and tells each."""
    counts, total = browser.evaluate("[picture.cache.counts, picture.cache.total]")
    require(sum(counts.values()) == total, f"the classes of {total} blocks add up: {counts}")
    browser.evaluate("document.getElementById('pool').focus()")
    browser.press("ArrowRight")
    told = browser.wait("document.getElementById('told').textContent.startsWith('Block 0')")
    value = browser.evaluate("document.getElementById('pool').getAttribute('aria-valuetext')")
    require(bool(told) and value.startswith("Block 0: "), f"arrow keys tell a block: {value}")


def check_stop(browser: Browser) -> None:
    """Texts that are stopped, in the chat or beside it, leave the batch."""
    fill = "document.getElementById('fill').click()"
    browser.evaluate(fill)
    browser.wait("picture.running >= 10 && picture.cache.counts.shared > 0")
    browser.evaluate(fill)
    browser.wait("picture.running === 0 && filling === null")
    browser.evaluate("document.getElementById('new').click()")
    browser.evaluate(STOP_EARLY)
    browser.evaluate("void send('Once upon a time')")
    browser.wait("document.getElementById('log').textContent.includes('stopped')")
    browser.wait("picture.running === 0")
    require(True, "texts that are stopped leave the batch")


def check_network(browser: Browser, host: str, may_be_refused: bool = False) -> None:
    """No other host; no error in the console."""
    others = set()
    errors = []
    for event in browser.events:
        params = event["params"]
        if event["method"] == "Network.requestWillBeSent":
            address = params["request"]["url"]
            if not address.startswith((f"http://{host}/", "data:", "about:")):
                others.add(address)
        elif event["method"] == "Runtime.exceptionThrown":
            errors.append(str(params))
        elif event["method"] == "Log.entryAdded":
            text = params["entry"]["text"]
            if not (may_be_refused and "401" in text):
                errors.append(text)
    require(not others, f"no request to any other host {sorted(others)}")
    require(not errors, f"no error in the console {errors}")


def check_key(browser: Browser) -> None:
    """A server with a key: the page asks for it once, and sends it."""
    server = Server("--api-key", "sesame")
    try:
        browser.events.clear()
        browser.open(f"http://{server.host}/")
        browser.wait("document.getElementById('key-dialog').open")
        browser.do("Input.insertText", text="sesame")
        browser.press("Enter", "\r")
        browser.wait("picture !== null && !document.getElementById('key-dialog').open")
        check_network(browser, server.host, may_be_refused=True)
        require(True, "the page asks for the key, and sends it")
    finally:
        server.close()


def main(folder: Path | None) -> None:
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        print("Chromium is not installed: the page is not looked at (apt-get install chromium)")
        return
    server = Server()
    browser = Browser(program)
    try:
        browser.show(1440, 1040, "light")
        browser.open(f"http://{server.host}/")
        browser.wait("picture !== null")
        check_chat(browser)
        check_batch(browser, server, folder)
        check_blocks(browser)
        check_stop(browser)
        check_network(browser, server.host)
        check_key(browser)
    finally:
        browser.close()
        server.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
