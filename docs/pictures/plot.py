"""Draws the table of README's section "Speed" as docs/pictures/speed.svg.

    python docs/pictures/plot.py

Needs nothing but Python. The table is the only source, so that picture and text cannot differ; a test of docs.rs compares them. Each measure has a
panel of its own, with bars on one common scale and a line at 1, where llmctl is as fast as llama.cpp. Colours follow the reader's
preference for dark or light.
"""

import html
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
LABEL_WIDTH, PANEL_WIDTH, GAP = 214, 176, 28
ROW_HEIGHT, BAR_HEIGHT, TOP, BOTTOM = 24, 14, 58, 30
# Peak memory is better below 1: it stays in the table.
LEFT_OUT = "peak memory"

STYLE = """
text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:#1f2328}
.title{font-weight:600}.note{font-size:12px;fill:#59636e}.value{font-size:12px}
.bar{fill:#0969da}.one{stroke:#59636e;stroke-dasharray:3 3}.page{fill:#ffffff}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.note{fill:#9198a1}.bar{fill:#4493f8}.one{stroke:#9198a1}.page{fill:#0d1117}}
"""


def table(readme):
    """Returns the names of the measures, and per model its name and figures as they are written (None where nothing was measured)."""
    section = readme.split("\n## Speed\n", 1)[1]
    lines = section.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    measures = rows[0][1:]
    models = [(row[0], [cell or None for cell in row[1:]]) for row in rows[2:]]
    return measures, models


def text(x, y, words, kind="", anchor="start"):
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{html.escape(words)}</text>'


def panel(x, name, values, most):
    """One measure: its name, a bar and a figure per model, and the line at 1."""
    scale = (PANEL_WIDTH - 34) / most
    bottom = TOP + len(values) * ROW_HEIGHT
    parts = [text(x, TOP - 14, name, "title")]
    for number, value in enumerate(values):
        y = TOP + number * ROW_HEIGHT
        if value is None:
            continue
        width = float(value) * scale
        parts.append(f'<rect class="bar" x="{x}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT}" rx="2"/>')
        parts.append(text(x + width + 5, y + 12, value, "value"))
    parts.append(f'<line class="one" x1="{x + scale:.1f}" x2="{x + scale:.1f}" y1="{TOP - 6}" y2="{bottom}"/>')
    return parts


def picture(measures, models):
    shown = [(name, [values[column] for _, values in models]) for column, name in enumerate(measures) if name != LEFT_OUT]
    most = max(float(value) for _, values in shown for value in values if value is not None)
    width = LABEL_WIDTH + len(shown) * (PANEL_WIDTH + GAP)
    height = TOP + len(models) * ROW_HEIGHT + BOTTOM
    title = "Speed of llmctl over that of llama.cpp, on the same files and two threads"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
        text(12, 22, title, "title"),
    ]
    parts += [text(12, TOP + number * ROW_HEIGHT + 12, name) for number, (name, _) in enumerate(models)]
    for number, (name, values) in enumerate(shown):
        parts += panel(LABEL_WIDTH + number * (PANEL_WIDTH + GAP), name, values, most)
    parts.append(text(12, height - 10, "Dashed: as fast as llama.cpp. Each row is one interleaved run; no bar: not measured.", "note"))
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    measures, models = table((ROOT / "README.md").read_text())
    (ROOT / "docs/pictures/speed.svg").write_text(picture(measures, models))
