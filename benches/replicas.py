#!/usr/bin/env python3
"""Replicas of `llmctl serve` behind nginx or HAProxy: what they keep when one drains or is killed under load.

Starts the replicas on free ports of 127.0.0.1 over one folder of sessions and one of KV, and the proxy with its file from
docs/proxy with these ports. Checks, and prints as figures:
  affinity  requests with one session header reach one replica
  streams   events reach the client one by one
  drain     SIGTERM of a replica loses no stream and refuses no request
  move      a session goes on at another replica, its first one alive or killed, and how many prompt tokens are not computed again
  stuck     a stopped (SIGSTOP) holder keeps its session: others get 409, and the session after it was killed
  kills     SIGKILL of a replica again and again under load: no finished turn is lost

    benches/replicas.py --llmctl target/release/llmctl --proxy nginx --replicas 3 --kills 100

Needs Python 3.9 and the proxy in PATH. Exits with 1 if a check fails, with 75 if the proxy is not installed.
"""

import argparse
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
START_LIMIT = 60  # seconds for a replica to load its model
REQUEST_LIMIT = 60  # seconds for one request
TURNS_PER_SESSION = 6
NO_PROXY = 75


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Replica:
    """A server process that can be ended and started again on the same port."""

    def __init__(self, args, port, folder):
        self.args, self.port, self.folder = args, port, folder
        self.process = None

    def start(self):
        env = dict(os.environ, XDG_DATA_HOME=f"{self.folder}/data", XDG_CACHE_HOME=f"{self.folder}/cache",
                   XDG_STATE_HOME=f"{self.folder}/state", XDG_CONFIG_HOME=f"{self.folder}/config")
        env.pop("LLMCTL_API_KEY", None)
        command = [self.args.llmctl, "serve", "--model", self.args.model, "--port", str(self.port), "--threads", "1",
                   "--session-wait", "2", "--parallel", "8", "--drain-timeout", "60"]
        log = open(f"{self.folder}/replica-{self.port}.log", "ab")
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait_ready(self):
        deadline = time.monotonic() + START_LIMIT
        while time.monotonic() < deadline:
            try:
                if request(self.port, "GET", "/ready", limit=2).status == 200:
                    return
            except OSError:
                pass
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        with open(f"{self.folder}/replica-{self.port}.log") as log:
            sys.exit(f"a replica does not start:\n{log.read()[-2000:]}")

    def signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        self.process.kill()
        self.process.wait()


class Reply:
    def __init__(self, status, body, events, num_reads, is_whole):
        self.status, self.body, self.events = status, body, events
        self.num_reads, self.is_whole = num_reads, is_whole

    def json(self):
        return json.loads(self.body)

    def text(self):
        if self.events is None:
            return self.json()["choices"][0]["message"]["content"]
        return "".join(e["choices"][0]["delta"].get("content") or "" for e in self.events if e.get("choices"))

    def error_code(self):
        """The code of an error of a replica; a proxy's own errors are no JSON."""
        try:
            return self.json()["error"]["code"]
        except ValueError:
            return "from the proxy"

    def is_finished(self):
        """Whether the client knows that the turn has ended well."""
        if self.status != 200 or not self.is_whole:
            return False
        return self.events is None or not any("error" in event for event in self.events)


def request(port, method, path, body=None, session=None, header="X-Session-Id", limit=REQUEST_LIMIT, on_event=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit)
    headers = {"Content-Type": "application/json"}
    if session is not None:
        headers[header] = session
    try:
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        response = connection.getresponse()
        if response.headers.get_content_type() != "text/event-stream":
            return Reply(response.status, response.read(), None, 1, True)
        return read_stream(response, on_event)
    except http.client.HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()


def read_stream(response, on_event):
    data, num_reads, is_whole, num_seen = b"", 0, False, 0
    try:
        while piece := response.read1(65536):
            data += piece
            num_reads += 1
            num_now = data.count(b"\ndata: ") + data.startswith(b"data: ")
            if on_event and num_now > num_seen:
                on_event(num_now)
            num_seen = num_now
        is_whole = b"data: [DONE]" in data
    except (OSError, http.client.HTTPException):
        pass  # the replica was killed in the middle
    lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
    if lines and not is_whole and not data.endswith(b"\n\n"):
        lines.pop()
    events = [json.loads(line) for line in lines if line != b"[DONE]"]
    return Reply(response.status, data, events, num_reads, is_whole)


