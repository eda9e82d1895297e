#!/usr/bin/env python3
"""Simulates replicas of `llmctl serve` behind a proxy under recorded loads: how many replicas a load needs, and what it saves to
keep conversations at one replica. docs/scaling.md has the figures.

    benches/scaling.py [--traces FOLDER] [--prefill 4000] [--decode 25] ...

The model of a replica: `parallel` slots; one prompt is computed at a time, at `prefill` tokens per second; each answer then takes
its slot for its tokens at `decode` tokens per second. It keeps the KV of the `memory` tokens used last, in blocks of 512, as the
trace has them; with a shared folder, KV that another replica computed is read at `restore` tokens per second. Batches do not slow
each other down, so that the figures are bounds from below; the ratios between rows are what to read.

A conversation is what the blocks say: a request that begins with all full blocks of an earlier one, and with more than one block,
continues it. The trace has no names of users. The Azure traces have no contents, so that nothing is reused there.

Traces: mooncake_conversation_trace.jsonl (Mooncake, FAST'25), AzureLLMInferenceTrace_conv.csv and _code.csv (Splitwise, ISCA'24), in
LLMCTL_FIXTURES/corpora/traces.
"""

import argparse
import bisect
import collections
import csv
import datetime
import hashlib
import heapq
import itertools
import json
import os
import random
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BLOCK = 512
MOST_REPLICAS = 512

Request = collections.namedtuple("Request", "at prompt answer blocks conversation")


def mooncake(path, num_requests):
    """Requests with their blocks, and the conversation that each continues."""
    conversations, numbers, requests = {}, itertools.count(), []
    with open(path) as file:
        for line in itertools.islice(file, num_requests):
            row = json.loads(line)
            blocks = tuple(row["hash_ids"])
            known = (conversations.get(blocks[:length]) for length in range(len(blocks), 1, -1))
            conversation = next((number for number in known if number is not None), None)
            if conversation is None:
                conversation = next(numbers)
            conversations[blocks] = conversation
            if len(blocks) > 2:  # the last block may be partly filled; a continuation fills it
                conversations[blocks[:-1]] = conversation
            requests.append(Request(row["timestamp"] / 1000, row["input_length"], row["output_length"], blocks, conversation))
    return requests


def azure(path, num_requests):
    """Requests of which only lengths are known: each is a conversation without blocks."""
    requests = []
    with open(path) as file:
        for number, row in enumerate(itertools.islice(csv.DictReader(file), num_requests)):
            at = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            requests.append(Request(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]), (), number))
    first = requests[0].at
    return [request._replace(at=request.at - first) for request in requests]


class Replica:
    def __init__(self, args):
        self.args = args
        self.slots = [0.0] * args.parallel  # when each is free
        self.prefill_free = 0.0
        self.kept = collections.OrderedDict()  # blocks by last use

    def num_busy(self, now):
        return sum(free > now for free in self.slots)

    def num_kept(self, blocks):
        return sum(1 for _ in itertools.takewhile(self.kept.__contains__, blocks))

    def serve(self, request, shared):
        """Returns the time to the first token, and the prompt tokens computed and restored."""
        here = self.num_kept(request.blocks)
        there = here
        if shared is not None:
            there += sum(1 for _ in itertools.takewhile(shared.__contains__, request.blocks[here:]))
            shared.update(request.blocks)
        reused = min(there * BLOCK, max(request.prompt - 1, 0))
        restored = max(reused - here * BLOCK, 0)
        computed = request.prompt - reused
        begin = max(request.at, heapq.heappop(self.slots), self.prefill_free)
        first = begin + computed / self.args.prefill + restored / self.args.restore
        self.prefill_free = first
        heapq.heappush(self.slots, first + request.answer / self.args.decode)
        self.keep(request.blocks)
        return first - request.at, computed, restored

    def keep(self, blocks):
        for block in blocks:
            self.kept.pop(block, None)
            self.kept[block] = None
        while len(self.kept) * BLOCK > self.args.memory:
            self.kept.popitem(last=False)


class Ring:
    """Consistent hashing, as both proxies do it: 160 points of a circle for each replica."""

    def __init__(self, count):
        points = sorted((self.point(f"{n}-{point}"), n) for n in range(count) for point in range(160))
        self.points, self.owners = [p for p, _ in points], [n for _, n in points]

    @staticmethod
    def point(text):
        return int.from_bytes(hashlib.md5(text.encode()).digest()[:8], "big")

    def owners_from(self, key):
        """The replicas in the order in which a key tries them."""
        at = bisect.bisect(self.points, self.point(str(key)))
        return (self.owners[(at + step) % len(self.owners)] for step in range(len(self.owners)))


