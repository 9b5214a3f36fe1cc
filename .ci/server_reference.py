"""The server against programs that other people wrote, and against many clients at once.

    python .ci/server_reference.py [SECONDS] [CLIENTS] [MODEL]

SECONDS: of the many clients (default 60). CLIENTS: a folder of programs (a venv's bin) with the
`openai` package; what is not there is left out, and said.
MODEL: the folder of a model whose throughput is measured beside tiny's.

Texts are compared with those made alone: greedy, in float64. Speeds are ratios between runs in
turns. The machine is shared: what misses the aim is measured again, up to four times.
"""

import asyncio
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import torch
from checks import require

from generate import generate
from loading import Model
from testing.tools import with_tools

OPENINGS = ["Once upon a time", "Lily saw", "Tom had a red ball", "One day", "The dog", "Mom said"]
COMPLETE = "/v1/completions"


# ---- The server, and a client of its protocol


@contextmanager
def server(*flags: str) -> Iterator[tuple[subprocess.Popen, int]]:
    """The server's process, and its port."""
    process = subprocess.Popen(
        [sys.executable, "serve.py", "--port", "0", *flags],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stderr.readline()
        while line and "serving" not in line:
            line = process.stderr.readline()
        yield process, int(re.search(r":(\d+)/,", line)[1])
        process.terminate()
        _, rest = process.communicate(timeout=60)
        require("Traceback" not in rest, "the server's end has no traceback")
    finally:
        process.kill()
        process.wait()


class Connection:
    """One request by hand, so that a client can be as odd as it likes."""

    def __init__(self, port: int):
        self.port = port

    async def __aenter__(self) -> "Connection":
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.writer.close()

    async def post(self, body: bytes, path: str = COMPLETE, length: int | None = None) -> int:
        """Send a request -> the status."""
        size = len(body) if length is None else length
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n"
        self.writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        await self.writer.drain()
        return await self.status()

    async def status(self) -> int:
        line = await self.reader.readline()
        while (await self.reader.readline()).strip():
            pass
        return int(line.split()[1]) if line else 0

    async def events(self) -> list[dict]:
        """The chunks of a stream, to its end."""
        chunks = []
        async for line in self.reader:
            if line.startswith(b"data: {"):
                chunks.append(json.loads(line[6:]))
            if line.startswith(b"data: [DONE]"):
                break
        return chunks


async def text_of(port: int, body: dict) -> str:
    async with Connection(port) as connection:
        await connection.post(json.dumps(body | dict(stream=True)).encode())
        chunks = await connection.events()
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)


async def metrics(port: int) -> dict[str, float]:
    async with Connection(port) as connection:
        connection.writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await connection.status()
        numbers = {}
        while line := (await connection.reader.readline()).decode().strip():
            if line.startswith("vllm:"):
                name, value = line.rsplit(" ", 1)
                numbers[name.partition("{")[0]] = float(value)
            if line.startswith("vllm:request_decode_time_seconds_count"):
                break
        return numbers


