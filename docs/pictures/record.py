"""Records a session with the built-in model in a real terminal, as docs/pictures/chat.svg.

    cargo build --release --locked && python docs/pictures/record.py target/release/llmctl

Needs Linux, bash and pyte (PyPI). A shell runs in a pseudo-terminal with a home of its own; keys are typed at a fixed pace, what the
programs print is kept with its times, and pauses are cut to a second. Nothing of the picture is written by hand.

The SVG animates each line of the screen by itself (CSS, no script, so that it plays inside <img>). It begins with the last screen, so that
a still of it says something; readers who have asked for reduced motion see only that.
"""

import argparse
import html
import os
import pathlib
import pty
import re
import select
import signal
import struct
import fcntl
import tempfile
import termios
import time

import pyte

COLUMNS, LINES = 96, 28
KEY_SECONDS, PAUSE_SECONDS = 0.045, 1.0
SECONDS_BEFORE, SECONDS_AFTER = 3.0, 6.0
LONGEST_WAIT_SECONDS = 60
CELL_WIDTH, LINE_HEIGHT, MARGIN, TITLE_HEIGHT = 8.4, 19, 16, 34
COLORS = {
    "default": "#e6edf3", "black": "#6e7681", "red": "#ff7b72", "green": "#3fb950", "brown": "#d29922", "blue": "#58a6ff",
    "magenta": "#bc8cff", "cyan": "#39c5cf", "white": "#b1bac4", "brightblack": "#8b949e", "brightred": "#ffa198",
    "brightgreen": "#56d364", "brightbrown": "#e3b341", "brightblue": "#79c0ff", "brightmagenta": "#d2a8ff",
    "brightcyan": "#56d4dd", "brightwhite": "#ffffff",
}


class Recording:
    """A shell in a pseudo-terminal, and the screens that it has shown: pairs of seconds and lines."""

    def __init__(self, folder, program):
        self.screen = pyte.Screen(COLUMNS, LINES)
        self.stream = pyte.ByteStream(self.screen)
        self.seconds, self.frames, self.unread = 0.0, [], b""
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            environment = {
                "HOME": folder, "PATH": f"{program.parent}:/usr/bin:/bin", "TERM": "xterm-256color", "PS1": "\\[\\e[32m\\]$\\[\\e[0m\\] ", "LANG": "C.UTF-8",
                "BASH_SILENCE_DEPRECATION_WARNING": "1",
            }
            os.chdir(folder)
            os.execve("/bin/bash", ["bash", "--norc", "--noprofile", "-i"], environment)
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self.screen.write_process_input = lambda text: os.write(self.terminal, text.encode())

    def lines(self):
        return tuple(tuple(runs_of(self.screen.buffer[y])) for y in range(LINES))

    def keep(self):
        lines = self.lines()
        if not self.frames or self.frames[-1][1] != lines:
            self.frames.append((self.seconds, lines))

    def read(self, wait_seconds):
        """Feeds what has arrived within `wait_seconds` to the screen; false if that is nothing."""
        begun = time.monotonic()
        if not select.select([self.terminal], [], [], wait_seconds)[0]:
            return False
        self.seconds += min(time.monotonic() - begun, PAUSE_SECONDS)
        data = self.unread + os.read(self.terminal, 65536)
        end = data.rfind(b"\x1b")
        whole = len(data) if end < 0 or re.match(rb"\x1b(\[[0-9;?]*[@-~]|[^\[])", data[end:]) else end
        self.unread = data[whole:]
        self.stream.feed(shown_faint(data[:whole]))
        self.keep()
        return True

    def until(self, prompt):
        """Waits until the last line of text begins with `prompt` and nothing more arrives."""
        deadline = time.monotonic() + LONGEST_WAIT_SECONDS
        while time.monotonic() < deadline:
            if self.read(0.3):
                continue
            before_cursor = self.screen.display[self.screen.cursor.y][: self.screen.cursor.x]
            if re.fullmatch(prompt, before_cursor):
                self.seconds += PAUSE_SECONDS
                return
        raise SystemExit("no prompt; the screen is:\n" + "\n".join(self.screen.display))

    def type(self, text):
        for key in text:
            os.write(self.terminal, key.encode())
            while self.read(0.05):
                pass
            self.seconds += KEY_SECONDS
        os.write(self.terminal, b"\r")

    def kill_program(self):
        """Sends SIGKILL to the program that the shell runs."""
        children = pathlib.Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)


def shown_faint(data):
    """Faint text as grey: pyte does not know it."""
    def replace(match):
        codes = [b"90" if code == b"2" else b"22;39" if code == b"22" else code for code in match[1].split(b";")]
        return b"\x1b[" + b";".join(codes) + b"m"

    # The colours of 256 and of RGB have a 2 or a number of their own in them.
    return re.sub(rb"\x1b\[((?!.?8;)[0-9;]+)m", replace, data)