def within_bound(ring, key, replicas, now, factor):
    """The first replica of the key whose load stays below `factor` times the mean, as HAProxy's hash-balance-factor."""
    busy = [replica.num_busy(now) for replica in replicas]
    most = factor * (sum(busy) + 1) / len(busy)
    return replicas[next((n for n in ring.owners_from(key) if busy[n] < most), 0)]


def simulate(requests, count, policy, is_shared, args):
    replicas, ring, rng = [Replica(args) for _ in range(count)], Ring(count), random.Random(1)
    shared = set() if is_shared else None
    times, computed, restored = [], 0, 0
    for request in requests:
        if policy == "affinity":
            replica = replicas[next(ring.owners_from(request.conversation))]
        elif policy == "affinity, bounded":
            replica = within_bound(ring, request.conversation, replicas, request.at, args.bound)
        elif policy == "random":
            replica = rng.choice(replicas)
        else:  # least busy
            replica = min(replicas, key=lambda r: (r.num_busy(request.at), r.prefill_free))
        time, new, read = replica.serve(request, shared)
        times.append(time)
        computed, restored = computed + new, restored + read
    times.sort()
    return {"quantile": times[min(int(args.quantile * len(times)), len(times) - 1)], "median": times[len(times) // 2],
            "computed": computed, "restored": restored}


def fewest(requests, policy, is_shared, args):
    """The fewest replicas with which the quantile of the time to the first token keeps the limit: by doubling, then halving."""
    low, high = 0, 1
    while simulate(requests, high, policy, is_shared, args)["quantile"] > args.ttft:
        low, high = high, 2 * high
        if high > MOST_REPLICAS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        is_enough = simulate(requests, middle, policy, is_shared, args)["quantile"] <= args.ttft
        low, high = (low, middle) if is_enough else (middle, high)
    return high


def report(name, requests, ways, args):
    prompts = sum(request.prompt for request in requests)
    hours = (requests[-1].at - requests[0].at) / 3600
    print(f"\n{name}: {len(requests)} requests in {hours:.2f} h, {prompts / len(requests):.0f} prompt and "
          f"{sum(r.answer for r in requests) / len(requests):.0f} answer tokens each, "
          f"{len({r.conversation for r in requests})} conversations")
    print("| routing | KV between replicas | replicas needed | prompt tokens computed | read from disk | median TTFT |")
    print("|---|---|---|---|---|---|")
    for policy, is_shared in ways:
        count = fewest(requests, policy, is_shared, args)
        if count is None:
            print(f"| {policy} | {'shared' if is_shared else 'own'} | more than {MOST_REPLICAS} | | | |")
            continue
        result = simulate(requests, count, policy, is_shared, args)
        print(f"| {policy} | {'shared' if is_shared else 'own'} | {count} | {100 * result['computed'] / prompts:.0f}% | "
              f"{100 * result['restored'] / prompts:.0f}% | {result['median']:.1f} s |", flush=True)


def main():
    fixtures = os.environ.get("LLMCTL_FIXTURES", f"{ROOT}/../shared/fixtures")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", default=f"{fixtures}/corpora/traces")
    parser.add_argument("--requests", type=int, default=None, help="only the first of each trace")
    parser.add_argument("--prefill", type=float, default=4000, help="prompt tokens per second of a replica")
    parser.add_argument("--decode", type=float, default=25, help="answer tokens per second of a stream")
    parser.add_argument("--restore", type=float, default=40000, help="tokens of KV per second from the shared folder")
    parser.add_argument("--parallel", type=int, default=32, help="requests at a time of a replica")
    parser.add_argument("--memory", type=int, default=1_000_000, help="tokens of KV in memory of a replica")
    parser.add_argument("--bound", type=float, default=1.5, help="most load of a replica, by the mean load")
    parser.add_argument("--ttft", type=float, default=20, help="seconds to the first token that the quantile must keep")
    parser.add_argument("--quantile", type=float, default=0.95)
    args = parser.parse_args()
    if not os.path.isdir(args.traces):
        print(f"skipped: no traces in {args.traces}")
        sys.exit(75)
    print(f"replica: {args.prefill:.0f} prompt tokens/s, {args.parallel} streams of {args.decode:.0f} tokens/s, "
          f"{args.memory} tokens of KV in memory, {args.restore:.0f} tokens/s from disk; "
          f"{100 * args.quantile:.0f}% of first tokens within {args.ttft:.0f} s")
    ways = [(policy, is_shared) for policy in ("random", "least busy", "affinity", "affinity, bounded") for is_shared in (False, True)]
    report("Mooncake conversations", mooncake(f"{args.traces}/mooncake_conversation_trace.jsonl", args.requests), ways, args)
    for kind in ("conv", "code"):
        requests = azure(f"{args.traces}/AzureLLMInferenceTrace_{kind}.csv", args.requests)
        report(f"Azure {kind}", requests, [("random", False), ("least busy", False)], args)


if __name__ == "__main__":
    main()