def turn(text, stream=False, max_tokens=12, **more):
    return {"messages": [{"role": "user", "content": text}], "session_append": True, "stream": stream,
            "max_tokens": max_tokens, "ignore_eos": True, "seed": 7, **more}


CHAT = "/v1/chat/completions"


class Site:
    """The replicas and their proxy."""

    def __init__(self, args, folder):
        self.args, self.folder = args, folder
        self.port, *ports = free_ports(1 + args.replicas)
        self.replicas = [Replica(args, port, folder) for port in ports]
        self.proxy = None

    def start(self):
        for replica in self.replicas:
            replica.start()
        for replica in self.replicas:
            replica.wait_ready()
        self.start_proxy()

    def start_proxy(self):
        is_nginx = self.args.proxy == "nginx"
        name = "nginx.conf" if is_nginx else "haproxy.cfg"
        with open(f"{ROOT}/docs/proxy/{name}") as file:
            text = with_ports(file.read(), self.port, [replica.port for replica in self.replicas])
        if is_nginx:
            kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
            temporary = "".join(f"    {kind}_temp_path {self.folder}/{kind};\n" for kind in kinds)
            text = text.replace("http {\n", "http {\n" + temporary, 1)
        path = f"{self.folder}/{name}"
        with open(path, "w") as file:
            file.write(text)
        nginx = ["nginx", "-p", self.folder, "-e", "stderr", "-c", path, "-g", "daemon off;"]
        log = open(f"{self.folder}/proxy.log", "ab")
        self.proxy = subprocess.Popen(nginx if is_nginx else ["haproxy", "-db", "-f", path], stdin=subprocess.DEVNULL,
                                      stdout=log, stderr=log)
        for _ in range(200):
            try:
                if request(self.port, "GET", "/ready", limit=5).status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.05)
        with open(f"{self.folder}/proxy.log") as file:
            sys.exit(f"{self.args.proxy} does not start:\n{file.read()[-2000:]}")

    def stop(self):
        started = [self.proxy] + [replica.process for replica in self.replicas]
        processes = [process for process in started if process is not None and process.poll() is None]
        for process in processes:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def generated(self):
        """Tokens that each replica has generated."""
        pattern = re.compile(r"^vllm:generation_tokens_total\{.*\} (\d+)$", re.M)
        bodies = [request(replica.port, "GET", "/metrics").body.decode() for replica in self.replicas]
        return [sum(int(count) for count in pattern.findall(body)) for body in bodies]


def with_ports(text, port, ports):
    """The configuration with these ports, and as many replicas."""
    lines, servers = [], iter(ports)
    for line in text.splitlines(keepends=True):
        if found := re.search(r"127\.0\.0\.1:850\d", line):
            server = next(servers, None)
            line = line.replace(found.group(), f"127.0.0.1:{server}") if server else ""
        lines.append(line.replace("127.0.0.1:8484", f"127.0.0.1:{port}"))
    return "".join(lines)


FAILURES = []


def check(is_right, what):
    print(f"{'ok  ' if is_right else 'FAIL'} {what}", flush=True)
    if not is_right:
        FAILURES.append(what)


def check_affinity(site):
    for header in ("X-Session-Id", "x-session-affinity", "session_id", "thread-id"):
        homes = set()
        for session in range(12):
            before = site.generated()
            for number in range(3):
                body = {k: v for k, v in turn(f"{number}").items() if k != "session_append"}
                reply = request(site.port, "POST", CHAT, body, f"affinity-{header}-{session}", header)
                if reply.status != 200:
                    return check(False, f"affinity: {header}: {reply.status} {reply.body[:200]}")
                time.sleep(0.05)  # HAProxy counts a request a little longer, and its bound would send the next one elsewhere
            for _ in range(100):  # a turn is counted after its answer
                after = site.generated()
                if sum(after) == sum(before) + 3 * 12:
                    break
                time.sleep(0.02)
            used = [n for n, (a, b) in enumerate(zip(before, after)) if a != b]
            if len(used) != 1:
                return check(False, f"affinity: {header}: one session at replicas {used}")
            homes.update(used)
        check(len(homes) > 1, f"affinity: {header}: 12 sessions, 3 requests each at one replica; {len(homes)} replicas used")