def memory(process: subprocess.Popen) -> float:
    """Resident memory in MB."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


# ---- Many clients


Asked = tuple[str, int]  # a prompt, and max_tokens
WRONG = [(body, 400, 0.1) for body in (b"{", b"\xff\xfe", b"[]", b"5")]
WRONG += [(b'{"prompt": "a", "temperature": "hot"}', 400, 0.1), (b" " * 5_000_000, 413, 0.5)]


class Crowd:
    """Clients of several kinds, until a time is over."""

    def __init__(self, port: int, wanted: dict[Asked, str], seconds: float):
        self.port = port
        self.wanted = wanted
        self.end = time.monotonic() + seconds
        self.done = Counter()
        self.faults: list[str] = []
        self.random = random.Random(1)

    def body(self, stream: bool = True) -> tuple[Asked, bytes]:
        key = self.random.choice(list(self.wanted))
        prompt, max_tokens = key
        body = dict(prompt=prompt, max_tokens=max_tokens, temperature=0, stream=stream)
        return key, json.dumps(body).encode()

    def expect(self, kind: str, holds: bool, what: object) -> None:
        self.done[kind] += 1
        if not holds:
            self.faults.append(f"{kind}: {what}")

    async def client(self, kind: str) -> None:
        while time.monotonic() < self.end:
            await getattr(self, kind)()

    async def reading(self, kind: str = "reading", pause: float = 0.0) -> None:
        key, body = self.body()
        async with Connection(self.port) as connection:
            status = await connection.post(body)
            await asyncio.sleep(pause)
            chunks = await connection.events()
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            self.expect(kind, status == 200 and text == self.wanted[key], (key, status, text))

    async def slow(self) -> None:
        await self.reading("slow", 1.0)

    async def whole(self) -> None:
        key, body = self.body(stream=False)
        async with Connection(self.port) as connection:
            status = await connection.post(body)
            data = await connection.reader.read()
            text = json.loads(data[data.index(b"{") : data.rindex(b"}") + 1])["choices"][0]["text"]
            self.expect("whole", status == 200 and text == self.wanted[key], (key, status, text))

    async def leaving(self) -> None:
        _, body = self.body(stream=self.random.random() < 0.5)
        async with Connection(self.port) as connection:
            size = len(body)
            head = f"POST {COMPLETE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n"
            part = self.random.choice([len(body), len(body) // 2])
            connection.writer.write(head.encode() + body[:part])
            await asyncio.sleep(self.random.random() * 0.3)
            self.expect("leaving", True, "")

    async def wrong(self) -> None:
        """Bodies that are broken, mistaken, or too large."""
        body, wanted, pause = self.random.choice(WRONG)
        async with Connection(self.port) as connection:
            status = await connection.post(body)
            self.expect("wrong", status == wanted, (body[:40], status))
        await asyncio.sleep(pause)


KINDS = ["reading"] * 32 + ["whole"] * 8 + ["slow"] * 8 + ["leaving"] * 10
KINDS += ["wrong"] * 6


async def check_crowd(process: subprocess.Popen, port: int, seconds: float, wanted: dict) -> None:
    """Nothing lost, nothing wrong, memory flat, blocks free, nobody kept waiting."""
    crowd = Crowd(port, wanted, min(20, seconds / 4))
    await asyncio.gather(*map(crowd.client, KINDS))  # to warm up: caches of texts grow
    before = memory(process)
    crowd = Crowd(port, wanted, seconds)
    sizes = []

    async def watch() -> None:
        while time.monotonic() < crowd.end:
            await asyncio.sleep(1)
            sizes.append(memory(process))

    await asyncio.gather(watch(), *map(crowd.client, KINDS))
    for fault in crowd.faults[:5]:
        print("     ", fault)
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(crowd.done.items()))
    require(not crowd.faults, f"{len(KINDS)} clients for {seconds:.0f} s: {told}")
    grown = median(sizes[-5:]) - before
    require(grown < 20, f"memory: {before:.0f} MB, and {grown:+.1f} MB at the end")
    await asyncio.sleep(0.2)
    numbers = await metrics(port)
    idle = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    require(not any(numbers[f"vllm:{name}"] for name in idle), "all blocks are free at the end")


# ---- Clients of others

OPENAI = """
import sys, time
import openai

port, wanted = sys.argv[1:]
client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
model = client.models.list().data[0].id
assert client.models.retrieve(model).id == model
greedy = dict(model=model, temperature=0, max_tokens=12)
messages = [{"role": "user", "content": "Once upon a time"}]

chat = client.chat.completions.create(messages=messages, **greedy)
assert chat.choices[0].message.content == wanted and chat.choices[0].finish_reason == "length"
assert chat.usage.completion_tokens == 12
text = client.completions.create(prompt="Once upon a time", **greedy)
assert text.choices[0].text == wanted
stream = client.chat.completions.create(
    messages=messages, stream=True, stream_options={"include_usage": True}, **greedy
)
chunks = list(stream)
assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == wanted
assert chunks[-1].usage.completion_tokens == 12
text = client.completions.create(prompt="Once upon a time", stream=True, **greedy)
assert "".join(c.choices[0].text for c in text) == wanted

many = client.chat.completions.create(model=model, messages=messages, n=3, seed=5, max_tokens=12)
again = client.chat.completions.create(model=model, messages=messages, n=3, seed=5, max_tokens=12)
texts = [choice.message.content for choice in many.choices]
assert len(set(texts)) > 1 and texts == [choice.message.content for choice in again.choices]
stopped = client.completions.create(prompt="Once upon a time", stop=[" there"], **greedy)
assert stopped.choices[0].text == wanted[: wanted.index(" there")]
assert stopped.choices[0].finish_reason == "stop"
likely = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=2, **greedy)
content = likely.choices[0].logprobs.content
assert "".join(entry.token for entry in content) == wanted
assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content)