def runs_of(row):
    """The texts of a line that look alike: (column, text, colour, bold, italic)."""
    runs = []
    for x in range(COLUMNS):
        cell = row[x]
        look = (cell.fg, cell.bold, cell.italics)
        if runs and runs[-1][2:] == look:
            runs[-1] = (runs[-1][0], runs[-1][1] + cell.data, *look)
        else:
            runs.append((x, cell.data, *look))
    return [run for run in runs if run[1].strip()]


def text_element(run, y):
    column, text, color, bold, italic = run
    column += len(text) - len(text.lstrip())
    text = text.strip()
    fill = COLORS.get(color) or f"#{color}"
    style = (' font-weight="bold"' if bold else "") + (' font-style="italic"' if italic else "")
    return (f'<text x="{column * CELL_WIDTH:.1f}" y="{y:g}" textLength="{len(text) * CELL_WIDTH:.1f}" fill="{fill}"{style}>'
            f"{html.escape(text, quote=False)}</text>")


def line_film(y, frames, total):
    """All states of one line below each other, and the animation that shows one after the other."""
    states = []
    for seconds, lines in frames:
        if not states or states[-1][1] != lines[y]:
            states.append((seconds, lines[y]))
    if len(states) == 1 and not states[0][1]:
        return "", ""
    texts = "".join(text_element(run, n * LINE_HEIGHT + 14) for n, (_, runs) in enumerate(states) for run in runs)
    steps = "".join(f"{100 * seconds / total:.2f}%{{transform:translateY({-n * LINE_HEIGHT}px)}}" for n, (seconds, _) in enumerate(states))
    rest = -(len(states) - 1) * LINE_HEIGHT
    css = f"#l{y}{{transform:translateY({rest}px);animation:k{y} {total:.1f}s steps(1) infinite}}@keyframes k{y}{{{steps}}}\n"
    width, top = COLUMNS * CELL_WIDTH, y * LINE_HEIGHT
    return css, f'<svg y="{top}" width="{width:g}" height="{LINE_HEIGHT}"><g id="l{y}">{texts}</g></svg>\n'


def drawn(frames, title):
    used = max(y for _, lines in frames for y in range(LINES) if lines[y]) + 1
    width, height = COLUMNS * CELL_WIDTH + 2 * MARGIN, used * LINE_HEIGHT + 2 * MARGIN + TITLE_HEIGHT - 8
    total = frames[-1][0] + SECONDS_AFTER
    films = [line_film(y, frames, total) for y in range(used)]
    dots = "".join(f'<circle cx="{20 + 20 * n}" cy="18" r="6" fill="{color}"/>' for n, color in enumerate(["#ff5f56", "#ffbd2e", "#27c93f"]))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n"
        'text{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono","Liberation Mono",monospace;font-size:14px;white-space:pre}\n'
        + "".join(css for css, _ in films)
        + "@media (prefers-reduced-motion:reduce){g{animation:none!important}}\n</style>\n"
        f'<rect x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="9" fill="#0d1117" stroke="#30363d"/>\n{dots}\n'
        f'<svg x="{MARGIN}" y="{TITLE_HEIGHT + 8}">\n' + "".join(film for _, film in films) + "</svg>\n</svg>\n"
    )


def recorded_chat(program):
    shell, chat = r"\$ ", r".*> "
    with tempfile.TemporaryDirectory() as folder:
        recording = Recording(folder, program)
        recording.until(shell)
        recording.type('llmctl run "How do I stop an answer?"')
        recording.until(shell)
        recording.type("llmctl chat --model guide --session demo")
        recording.until(chat)
        recording.type("What does serve do?")
        recording.until(chat)
        recording.kill_program()
        recording.until(shell)
        recording.type("llmctl chat -c")
        recording.until(chat)
        recording.type("And what is bench?")
        recording.until(chat)
        recording.type("/why")
        recording.until(chat)
        recording.kill_program()
        os.close(recording.terminal)
        os.waitpid(recording.pid, 0)
    begun = next(seconds for seconds, lines in recording.frames if any(lines))
    played = [(seconds - begun + SECONDS_BEFORE, lines) for seconds, lines in recording.frames if seconds >= begun]
    return [(0.0, played[-1][1]), *played]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "chat.svg")
    arguments = parser.parse_args()
    frames = recorded_chat(arguments.program.resolve())
    title = "llmctl answers a question, is killed in a conversation, and continues where it was"
    arguments.out.write_text(drawn(frames, title))
    print(f"{arguments.out}: {len(frames)} screens, {frames[-1][0]:.0f} s, {arguments.out.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