def check_streams(site):
    reply = request(site.port, "POST", CHAT, turn("count", stream=True, max_tokens=200), "stream")
    check(reply.is_finished() and reply.num_reads > 20, f"streams: 200 tokens arrived in {reply.num_reads} reads")


def check_drain(site):
    """SIGTERM while streams run at every replica and other requests keep coming."""
    began = [threading.Event() for _ in range(6)]
    replies, refused, stop = [], [], threading.Event()

    def stream(number):
        body = turn("long", stream=True, max_tokens=1900)
        replies.append(request(site.port, "POST", CHAT, body, f"drain-{number}", on_event=lambda _: began[number].set()))

    def ask(number):
        for count in range(2000):
            if stop.is_set():
                return
            reply = request(site.port, "POST", CHAT, turn("short", max_tokens=2), f"ask-{number}-{count % 40}-{count // 200}")
            if reply.status != 200:
                refused.append((reply.status, reply.body[:100]))

    threads = [threading.Thread(target=stream, args=(number,), daemon=True) for number in range(6)]
    askers = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for event in began:
        event.wait(REQUEST_LIMIT)
    replica = site.replicas[0]
    replica.signal(signal.SIGTERM)
    num_running = sum(thread.is_alive() for thread in threads)
    for thread in askers:
        thread.start()
    for thread in threads:
        thread.join(timeout=2 * REQUEST_LIMIT)
    try:
        code = replica.process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        code = "none"
    stop.set()
    for thread in askers:
        thread.join(timeout=REQUEST_LIMIT)
    whole = sum(reply.is_finished() for reply in replies)
    check(whole == 6 and num_running > 0 and code == 0, f"drain: {whole} of 6 streams whole ({num_running} ran at SIGTERM), exit code {code}")
    check(not refused, f"drain: {len(refused)} other requests refused {refused[:2]}")
    replica.start()
    replica.wait_ready()


def check_move(site):
    check_move_from(site, is_killed=False)
    check_move_from(site, is_killed=True)


def check_move_from(site, is_killed):
    name = f"move-{'killed' if is_killed else 'alive'}"
    first, second = site.replicas[:2]
    long = f"{name} " + "all sheep look up " * 40
    for text in (long, "and then?"):
        before = request(first.port, "POST", CHAT, turn(text), name).json()
    held = before["usage"]["total_tokens"]
    time.sleep(0.5)  # the pages are written after the turn
    if is_killed:
        first.kill()
    reply = request(second.port, "POST", CHAT, turn("go on"), name)
    body = reply.json()
    timings, usage = body.get("timings", {}), body.get("usage", {})
    cached = timings.get("cached_tokens", 0)
    check(reply.status == 200 and body["llmctl"]["kept_turns"] == 2 and cached >= held - 64,
          f"move: first replica {'killed' if is_killed else 'alive'}: the session had {held} tokens, the prompt "
          f"{usage.get('prompt_tokens')}; {cached} of them not computed again ({timings.get('resume_reason')})")
    if is_killed:
        first.start()
        first.wait_ready()


def check_stuck(site):
    """A holder that is stopped in the middle of a turn: its lock is not taken from it; one that is killed loses it."""
    first, second = site.replicas[:2]
    began = threading.Event()

    def stream():
        body = turn("long", stream=True, max_tokens=1500)
        try:
            request(first.port, "POST", CHAT, body, "stuck", on_event=lambda _: began.set())
        except OSError:
            pass

    request(first.port, "POST", CHAT, turn("first"), "stuck")
    thread = threading.Thread(target=stream, daemon=True)
    thread.start()
    began.wait(REQUEST_LIMIT)
    first.signal(signal.SIGSTOP)
    reply = request(second.port, "POST", CHAT, turn("second"), "stuck")
    code = reply.json().get("error", {}).get("code")
    check((reply.status, code) == (409, "session_busy"), f"stuck: another replica answers {reply.status} {code}")
    first.kill()
    thread.join(timeout=REQUEST_LIMIT)
    reply = request(second.port, "POST", CHAT, turn("second"), "stuck")
    kept = reply.json().get("llmctl", {}).get("kept_turns")
    check(reply.status == 200 and kept == 1, f"stuck: after its kill {reply.status}, {kept} finished turn kept")
    first.start()
    first.wait_ready()


