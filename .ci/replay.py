"""Records a session of the real server, and writes the page that plays it.

    python .ci/replay.py record    a new session: docs/replay/index.html, and its picture
    python .ci/replay.py           the same session again, in app/page.html as it is now

The page itself has the session, and all that it shows is kept: a chat of three messages, and beside
it 16 requests that begin alike. There are 12 slots and little memory, so requests wait, share
blocks, and are preempted. `--plain` makes steps slow enough to be watched. Needs playwright and
Chromium, as page.py does.
"""

import base64
import json
import re
import sys
import time

from page import REPLAY, ROOT, Server, chromium

PICTURE = REPLAY.with_name("picture.webp")
RECORDING = re.compile('(?<=type="application/json">).*?(?=</script>)', re.DOTALL)
FLAGS = ("--plain", "--max-batch", "12", "--kv-memory", "8.4e6")
SESSION = """async () => {
  let begun = null;
  const events = [];
  for (const [kind, show] of Object.entries(SHOW)) {
    SHOW[kind] = (data) => {
      begun ??= performance.now();
      events.push([Math.round(performance.now() - begun) / 1000, kind, data ?? null]);
      show(data);
    };
  }
  await new Promise((resolve) => setTimeout(resolve, 300));  // a picture is the first event
  $("max-tokens").value = 100;
  $("temperature").value = 0.7;
  await send("Once upon a time there was a girl");
  filling = new AbortController();
  const prompts = HEROES.map((hero) => BEGINNING + hero);
  const requests = [complete(prompts.slice(0, 8), 160), complete(prompts.slice(8, 16), 200)];
  await Promise.all([send("One day she met a dog"), ...requests]);
  await send("The next day they");
  return events;
}"""
# When the most requests run beside one that is preempted.
BEST_MOMENT = """() => {
  const isPreempted = ([, kind, data]) =>
    kind === "picture" && data.requests.some((text) => text.state === "preempted");
  const found = recording.events.filter(isPreempted);
  showUntil(found.sort((a, b) => b[2].running - a[2].running)[0][0]);
}"""


def record(browser) -> str:
    """What is said of the session, and its events, as JSON that may stand in HTML."""
    server = Server(*FLAGS)
    page = browser.new_page()
    page.goto(f"http://{server.host}/")
    events = page.evaluate(SESSION)
    server.close()
    told = f"serve.py --draft tiny-draft {' '.join(FLAGS)}, {time.strftime('%Y-%m-%d')}"
    lines = [json.dumps(event, separators=(",", ":")) for event in events]
    text = f'{{"told": {json.dumps(told)}, "events": [\n' + ",\n".join(lines) + "\n]}"
    return text.replace("<", "\\u003c")


def draw(browser) -> None:
    size = {"width": 1200, "height": 860}
    page = browser.new_page(viewport=size, reduced_motion="reduce", color_scheme="light")
    page.goto(REPLAY.as_uri())
    page.evaluate(BEST_MOMENT)
    options = {"format": "webp", "quality": 100}  # without loss, and smaller than PNG
    shot = page.context.new_cdp_session(page).send("Page.captureScreenshot", options)
    PICTURE.write_bytes(base64.b64decode(shot["data"]))


def main() -> None:
    page = (ROOT / "app" / "page.html").read_text(encoding="utf-8")
    with chromium() as browser:
        if sys.argv[1:] == ["record"]:
            recording = record(browser)
        else:
            recording = RECORDING.search(REPLAY.read_text(encoding="utf-8"))[0]
        REPLAY.write_text(RECORDING.sub(lambda empty: recording, page), encoding="utf-8")
        draw(browser)


if __name__ == "__main__":
    main()