loud = dict(presence_penalty=0.5, frequency_penalty=0.5, logit_bias={"44": -100})
penalized = client.completions.create(prompt="Once upon a time", **loud, **greedy)
assert penalized.choices[0].text != wanted and "," not in penalized.choices[0].text
for error, fields in (
    (openai.BadRequestError, dict(temperature=-1)),
    (openai.BadRequestError, dict(logit_bias={"5": -101})),
    (openai.BadRequestError, dict(messages=[{"role": "user", "content": "a " * 5000}])),
    (openai.BadRequestError, dict(tools=[{"type": "function", "function": {"name": "f"}}])),
    (openai.NotFoundError, dict(model="gpt")),
):
    try:
        client.chat.completions.create(**{**greedy, "messages": messages, **fields})
    except error as raised:
        assert raised.body["message"] and raised.request_id is None or raised.body
    else:
        raise AssertionError(fields)
try:
    form = {"type": "json_object"}
    answer = client.chat.completions.create(messages=messages, response_format=form, **greedy)
    print("response_format:", answer.choices[0].message.content)
except openai.BadRequestError as error:
    print("response_format:", error.body["message"])

greedy["max_tokens"] = 500
stream = client.completions.create(
    prompt="Once upon a time", stream=True, extra_body={"ignore_eos": True}, **greedy
)
next(iter(stream))
stream.close()  # cancels
time.sleep(0.3)
"""

TOOLS = """
import sys
from typing import Literal
import openai
from pydantic import BaseModel, Field

class Add(BaseModel):
    a: int = Field(ge=0, le=99)
    b: int = Field(ge=0, le=99)

class Say(BaseModel):
    word: Literal["dog", "cat"]

client = openai.OpenAI(base_url=f"http://127.0.0.1:{sys.argv[1]}/v1", api_key="none", max_retries=0)
tools = [openai.pydantic_function_tool(Add), openai.pydantic_function_tool(Say)]
body = dict(model=client.models.list().data[0].id, tools=tools, temperature=0)
messages = [{"role": "user", "content": "Tom has a dog."}]
named = {"type": "function", "function": {"name": "Add"}}
for choice in ("required", named):
    how = body | dict(messages=messages, tool_choice=choice, parallel_tool_calls=False)
    at_once = client.chat.completions.create(**how).choices[0]
    with client.chat.completions.stream(**how) as stream:
        parts = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        streamed = stream.get_final_completion().choices[0]
    assert at_once.finish_reason == streamed.finish_reason == "tool_calls" and parts
    (call,) = streamed.message.tool_calls
    (other,) = at_once.message.tool_calls
    assert call.function.arguments == other.function.arguments
    arguments = call.function.parsed_arguments  # by pydantic
    told = arguments.word if isinstance(arguments, Say) else arguments.a + arguments.b
    print(call.function.name, call.function.arguments, told)
    messages += [streamed.message, {"role": "tool", "tool_call_id": call.id, "content": str(told)}]
