"""Draws the loss and the generated-answer scores of a run as SVG: `python plot.py LOG.jsonl OUT.svg`."""

import json
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP = 760, 300, 60, 30
SHOWN = {"frames": "#1b6ca8", "synonyms": "#7a3e9d", "free": "#c0392b", "followups": "#d68910", "oos": "#1e8449", "tools1": "#555555", "tools3": "#999999",
         "results": "#17a2b8"}


def curve(points, most_x, most_y, top):
    at = lambda x, y: f"{LEFT + WIDTH * x / most_x:.1f},{top + HEIGHT * (1 - min(y / most_y, 1)):.1f}"
    return " ".join(at(x, y) for x, y in points)


def frame(top, most_x, most_y, title, unit):
    lines = [f'<text x="{LEFT}" y="{top - 10}" font-weight="bold">{title}</text>']
    for n in range(5):
        y = top + HEIGHT * (1 - n / 4)
        lines.append(f'<path d="M{LEFT} {y}H{LEFT + WIDTH}" stroke="#ddd"/><text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{most_y * n / 4:g}{unit}</text>')
        x = LEFT + WIDTH * n / 4
        lines.append(f'<text x="{x}" y="{top + HEIGHT + 18}" text-anchor="middle">{most_x * n / 4 / 1e6:.1f}M</text>')
    return lines


def main():
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    losses = [(r["tokens"], r["loss"]) for r in rows if "loss" in r]
    scores = [(r["tokens"], r["scores"]) for r in rows if "scores" in r]
    most = max(x for x, _ in losses)
    below = TOP + HEIGHT + 70
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 130}" height="{below + HEIGHT + 40}" font-family="sans-serif" font-size="12">',
             '<rect width="100%" height="100%" fill="white"/>']
    parts += frame(TOP, most, 4, "loss per target over tokens seen", "")
    parts.append(f'<polyline fill="none" stroke="#1b6ca8" points="{curve(losses, most, 4, TOP)}"/>')
    parts += frame(below, most, 100, "right answers, samples of 30", "%")
    for n, (name, color) in enumerate(SHOWN.items()):
        points = [(x, s[name][0]) for x, s in scores if name in s]
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="{curve(points, most, 100, below)}"/>')
        parts.append(f'<text x="{LEFT + WIDTH + 12}" y="{below + 16 * n + 12}" fill="{color}">{name}</text>')
    Path(sys.argv[2]).write_text("\n".join(parts) + "\n</svg>\n")


if __name__ == "__main__":
    main()
