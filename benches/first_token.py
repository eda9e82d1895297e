#!/usr/bin/env python3
"""From the start of a process to its first byte of answer: `llmctl run` beside llama.cpp, in turns.

  python benches/first_token.py MODEL.gguf... [--llmctl FILE] [--cold] [-r N] [-t N]

Needs llama-cpp-python built for this machine. llmctl's time is that of the whole command: start, template, tokenizer, weights, prompt,
first token. llama.cpp's begins where its library starts to load, and ends with the first token of a prompt of eight tokens: no start of
a process, no template, no sampler. So the ratio is a lower bound of that to its command line. `--cold` drops the files that both read
from the page cache before each turn. `guide` is the model inside llmctl, which llama.cpp does not have.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from peers import OPTIONS

PROMPT = "Say hello."


def drop(paths):
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def ours(args, model, home):
    command = [args.llmctl, "run", "--model", model, "--threads", str(args.threads), "--no-stdin", "--temperature", "0", "-n", "8"]
    raw = [] if model == "guide" else ["--raw"]  # a prompt of a few tokens on both sides
    environment = {**os.environ, "XDG_CACHE_HOME": home, "XDG_STATE_HOME": home}
    start = time.perf_counter()
    with subprocess.Popen([*command, *raw, PROMPT], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        first = os.read(process.stdout.fileno(), 1)
        seconds = time.perf_counter() - start
        _, told = process.communicate()
    if process.returncode or not first:
        sys.exit(f"{' '.join(command)}: {told.decode()}")
    return seconds


def theirs(args, model, option):
    worker = [sys.executable, str(Path(__file__).with_name("peers.py")), "llama.cpp", option, "", model, str(args.threads), "2048"]
    answer = json.loads(subprocess.run(worker, stdin=subprocess.DEVNULL, capture_output=True, check=True, text=True).stdout.splitlines()[0])
    return answer["ready_s"] if "ready_s" in answer else sys.exit(answer["absent"])


def measure(args, model, home):
    """Medians in seconds: the first start, which packs weights; later ones; llama.cpp with the better of its options."""
    files = lambda: [Path(model), *Path(home).glob("**/*.panels")] if args.cold else []
    drop(path for path in files() if path.exists())
    first, later, peer = ours(args, model, home), [], {option: [] for option in OPTIONS["llama.cpp"]}
    while list(Path(home).glob("**/*.part")):
        ours(args, model, home)
    for _ in range(args.repeat):
        drop(path for path in files() if path.exists())
        later.append(ours(args, model, home))
        for option, times in peer.items() if model != "guide" else ():
            drop(path for path in files() if path.exists())
            times.append(theirs(args, model, option))
    return first, statistics.median(later), min((statistics.median(times) for times in peer.values() if times), default=None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--llmctl", default=str(Path(__file__).resolve().parent.parent / "target/release/llmctl"))
    parser.add_argument("--cold", action="store_true", help="from disk, not from the page cache")
    parser.add_argument("-r", "--repeat", type=int, default=5)
    parser.add_argument("-t", "--threads", type=int, default=2)
    args = parser.parse_args()
    print("| model | llmctl, first start, ms | later, ms | llama.cpp, ms | ratio |\n|---|---|---|---|---|")
    for model in args.models:
        with tempfile.TemporaryDirectory() as home:
            first, later, peer = measure(args, model, home)
        ratio = f"{1e3 * peer:.0f} | {peer / later:.2f}" if peer else " | "
        print(f"| {Path(model).stem} | {1e3 * first:.0f} | {1e3 * later:.0f} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
