"""Several machines, as docs/server.md says it: torchrun on two hosts, and two servers behind nginx.

    python .ci/hosts.py

The hosts are network namespaces of this machine, joined by a bridge, in a user namespace of this
program's own: they end with it. It needs Debian's packages iproute2 and nginx. What is not there is
left out, and said. nginx's settings are those of the document, with other addresses.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from checks import require

ROOT = Path(__file__).parent.parent
HOSTS = {"a": "10.9.0.1", "b": "10.9.0.2"}
PROXY = "10.9.0.100"
CLIENTS = [f"10.9.0.{number}" for number in range(101, 113)]
END = 30.0  # seconds until all processes have ended, because one was killed
AT_ONCE = 10.0  # seconds until a client is answered


# ---- The network


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


def make_network() -> None:
    """A bridge with the addresses of proxy and clients, and a namespace for each host."""
    subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
    ip("link set lo up")
    ip("link add bridge type bridge")
    for address in (PROXY, *CLIENTS):
        ip(f"address add {address}/24 dev bridge")
    ip("link set bridge up")
    for host, address in HOSTS.items():
        ip(f"netns add {host}")
        ip(f"link add eth0 netns {host} type veth peer name port-{host}")
        ip(f"link set port-{host} master bridge up")
        ip(f"-n {host} address add {address}/24 dev eth0")
        ip(f"-n {host} link set lo up")
        ip(f"-n {host} link set eth0 up")


def on_host(host: str, *words: str, **how: object) -> subprocess.Popen:
    """Start Python with these words there."""
    return subprocess.Popen(
        ["ip", "netns", "exec", host, sys.executable, *words], cwd=ROOT, text=True, **how
    )


def kill_host(host: str) -> None:
    """Kill all processes of a host."""
    done = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True)
    for pid in done.stdout.split():
        os.kill(int(pid), signal.SIGKILL)


# ---- torchrun


def torchrun(*words: str) -> list[subprocess.Popen]:
    """generate.py in a process on each host."""
    started = []
    for rank, host in enumerate(HOSTS):
        flags = f"--nnodes 2 --node-rank {rank} --master-addr {HOSTS['a']} --nproc-per-node 1"
        command = ["-m", "torch.distributed.run", *flags.split(), "generate.py", *words]
        environment = os.environ | dict(GLOO_SOCKET_IFNAME="eth0", TORCH_CPP_LOG_LEVEL="FATAL")
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
        started.append(on_host(host, *command, **pipes))
    return started


def check_text() -> None:
    words = ["--dtype", "float64", "--temperature", "0", "--max-tokens", "40", "Lily saw"]
    alone = subprocess.run(
        [sys.executable, "generate.py", *words], capture_output=True, text=True, cwd=ROOT
    )
    texts = [process.communicate(timeout=120)[0] for process in torchrun(*words)]
    require(texts == [alone.stdout, ""], f"torchrun --nnodes 2 makes the text of one: {texts[0]!r}")


def check_end(folder: Path) -> None:
    """Amid a batch the processes of host b are killed."""
    asked = [dict(prompt="Once", seed=i, max_tokens=400, stop="no such text") for i in range(500)]
    asked[0]["max_tokens"] = 1
    (folder / "prompts").write_text("\n".join(map(json.dumps, asked)))
    both = torchrun("--prompts", str(folder / "prompts"), "--max-batch", "2")
    both[0].stdout.readline()  # the first text is done
    begin = time.monotonic()
    kill_host("b")
    for process in both:
        process.communicate(timeout=120)
    took = time.monotonic() - begin
    codes = [process.returncode for process in both]
    require(all(codes) and took < END, f"host b is killed: {codes} after {took:.0f} s")


# ---- nginx


def start_server(host: str) -> subprocess.Popen:
    """serve.py on a host; the model's name is the host's."""
    flags = f"--host {HOSTS[host]} --port 8000 --model-name {host} --max-batch 8"
    process = on_host(host, "serve.py", *flags.split(), stderr=subprocess.PIPE)
    line = process.stderr.readline()
    while line and "serving" not in line:
        line = process.stderr.readline()
    return process


def settings_of_nginx() -> str:
    """The document's, with the addresses of our hosts."""
    document = (ROOT / "docs/server.md").read_text(encoding="utf-8")
    (settings,) = re.findall(r"```nginx\n(.*?)```", document, re.DOTALL)
    servers = iter(HOSTS.values())
    settings = re.sub(r"(server )[\w.]+(?=:8000)", lambda found: found[1] + next(servers), settings)
    folders = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    own = " ".join(f"{name}_temp_path {name};" for name in folders)
    head = "daemon off; master_process off; user root; pid nginx.pid; error_log error.log;"
    return f"{head}\nevents {{}}\nhttp {{\naccess_log off; {own}\n{settings}}}\n"


class Answer(NamedTuple):
    """What a client has of a stream."""

    status: int
    model: str  # the host that made it
    is_done: bool = True  # it has its last event
    is_closed: bool = True  # and the last chunk, by which HTTP tells an end from a cut