class Client(threading.Thread):
    """Adds turns to sessions of its own, and remembers those that have ended for it."""

    def __init__(self, site, number, stop):
        super().__init__(daemon=True)
        self.site, self.number, self.stop = site, number, stop
        self.finished, self.counts = {}, {}

    def run(self):
        rng = random.Random(self.number)
        for count in range(1_000_000):
            if self.stop.is_set():
                return
            session = f"kills-{self.number}-{count // TURNS_PER_SESSION}"
            text = f"turn {count}"
            body = turn(text, stream=rng.random() < 0.5, max_tokens=rng.randrange(4, 60))
            outcome = self.ask(session, text, body)
            self.counts[outcome] = self.counts.get(outcome, 0) + 1

    def ask(self, session, text, body):
        try:
            reply = request(self.site.port, "POST", CHAT, body, session)
        except OSError as error:
            return f"no answer ({type(error).__name__})"
        if reply.is_finished():
            self.finished.setdefault(session, []).append((text, reply.text()))
            return "finished"
        if reply.events is None:
            return f"status {reply.status} {reply.error_code()}"
        return "a stream ended in the middle" if reply.events else "a stream ended before its first token"


def check_kills(site):
    stop = threading.Event()
    clients = [Client(site, number, stop) for number in range(site.args.clients)]
    for client in clients:
        client.start()
    rng, began = random.Random(1), time.monotonic()
    num_kills = 0
    while num_kills < site.args.kills and time.monotonic() - began < site.args.limit:
        replica = rng.choice(site.replicas)
        time.sleep(rng.uniform(0.5, 1.5) * site.args.pause)
        replica.kill()
        num_kills += 1
        replica.start()
        replica.wait_ready()
    stop.set()
    for client in clients:
        client.join(timeout=REQUEST_LIMIT)
    took = time.monotonic() - began
    lost, doubled, num_finished = [], 0, 0
    for client in clients:
        for session, turns in client.finished.items():
            saved = saved_turns(site, session)
            num_finished += len(turns)
            lost += [(session, text) for text, answer in turns if (text, answer) not in saved]
            doubled += sum(sum(text == question for question, _ in saved) - 1 for text, answer in turns
                           if (text, answer) in saved)
    counts = {}
    for client in clients:
        for outcome, count in client.counts.items():
            counts[outcome] = counts.get(outcome, 0) + count
    check(num_kills == site.args.kills and num_finished > 0 and not lost,
          f"kills: {num_kills} in {took:.0f} s, {num_finished} finished turns, {len(lost)} lost, {doubled} saved twice {lost[:2]}")
    print(f"     requests: {json.dumps(counts, sort_keys=True)}")


def saved_turns(site, session):
    """The questions and answers of a session and its branches."""
    reply = request(site.replicas[0].port, "GET", f"/v1/sessions/{session}?messages=true")
    messages = reply.json().get("messages", []) if reply.status == 200 else []
    pairs = zip(messages, messages[1:])
    return [(a["content"], b["content"]) for a, b in pairs if (a["role"], b["role"]) == ("user", "assistant")]


CHECKS = {"affinity": check_affinity, "streams": check_streams, "drain": check_drain, "move": check_move, "stuck": check_stuck,
          "kills": check_kills}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llmctl", default=f"{ROOT}/target/release/llmctl")
    parser.add_argument("--model", default=f"{ROOT}/tests/parity/llama")
    parser.add_argument("--proxy", choices=["nginx", "haproxy"], required=True)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--pause", type=float, default=1.4, help="mean seconds from a replica's start to the next kill")
    parser.add_argument("--limit", type=float, default=1200, help="seconds for all kills")
    parser.add_argument("--checks", default=",".join(CHECKS), help="those to run, separated by commas")
    parser.add_argument("--keep", action="store_true", help="keep the folder with logs and sessions")
    args = parser.parse_args()
    if shutil.which(args.proxy) is None:
        print(f"skipped: {args.proxy} is not installed")
        sys.exit(NO_PROXY)
    folder = tempfile.mkdtemp(prefix="llmctl-replicas-")
    print(f"== {args.replicas} replicas behind {args.proxy}", flush=True)
    site = Site(args, folder)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by a signal"))
    try:
        site.start()
        for name in args.checks.split(","):
            CHECKS[name](site)
    finally:
        site.stop()
        if args.keep or FAILURES:
            print(f"logs and sessions: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    sys.exit(1 if FAILURES else 0)


if __name__ == "__main__":
    main()
