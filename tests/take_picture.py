"""Takes the picture of the playground in the README; for a quiet machine, as it shows a speed.

    .venv/bin/python tests/take_picture.py docs/playground.png

Starts ``pilotfish up`` with the tree-growing head of the package, asks two questions as a person would, chooses a round
whose tree was kept far down, and prints the speed that the picture shows.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from browser import Page, browsing, find_chromium
from PIL import Image

QUESTIONS = ("Who was Isaac Newton?", "Name three fish.")
MAX_TOKENS = 100
FLAGS = ("--draft-length", "4", "--draft-tree", "8")  # so that there is a tree to see, whatever pays on this machine
WIDTH, HEIGHT, SCALE = 1280, 720, 1.25

BEST_ROUND = """panel.run.rounds
    .map((round, index) => [index ? round.accepted * 100 + (round.proposal?.nodes.length ?? 0) : 0, index])
    .sort((a, b) => b[0] - a[0])[0][1]"""


@contextmanager
def serving(flags: list[str]) -> Iterator[str]:
    """``pilotfish up``; yields where its page is."""
    argv = [sys.executable, "-m", "pilotfish", "up", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", *flags]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            address = re.search(r" http=(\S+)", ready)
            if address is None:
                sys.exit("`pilotfish up` did not start")
            yield f"http://{address[1]}/"
        finally:
            process.terminate()


def ask(page: Page, question: str, answers: int) -> None:
    """Asks, and waits for the end of the answer, which is the so-many-th."""
    page.look("$('message').focus()")
    page.type(question)
    page.press("Enter")
    page.wait(f"running === null && document.querySelectorAll('.lane footer span').length === {answers}")


def take(page: Page, url: str, file: Path) -> str:
    """Takes the picture; the speed that it shows."""
    page.size(WIDTH, HEIGHT, scale=SCALE)
    page.open(url)
    page.wait("model !== null")
    page.look(f"$('max_completion_tokens').value = {MAX_TOKENS}, 0")
    for count, question in enumerate(QUESTIONS, start=1):
        ask(page, question, count)
    page.look(f"panel.show(panel.run, {BEST_ROUND}), panel.paint(), 0")
    page.screenshot(file)
    with Image.open(file) as picture:
        picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            file, optimize=True
        )
    return str(page.look("$('speed').textContent"))


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="PNG to write")
    parser.add_argument("--draft", default="smollm2-eagle3", help="drafter (default: %(default)s)")
    arguments = parser.parse_args()
    executable = find_chromium()
    if executable is None:
        sys.exit("no Chromium: none on the path, and PILOTFISH_CHROMIUM names none")
    with (
        tempfile.TemporaryDirectory() as profile,
        serving(["--draft", arguments.draft, *FLAGS]) as url,
        browsing(executable, Path(profile)) as page,
    ):
        speed = take(page, url, arguments.file)
    print(f"{arguments.file} shows {speed} tokens/s")


if __name__ == "__main__":
    main()