async def ask(client: str, **body: object) -> Answer:
    reader, writer = await asyncio.open_connection(PROXY, 80, local_addr=(client, 0))
    data = json.dumps(dict(prompt="Once", seed=1, stream=True) | body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: llama\r\nContent-Length: {len(data)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + data)
    try:
        answer = (await reader.read()).decode()
    except ConnectionError:
        answer = ""
    writer.close()
    status = re.match(r"HTTP/1.1 (\d+)", answer)
    model = re.search('"model": ?"(.)"', answer)
    return Answer(
        int(status[1]) if status else 0,
        model[1] if model else "",
        is_done="data: [DONE]" in answer,
        is_closed=answer.endswith("\r\n0\r\n\r\n"),
    )


async def ask_all(**body: object) -> dict[str, Answer]:
    """A request of each client, all at once."""
    answers = await asyncio.gather(*(ask(client, **body) for client in CLIENTS))
    return dict(zip(CLIENTS, answers))


async def check_killed(homes: dict[str, str]) -> None:
    """One of two servers is killed amid its texts."""
    running = asyncio.ensure_future(ask_all(max_tokens=450, ignore_eos=True))
    await asyncio.sleep(1)
    begin = time.monotonic()
    kill_host("a")
    answers = await asyncio.wait_for(ask_all(max_tokens=5), AT_ONCE)
    others = {*answers.values()}
    require(others == {Answer(200, "b")}, f"server a is killed: b answers {len(answers)} clients")
    ended = (await asyncio.wait_for(running, 120)).values()
    cut = Answer(200, "a", is_done=False, is_closed=False)
    wanted = [cut if home == "a" else Answer(200, "b") for home in homes.values()]
    require([*ended] == wanted, "all streams of a end as cut off, and those of b whole")
    print(f"      after {time.monotonic() - begin:.1f} s all is over")


async def check_restarts(servers: dict[str, subprocess.Popen]) -> None:
    """One after the other is stopped and started, while all clients go on asking."""
    answers = []
    is_over = False

    async def client(address: str) -> None:
        while not is_over:
            answers.append(await ask(address, max_tokens=20, ignore_eos=True))

    clients = [asyncio.ensure_future(client(address)) for address in CLIENTS]
    for host in HOSTS:
        await asyncio.sleep(1)
        servers[host].terminate()  # open requests are finished, then it ends
        await asyncio.to_thread(servers[host].communicate, timeout=60)
        await asyncio.sleep(1)
        servers[host] = await asyncio.to_thread(start_server, host)
    await asyncio.sleep(1)
    is_over = True
    await asyncio.wait_for(asyncio.gather(*clients), 60)
    by = {host: answers.count(Answer(200, host)) for host in HOSTS}
    lost = len(answers) - sum(by.values())
    require(lost == 0, f"two restarts: {len(answers)} requests, by each server {by}, {lost} lost")


async def check_servers(servers: dict[str, subprocess.Popen]) -> None:
    rounds = []
    for _ in range(3):
        rounds.append(await ask_all(max_tokens=5))
        await ask(CLIENTS[0], max_tokens=5)  # servers that take turns have other clients now
    homes = {client: answer.model for client, answer in rounds[0].items()}
    told = ", ".join(f"{host} {[*homes.values()].count(host)}" for host in HOSTS)
    require({*rounds[0].values()} == {Answer(200, host) for host in HOSTS}, f"clients: {told}")
    require(rounds[0] == rounds[1] == rounds[2], "each client stays on one server")
    await check_killed(homes)
    servers["a"] = await asyncio.to_thread(start_server, "a")
    again = await ask_all(max_tokens=5)
    require(again == rounds[0], "server a is started again, and has its clients again")
    await check_restarts(servers)


def check_proxy(folder: Path) -> None:
    if not shutil.which("nginx"):
        print("nginx is not installed: servers behind a proxy are left out (apt-get install nginx)")
        return
    (folder / "nginx.conf").write_text(settings_of_nginx())
    servers = {host: start_server(host) for host in HOSTS}
    nginx = subprocess.Popen(["nginx", "-p", folder, "-c", "nginx.conf", "-e", "error.log"])
    try:
        time.sleep(1)
        asyncio.run(check_servers(servers))
    finally:
        nginx.kill()
        for host in HOSTS:
            kill_host(host)


# ---- All


def main() -> None:
    make_network()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        check_text()
        check_end(folder)
        check_proxy(folder)


if __name__ == "__main__":
    if "OWN_NETWORK" in os.environ:
        main()
    elif not shutil.which("ip") or subprocess.run(["unshare", "-rnm", "true"]).returncode:
        print("there is no `ip`, or no namespace to be had: several machines are left out")
    else:
        command = ["unshare", "-rnm", "--kill-child", "--fork", sys.executable, __file__]
        os.execvpe("unshare", command, os.environ | dict(OWN_NETWORK="1"))
