"""Commands and configurations that the documentation tells readers to type."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import attrs
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for pattern in ("README*.md", "AGENTS.md", "docs/**/*.md", "skills/**/*.md", "plugins/*/README.md")
    for page in ROOT.glob(pattern)
)
SHELLS = {"sh", "bash", "console"}
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w.{}-]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```", re.M | re.S)
_SEPARATORS = {";", "&", "&&", "|", "||", "(", ")"}
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@attrs.frozen
class Block:
    """A block of code of a page.

    Attributes:
        page: Path of the page, from the repository's root.
        line: Line on which it begins.
        language: The language after the three backticks.
        text: The code, without the block's indentation.
        above: The last line above it that is not empty.
    """

    page: str
    line: int
    language: str
    text: str
    above: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@attrs.frozen
class Command:
    """A command line of rlsdk.

    Attributes:
        place: Page and line.
        words: Arguments behind `rlsdk`.
        mentioned: True if it stands within a sentence, where `rlsdk train` alone is only the command's name.
    """

    place: str
    words: tuple[str, ...]
    mentioned: bool

    def __str__(self) -> str:
        return f"{self.place}: rlsdk {shlex.join(self.words)}"


def blocks(page: Path) -> list[Block]:
    """Return the blocks of code of a page.

    Args:
        page: The page.
    """
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        above = [line for line in text[: match.start()].splitlines() if line.strip()]
        code = re.sub(rf"^{match['indent']}", "", match["text"], flags=re.M)
        line = text.count("\n", 0, match.start()) + 1
        name = page.relative_to(ROOT).as_posix()
        found.append(Block(name, line, match["language"], code, above[-1] if above else ""))
    return found


def commands(page: Path) -> Iterator[Command]:
    """Yield the command lines of rlsdk of a page: those of its shell blocks, and those mentioned in sentences.

    Args:
        page: The page.
    """
    for block in blocks(page):
        if block.language in SHELLS:
            for words in shell_commands(block.text):
                yield Command(str(block), words, mentioned=False)
    text = page.read_text(encoding="utf-8")
    prose = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    name = page.relative_to(ROOT).as_posix()
    for match in re.finditer(r"(?<!`)`(rlsdk\s[^`]+)`(?!`)", prose):
        line = prose.count("\n", 0, match.start()) + 1
        for written in spelled_out(match[1]):
            for words in shell_commands(written):
                yield Command(f"{name}:{line}", words, mentioned=True)


def shell_commands(text: str) -> Iterator[tuple[str, ...]]:
    """Yield the arguments of each call of rlsdk in a shell script.

    Args:
        text: The script.
    """
    joined = text.replace("\\\n", " ")
    for line in joined.splitlines():
        lexer = shlex.shlex(re.sub(r"(^|\s)#\s.*$", "", line), posix=True, punctuation_chars=";&|()<>")
        lexer.commenters = ""
        lexer.whitespace_split = True
        try:
            yield from _calls(list(lexer))
        except ValueError:  # a here-document's text, or a quotation over several lines
            if re.match(r"\s*(\S*/)?rlsdk\s", line):
                raise


def _calls(tokens: list[str]) -> Iterator[tuple[str, ...]]:
    call: list[str] = []
    redirected = False
    for token in [*tokens, ";"]:
        if token in _SEPARATORS:
            while call and (_ASSIGNMENT.match(call[0]) or call[0] in ("$", "!", "exec", "time", "nohup", "do", "then")):
                del call[0]
            if call and call[0].rpartition("/")[2] == "rlsdk":
                yield tuple(call[1:])
            call, redirected = [], False
        elif set(token) <= set("<>"):
            redirected = True
        elif redirected:
            redirected = False
        else:
            call.append(token)


def spelled_out(text: str) -> list[str]:
    """Return the command lines for which a usage line such as `rlsdk recipe list\\|run NAME [--quick]` stands.

    Args:
        text: The usage line.
    """
    plain = re.sub(r"\\\|", "|", text).replace("…", "").replace("\n", " ")
    plain = re.sub(r"(?<!\S)\[([^\]]*)\](?!\S)", r"\1", plain)
    plain = re.sub(r"\[(=STEP)\]", "", plain)
    choice = re.search(r"(\S+)\s?\|\s?(\S+)", plain)
    if choice is None:
        return [plain]
    parts = (choice[1], choice[2])
    return [line for part in parts for line in spelled_out(plain[: choice.start()] + part + plain[choice.end() :])]


def configs(block: Block) -> list[dict[str, object]]:
    """Return the configurations, or parts of one, that a YAML block shows.

    A block that gives a top-level key twice shows alternatives: each of its top-level entries is a part by itself.

    Args:
        block: The block.
    """
    entries = re.split(r"^(?=[A-Za-z_])", block.text, flags=re.M)
    keys = [entry.partition(":")[0] for entry in entries if re.match(r"[A-Za-z_]", entry)]
    texts = [block.text] if len(keys) == len(set(keys)) else [entry for entry in entries if entry.strip()]
    return [found for text in texts if isinstance(found := yaml.safe_load(text), dict)]
