#!/usr/bin/env python3
"""Writes the measured tables of docs/speed.md, README's table of speed and its plot from runs of side_by_side.py.

  python benches/speed_page.py

The runs are docs/speed/*.json, one for each processor, as `side_by_side.py --json` writes them; README's table is that of README_RUN. All
figures are ratios of medians to the best of the peers in the same run: above 1 llmctl is faster, for loading and memory below 1 it takes
less. Tests of docs.rs compare README's table with the file, and the plot with the table.
"""
import json
import subprocess
import sys
from pathlib import Path

from side_by_side import OPTIONS, rows_of

REPOSITORY = Path(__file__).resolve().parent.parent
RUNS = REPOSITORY / "docs/speed"
README_RUN = "zen5.json"
README_COLUMNS = ("pp512", "tg128", "tg32@2048", "8 seq", "RSS")
COLUMNS = {
    "pp512": "prompt of 512", "pp4096": "prompt of 4,096", "tg128": "decode", "tg32@2048": "decode after 2,048 tokens",
    "tg32@8192": "decode after 8,192 tokens", "8 seq": "8 sequences together", "32 seq": "32 sequences together", "load": "loading",
    "load, kept": "loading, kept", "RSS": "peak memory",
}
NAMES = {"qwen3-0.6b": "Qwen3-0.6B shape", "qwen3-4b": "Qwen3-4B shape", "llama-3.2-1b": "Llama-3.2-1B shape", "smollm2-135m": "SmolLM2-135M shape",
         "gemma-4-e2b": "Gemma 4 E2B shape", "qwen3-30b-a3b": "Qwen3-30B-A3B shape (6 of 48 layers)", "gpt-oss-20b": "gpt-oss-20b shape (4 of 24 layers)",
         "lfm2-8b-a1b": "LFM2-8B-A1B shape (7 of 24 layers)", "qwen3.5-35b-a3b": "Qwen3.5-35B-A3B shape (4 of 40 layers)"}


def shown(ratio, is_memory):
    return f"{ratio:.2f}" if is_memory or ratio < 1 else f"{ratio:.1f}"


def ratios(result):
    """The ratio of each row that a peer has, as text."""
    found = {}
    for test, ours, best, _, is_rate in rows_of(result):
        top = (max if is_rate else min)((number for number, _ in best.values()), default=None)
        if top:
            found[test] = shown(ours / top, not is_rate)
    return found


def table(results, columns):
    rows = [(f"{NAMES.get(result['shape'], result['shape'])}{', ' if result['type'] else ''}{result['type']}", ratios(result)) for result in results]
    columns = [column for column in columns if any(column in row for _, row in rows)]
    lines = [f"| | {' | '.join(COLUMNS[column] for column in columns)} |", "|" + "---|" * (len(columns) + 1)]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(row.get(column, '') for column in columns)} |".replace("|  |", "| |").replace("|  |", "| |") for name, row in rows)])


def section(name, run):
    """One processor: its table, and the conditions of the run."""
    results, facts = run["results"], [result["facts"] for result in run["results"]]
    versions = {key: version for fact in facts for key, version in fact["versions"].items() if version}
    measured = {key for result in results for row in result["rows"] for key in row["rates"]}
    named = lambda peer, keys: next((key for key in keys if key.startswith(peer)), None)
    peers = [f"{peer} {versions.get(named(peer, versions), '')}".strip() for peer in OPTIONS if named(peer, measured)]
    against = " and ".join([", ".join(peers[:-1]), *peers[-1:]] if len(peers) > 1 else peers)
    limits = lambda key: [fact["limits"][key] for fact in facts if fact["limits"][key]]
    span = lambda values, digits: f"{min(values):,.{digits}f} to {max(values):,.{digits}f}"
    absent = {}
    for result in results:
        for key, why in result["facts"]["absent"].items():
            absent.setdefault(f"{key} ({why})", []).append(f"{result['shape']} {result['type']}".strip())
    text = f"""### {run['processor']}

{run['date']}, commit {run['commit'][:10]}, {run['threads']} threads, {run['rounds']} rounds, kernels {facts[0]['ours']['instruction_set']}; against {against}. Read bandwidth
{span(limits('read_gb_s'), 1)} GB/s, int8 peak {span(limits('int8_gop_s'), 0)} GOP/s between the turns. The file: `docs/speed/{name}`.

{table(results, COLUMNS)}
"""
    return text + "".join(f"\nWithout {key}: {', '.join(files)}.\n" for key, files in sorted(absent.items()))


def replaced(page, begin, end, text):
    """The page with what is between two texts replaced; `begin` stays."""
    before, rest = page.split(begin, 1)
    return before + begin + text + end + rest.split(end, 1)[1]


def main():
    runs = {file.name: json.loads(file.read_text()) for file in sorted(RUNS.glob("*.json"))}
    if README_RUN not in runs:
        sys.exit(f"{RUNS / README_RUN}: not found")
    page, readme = REPOSITORY / "docs/speed.md", REPOSITORY / "README.md"
    sections = "\n".join(section(name, run) for name, run in runs.items())
    page.write_text(replaced(page.read_text(), "\n## Runs\n", "\n## ", f"\n{sections}"))
    readme.write_text(replaced(readme.read_text(), "(docs/pictures/speed.svg)\n\n", "\n\nLoading", table(runs[README_RUN]["results"], README_COLUMNS)))
    subprocess.run([sys.executable, REPOSITORY / "docs/pictures/plot.py"], check=True)


if __name__ == "__main__":
    main()