assert call.function.name == "Add"
how = body | dict(messages=messages, max_tokens=12)  # auto
text = client.chat.completions.create(**how).choices[0].message.content
chunks = client.chat.completions.create(**how, stream=True)
assert text == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
print(text)
"""


def run_openai(programs: Path, code: str, *arguments: str) -> str:
    """What a program with the openai package prints."""
    python = programs / "python"
    has_openai = [python, "-c", "import openai"]
    if not python.exists() or subprocess.run(has_openai, capture_output=True).returncode:
        print("the openai package is not installed: left out")
        return ""
    done = subprocess.run(
        [python, "-c", code, *arguments], capture_output=True, text=True, timeout=60
    )
    require(done.returncode == 0, f"the openai package\n{done.stderr[-2000:]}".strip())
    return done.stdout.strip()


def check_tools(programs: Path) -> None:
    """Calls in a loop, with a draft and without, of a model that writes tags, and of one that does
    not."""
    for is_tagged in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            target = with_tools(Path(folder, "tiny"), is_tagged)
            told = []
            for draft in ([], ["--draft", "tiny-eagle"]):
                with server("--dtype", "float64", "--target", str(target), *draft) as (_, port):
                    told.append(run_openai(programs, TOOLS, str(port)))
        require(told[0] == told[1], f"calls, with a draft and without: {told[0]!r}")


def check_openai(programs: Path, port: int, wanted: str) -> None:
    print("     ", run_openai(programs, OPENAI, str(port), wanted))
    running = asyncio.run(metrics(port))["vllm:num_requests_running"]
    require(running == 0, "a stream that the openai package closes is cancelled")


def check_curl(port: int, wanted: str) -> None:
    if not shutil.which("curl"):
        print("curl is not installed: left out")
        return
    body = json.dumps(dict(prompt=OPENINGS[0], temperature=0, max_tokens=12, stream=True))
    address = f"http://127.0.0.1:{port}{COMPLETE}"
    done = subprocess.run(["curl", "-sN", address, "-d", body], capture_output=True, text=True)
    lines = [line for line in done.stdout.split("\n\n") if line]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    require(text == wanted and lines[-1] == "data: [DONE]", "curl -N reads a stream")


# ---- Time


def served(port: int, bodies: list[dict], clients: int) -> float:
    """Seconds of these requests by so many clients, each of which reads its stream."""

    async def work() -> None:
        left = iter(bodies)

        async def client() -> None:
            for body in left:
                await text_of(port, body)

        await asyncio.gather(*(client() for _ in range(clients)))

    start = time.perf_counter()
    asyncio.run(work())
    return time.perf_counter() - start


def from_file(target: str, bodies: list[dict]) -> float:
    """Seconds of the same requests by --prompts, as it tells them, loading aside."""
    lines = "\n".join(map(json.dumps, bodies))
    flags = ["--target", target, "--raw", "--prompts", "-", "--max-batch", "16"]
    done = subprocess.run(
        [sys.executable, "generate.py", *flags],
        cwd=ROOT,
        input=lines,
        capture_output=True,
        text=True,
    )
    return float(re.search(r"tokens in ([\d.]+) s", done.stderr)[1])


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """This process, and those that it starts, have these cores alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def check_throughput(target: str, max_tokens: int, least: float) -> None:
    """16 clients over the same requests by --prompts, in tokens a second. One core is the clients',
    which would be on other machines."""
    *cores, last = os.sched_getaffinity(0)
    own = set(cores) or {last}
    bodies = []
    for i in range(48):
        prompt = f"{OPENINGS[i % 6]} {i}"
        bodies.append(dict(prompt=prompt, max_tokens=max_tokens, temperature=0.7, seed=i))
    with on_cores(own), server("--target", target) as (_, port):
        best = 0.0
        for _ in range(5):
            alone = from_file(target, bodies)
            with on_cores({last}):
                seconds = served(port, bodies, 16)
            best = max(best, alone / seconds)
            if best >= 0.9:
                break
        told = f"{best:.2f} times the tokens a second of --prompts"
        require(best >= least, f"{Path(target).name}, 16 clients: {told} (aim 0.9)")


def check_first_token() -> None:
    """The first token of an idle server, and from Python: the medians of turns, in ms."""
    model = Model.load("tiny", "cpu")
    at_client = []
    in_python = []

    async def first(port: int, prompt: str) -> float:
        body = json.dumps(dict(prompt=prompt, max_tokens=4, temperature=0, stream=True)).encode()
        start = time.perf_counter()
        async with Connection(port) as connection:
            await connection.post(body)
            while not (await connection.reader.readline()).startswith(b"data: {"):
                pass
            seconds = time.perf_counter() - start
            await connection.events()
        return seconds

    with server() as (_, port):
        for i in range(24):
            prompt = f"{i} is how many dogs Tom saw, and {i + 1} cats"
            at_client.append(asyncio.run(first(port, prompt)))
            result = generate(prompt, model, temperature=0, max_tokens=4)
            in_python.append(result.seconds_to_first_token)
    later = 1e3 * (median(at_client[4:]) - median(in_python[4:]))
    told = f"{1e3 * median(at_client[4:]):.1f} ms, {later:.1f} ms later than from Python"
    require(later <= 10, f"the first token of an idle server: {told}")


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    programs = Path(sys.argv[2] if len(sys.argv) > 2 else sys.executable).absolute()
    if programs.is_file():
        programs = programs.parent
    model = Model.load("tiny", "cpu", torch.float64)
    wanted = {}
    for i, max_tokens in enumerate([4, 12, 30, 60, 100, 150] * 2):
        prompt = f"{OPENINGS[i % 6]}{' and' * (i // 6)}"
        result = generate(prompt, model, temperature=0, max_tokens=max_tokens)
        wanted[prompt, max_tokens] = result.text
    alone = generate(OPENINGS[0], model, temperature=0, max_tokens=12).text
    with server("--dtype", "float64") as (process, port):
        check_openai(programs, port, alone)
        check_curl(port, alone)
        asyncio.run(check_crowd(process, port, seconds, wanted))
    check_tools(programs)
    check_first_token()
    check_throughput("tiny", 200, 0.7)  # a token is as short as its way to a client
    if len(sys.argv) > 3 and Path(sys.argv[3]).exists():
        check_throughput(sys.argv[3], 64, 0.9)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
