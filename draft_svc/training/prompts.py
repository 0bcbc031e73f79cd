"""``pilotfish train prompts``: questions for a target to answer, from free sources.

Always at hand: our own templates for sums and for writing, and Python's standard library: heads of functions to be
completed, whole functions to be explained, passages of its reference to be summed up. The last two are long, up to some
thousand tokens, because a head that has seen short prompts alone drafts badly behind long ones. Wheels that are named
add to them. Benchmarks are never a source: whoever measures on GSM8K or HumanEval may not train on copies of them.

=====================  ====================================  ===================================
wheel                  gives                                 licence
=====================  ====================================  ===================================
(templates)            sums in words, writing                ours, Apache-2.0
(standard library)     functions, passages of the reference  PSF-2.0
``reasoning_gym``      programming tasks (its codeio data)   Apache-2.0
``chatterbot_corpus``  questions of small talk and support   BSD-3-Clause
``ifcraftcorpus``      passages to be summed up              text CC-BY-4.0, code MIT
=====================  ====================================  ===================================
"""

from __future__ import annotations

import ast
import gzip
import json
import re
import sysconfig
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import NamedTuple

from pilotfish.errors import InvalidArgumentError, NotFoundError

_MOST_PER_SOURCE = 1500

_NAMES = ("Anna", "Ben", "Carla", "David", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jamal", "Keiko", "Liam", "Maya")
_SUMS = (
    "{a} has {x} apples and buys {y} more. {b} takes {z} of them. How many apples does {a} have left?",
    "A shop sells pencils for ${x} a box. {a} buys {z} boxes and pays with ${big}. How much change does {a} get?",
    "{a} reads {x} pages on each weekday and {y} pages on each day of the weekend. How many are these in {z} weeks?",
    "A train travels {x} miles an hour for {z} hours and then {y} miles an hour for {w} hours. How far does it go?",
    "{a} is {x} years older than {b}. In {z} years the sum of their ages will be {big}. How old is {b} now?",
    "A farmer has {x} rows of {y} trees each. {w} trees die in a storm, half of the rest bear fruit. How many do?",
    "{a} earns ${x} an hour and works {z} hours a day, {w} days a week. How much does {a} earn in 4 weeks?",
    "A tank of {big} liters is filled at {x} liters a minute and leaks {w} liters a minute. When is it full?",
    "{a}, {b} and {c} share {big} marbles. {a} gets twice as many as {b}, and {c} {w} more than {b}. What gets {b}?",
    "A recipe needs {w} cups of flour for {z} cookies. How many cups does {a} need for {big} cookies?",
    "{a} buys a bicycle for ${big} with a {y}% discount. Tax adds {w}%. What is the final price?",
    "{a} walks {x} steps on Monday, {y} more on Tuesday, and twice as many on Wednesday as on Monday. How many in all?",
    "There are {x} students in a class. {y}% of them play soccer, and {z} play tennis. How many play neither?",
    "{a} bakes {x} muffins every morning, eats {w} and sells the rest for ${z} each. How much does {a} make in a week?",
)
# fmt: off
_TOPICS = (
    "the French Revolution", "photosynthesis", "black holes", "machine learning", "climate change",
    "the Roman Empire", "jazz music", "quantum computing", "vaccines", "volcanoes", "the stock market",
    "ancient Egypt", "electric cars", "gardening", "time management", "public speaking", "healthy breakfasts",
    "coral reefs", "space travel", "the printing press", "remote work", "chess openings", "coffee", "meditation",
    "dinosaurs", "the human heart", "inflation", "renewable energy", "Shakespeare", "cybersecurity",
    "a lighthouse keeper", "a lost dog", "a city in the clouds", "a robot that learns to paint", "two rival bakers",
    "an old library", "a desert caravan", "a football match", "a snowstorm", "a family dinner",
    "moving to a new city", "learning a language", "saving money", "job interviews", "houseplants",
    "running a marathon", "tea", "bridges", "bees", "the moon landing", "democracy", "plate tectonics",
    "Newton's laws", "the water cycle", "DNA", "supply and demand", "the Silk Road", "impressionism", "blockchain",
    "sleep",
)
# fmt: on
_WRITING = (
    "Write a short story about {t}.",
    "Explain {t} to a child.",
    "List five facts about {t}.",
    "Write a poem about {t}.",
    "What are the pros and cons of {t}?",
    "Write a blog post about {t}.",
    "Give me three tips about {t}.",
    "Why is {t} important?",
    "Compare {t} with {u}.",
    "Write an email to a friend about {t}.",
    "Describe {t} in one paragraph.",
    "Create a quiz with four questions about {t}.",
    "What is the history of {t}?",
    "Write a dialogue between two people who discuss {t}.",
    "Write a persuasive essay about {t}.",
    "How does {t} affect our daily lives?",
    "Suggest a title and an outline for an article about {t}.",
    "Imagine you are an expert on {t}. What would you tell a beginner?",
    'Rewrite this sentence in a formal tone: "I really like {t}, it\'s awesome."',
    "Who are famous people connected with {t}?",
    "When did {t} become popular?",
    "Generate a list of ten words related to {t}.",
)
_COMPLETING = (
    "Complete the code I provided.\n\n",
    "Complete this Python function:\n\n",
    "Write the body of this function.\n\n",
)
_EXPLAINING = (
    "Explain what this function does.\n\n",
    "What does this code do, step by step?\n\n",
    "Review this Python function and suggest improvements.\n\n",
)
_PROGRAMMING = ("Write a Python function for this task.\n\n", "Solve this with Python code: ", "")
_SUMMING_UP = (
    "Summarize: ",
    "Summarize the following text:\n\n",
    "Give a short summary of this passage: ",
    "What are the main points here?\n\n",
)

Source = Callable[[zipfile.ZipFile, Random], Iterator[str]]


def gather(wheels: list[Path], seed: int = 0) -> list[dict[str, object]]:
    """Prompts as the lines of a prompt file: ``category`` and ``messages``, shuffled.

    Args:
        wheels: of the module's table.
        seed: of every choice; the same sources and seed give the same prompts.

    Raises:
        NotFoundError: if a wheel is missing.
        InvalidArgumentError: if it is none of those known.
    """
    random = Random(seed)
    found = [pair for wheel in wheels for pair in _of_wheel(wheel, random)]
    found += [("math", text) for text in _sums(random)] + [("write", text) for text in _writing(random)]
    found += [("code", text) for text in _functions(random)] + [("sum", text) for text in _reference(random)]
    found = list(dict.fromkeys(found))
    random.shuffle(found)
    return [{"category": category, "messages": [{"role": "user", "content": text}]} for category, text in found]


def _of_wheel(wheel: Path, random: Random) -> list[tuple[str, str]]:
    """(category, text) of its prompts."""
    category, source = _source(wheel)
    try:
        with zipfile.ZipFile(wheel) as archive:
            texts = list(source(archive, random))
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise InvalidArgumentError(f"{wheel} cannot be read as a wheel ({error}); download it again") from error
    random.shuffle(texts)
    return [(category, text) for text in texts[:_MOST_PER_SOURCE]]


def _source(wheel: Path) -> tuple[str, Source]:
    if not wheel.is_file():
        raise NotFoundError(f"{wheel} does not exist; `pip download --no-deps NAME` fetches a wheel")
    known = {
        "reasoning_gym": ("code", _programming_tasks),
        "chatterbot_corpus": ("qa", _small_talk),
        "ifcraftcorpus": ("sum", _passages),
    }
    name = wheel.name.partition("-")[0].lower()
    if name not in known:
        raise InvalidArgumentError(f"{wheel.name} is no source that is known; these are: {', '.join(sorted(known))}")
    return known[name]


def _sums(random: Random) -> Iterator[str]:
    """Sums in words."""
    for _ in range(_MOST_PER_SOURCE):
        a, b, c = random.sample(_NAMES, 3)
        numbers = {"x": (5, 60), "y": (5, 50), "z": (2, 12), "w": (2, 6), "big": (80, 600)}
        drawn = {name: random.randint(*limits) for name, limits in numbers.items()}
        yield random.choice(_SUMS).format(a=a, b=b, c=c, **drawn)


def _writing(random: Random) -> Iterator[str]:
    for _ in range(_MOST_PER_SOURCE):
        topic, other = random.sample(_TOPICS, 2)
        yield random.choice(_WRITING).format(t=topic, u=other)


def _functions(random: Random) -> Iterator[str]:
    """Of the standard library: heads with docstrings, to be completed, and whole ones, to be explained."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted([*root.glob("*.py"), *root.glob("*/*.py")])
    foreign = {"test", "tests", "idlelib", "site-packages", "dist-packages"}
    found = [each for path in paths if not foreign & set(path.parts) for each in _defined(path)]
    heads, wholes = [each.head for each in found if each.head], [each.whole for each in found if each.is_long]
    for texts, openings in ((heads, _COMPLETING), (wholes, _EXPLAINING)):
        random.shuffle(texts)
        yield from (random.choice(openings) + textwrap.dedent(text) for text in texts[:_MOST_PER_SOURCE])


class _Function(NamedTuple):
    """Source of a function."""

    head: str
    """Up to its docstring; empty if that is no good description."""
    whole: str

    @property
    def is_long(self) -> bool:
        return 800 < len(self.whole) < 5000


def _defined(path: Path) -> Iterator[_Function]:
    """Functions of a module."""
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return  # a file that another Python is meant for
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            is_described = 30 < len(ast.get_docstring(node) or "") < 500
            head = "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]) if is_described else ""
            whole = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            yield _Function(head, whole)


def _reference(random: Random) -> Iterator[str]:
    """Passages of 1,500 to 5,000 characters of Python's language reference, which `help()` carries with it."""
    for _, topic in sorted(topics.items()):
        passage, length = "", random.randint(1500, 5000)
        for paragraph in topic.split("\n\n"):
            passage += f"{paragraph}\n\n"
            if len(passage) > length:
                if len(passage) < 6000:
                    yield random.choice(_SUMMING_UP) + passage.strip()
                passage, length = "", random.randint(1500, 5000)


def _programming_tasks(archive: zipfile.ZipFile, random: Random) -> Iterator[str]:
    for line in gzip.decompress(archive.read("reasoning_gym/data/codeio.jsonl.gz")).decode().splitlines():
        row = json.loads(line)
        task = row.get("task_description") or row.get("query") or ""
        if 40 < len(task) < 1200:
            yield random.choice(_PROGRAMMING) + task.strip()


def _small_talk(archive: zipfile.ZipFile, random: Random) -> Iterator[str]:
    for name in archive.namelist():
        if "/english/" not in name or not name.endswith(".yml"):
            continue
        # Conversations are lists of lists in YAML; a list's first line opens it. Questions that need quotes are few.
        for question in re.findall(r"^ *- - (\w.*\S)\s*$", archive.read(name).decode(), flags=re.MULTILINE):
            if 12 < len(question) < 200:
                yield question


def _passages(archive: zipfile.ZipFile, random: Random) -> Iterator[str]:
    """Runs of sentences of 500 to 2,600 characters."""
    for name in archive.namelist():
        if "/corpus/" not in name or not name.endswith(".md"):
            continue
        essay = re.sub(r"```.*?```", "", archive.read(name).decode(), flags=re.DOTALL)
        prose = re.sub(r"[*_`]", "", re.sub(r"^[#|].*$", "", essay, flags=re.MULTILINE))
        passage, length = "", random.randint(500, 2600)
        for sentence in re.split(r"(?<=[.!?])\s+", re.sub(r"\s+", " ", prose)):
            passage += f" {sentence}"
            if len(passage) > length:
                yield random.choice(_SUMMING_UP) + passage.strip()
                passage, length = "", random.randint(500, 2600)
