"""Tokenise answers into numbers, symbols, signs and words, from LaTeX or plain text, in linear time.

Pure formatting is dropped, and equivalent notations become the same token. Only the digits 0 to 9 are supported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

import attrs

MAX_CHARACTERS = 1_000
MAX_TOKENS = 400
MAX_DIGITS = 200
"""Maximum digits of a number."""


class UnreadableError(ValueError):
    """The text cannot be compared by value, as any function that reads it may find; the message says why."""


class UnknownCommandError(UnreadableError):
    """The text contains an unknown LaTeX command."""


@attrs.frozen(slots=True)
class Token:
    r"""A part of an answer.

    Attributes:
        kind: `number`, `symbol`, `function`, `sign`, `words` or `environment`.
        text: The sign, name or words; the digits of a number.
        value: Value of a number.
        spaced: True if white space precedes it.
        marked: True for words written as text (`\text{…}`), which are never a product of letters.
    """

    kind: str
    text: str
    value: Fraction = Fraction(0)
    spaced: bool = False
    marked: bool = False

    def __str__(self) -> str:
        return self.text


_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("−–‒﹣－", "-"),
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "÷": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
        "√": r"\sqrt ",
        "°": r"^{\circ}",
        "²": "^{2}",
        "³": "^{3}",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "±": r"\pm ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
        "ℝ": r"\mathbb{R}",
        "∓": r"\mp ",
        "½": r"\frac{1}{2}",
        "⅓": r"\frac{1}{3}",
        "⅔": r"\frac{2}{3}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
        "θ": r"\theta ",
        "α": r"\alpha ",
        "β": r"\beta ",
        "λ": r"\lambda ",
        "⟨": r"\langle ",
        "⟩": r"\rangle ",
        "€": r"\text{euros}",
        "£": r"\text{gbp}",
        "\u00a0": " ",
        "\u202f": " ",
        "\u2009": " ",
    }
)

_ROOT = re.compile(r"√\s?([0-9]{2,200})")
_NUMBER_AS_TEXT = re.compile(r"\s*[-+−]?\s*\.?[0-9]")
_SEPARATOR = r"(?:\{,\}|,?\\[,!;:]|~)"
_TOKEN = re.compile(
    rf"""
    (?P<space>(?:\s|~|\\[,;:!\ ]|\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|q?quad|thinspace)(?![A-Za-z]))+)
  | (?P<grouped>[0-9]{{1,3}}(?:{_SEPARATOR}[0-9]{{3}})+(?:\.[0-9]+)?(?![0-9]))
  | (?P<apart>[0-9]{{1,3}}(?:[ ][0-9]{{3}})+(?:\.[0-9]+)?(?![0-9]|\s*/))
  | (?P<comma>(?<![0-9.,])[0-9]{{1,3}}(?:,[0-9]{{3}})+(?:\.[0-9]+)?(?![0-9]|,[0-9]))
  | (?P<scientific>(?:[0-9]*\.[0-9]+[eE][-+]?[0-9]{{1,4}}|[0-9]+[eE](?:\+?[0-9]{{1,4}}|-[0-9]{{2,4}}))(?![0-9.]))
  | (?P<repeating>[0-9]*\.[0-9]*\\(?:overline|bar|dot)\s?(?:\{{[0-9]+\}}|[0-9](?![0-9])))
  | (?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)
  | (?P<degree>\^\s?(?:\{{\s?\\circ\s?\}}|\\circ(?![A-Za-z])))
  | (?P<environment>\\(?:begin|end)\s?\{{[A-Za-z]+\*?\}}(?:\{{[lcr|\s]*\}})?)
  | (?P<reals>\\mathbb\s?(?:\{{\s?R\s?\}}|R))
  | (?P<upright>\\(?:mathrm|operatorname\*?|mathit)\s?\{{\s?[A-Za-z]{{1,20}}\s?\}})
  | (?P<words>\\(?:text(?:bf|it|rm|normal)?|mathrm|mathbf|mathit|mbox|operatorname)\s?\{{[^{{}}\\$]*\}})
  | (?P<command>\\[A-Za-z]+)
  | (?P<row>\\\\)
  | (?P<escaped>\\[{{}}%$|&\#])
  | (?P<letters>[A-Za-z]+)
  | (?P<sign>\*\*|<=|>=|!=|[-+*/^_=<>!|()\[\]{{}},;:&%])
    """,
    re.VERBOSE,
)

_GREEK = """
alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi pi rho sigma tau
upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell hbar
"""
_FUNCTIONS = """
sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp sqrt frac binom
"""
GREEK = frozenset(_GREEK.split())
FUNCTIONS = frozenset(_FUNCTIONS.split())
_PLAIN_FUNCTIONS = FUNCTIONS - {"frac", "binom"}
_SIGNS = {
    **dict.fromkeys(("cdot", "times", "ast"), "*"),
    **dict.fromkeys(("le", "leq", "leqslant"), "<="),
    **dict.fromkeys(("ge", "geq", "geqslant"), ">="),
    **dict.fromkeys(("ne", "neq"), "!="),
    **dict.fromkeys(("setminus", "backslash"), "setminus"),
    **dict.fromkeys(("emptyset", "varnothing"), "emptyset"),
    **dict.fromkeys(("lor", "vee"), "or"),
    **dict.fromkeys(("land", "wedge"), "and"),
    **dict.fromkeys(("mid", "vert", "lvert", "rvert"), "|"),
    "lbrace": r"\{",
    "rbrace": r"\}",
    "lbrack": "[",
    "rbrack": "]",
    "lt": "<",
    "gt": ">",
    "div": "/",
    "colon": ":",
    "percent": "%",
    **{name: name for name in ("cup", "cap", "in", "pm", "mp", "langle", "rangle", "infty", "degree")},
    **{name: name for name in ("lfloor", "rfloor", "lceil", "rceil")},
}
_SYNONYMS = {"dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom"}
_RUNS = (frozenset("abc"), frozenset("xyz"), frozenset("pqr"))
"""Letters whose products are written without spaces; other runs of three letters are words."""


def tokenize(text: str) -> list[Token]:
    """Return the tokens of an answer."""
    if len(text) > MAX_CHARACTERS:
        raise UnreadableError(f"it has {len(text)} characters, more than {MAX_CHARACTERS}")
    text = _prepared(text)
    tokens: list[Token] = []
    position, spaced, depth = 0, False, 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise UnreadableError(f"unsupported character {text[position]!r}")
        kind, found = str(match.lastgroup), match[0]
        if kind == "comma" and depth:  # in brackets, a comma separates items
            match = re.compile(r"[0-9]+").match(text, position)
            kind, found = "number", match[0]  # type: ignore[index]  # it begins with a digit
        position += len(found)
        if kind == "space":
            spaced = True
            continue
        new = _READERS[kind](found)
        tokens += [attrs.evolve(token, spaced=spaced and not index) for index, token in enumerate(new)]
        depth += sum((token.text in _OPENING) - (token.text in _CLOSING) for token in new if token.kind == "sign")
        spaced = False
        if len(tokens) > MAX_TOKENS:
            raise UnreadableError(f"it has more than {MAX_TOKENS} parts")
    return tokens


_OPENING = frozenset({"(", "[", r"\{", "{"})
_CLOSING = frozenset({")", "]", r"\}", "}"})


def _prepared(text: str) -> str:
    text = _ROOT.sub(r"\\sqrt{\1}", text).translate(_CHARACTERS).strip()
    text = re.sub(r"\\\$\s?(?=[0-9.])", r"\\text{dollars}", text)
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            text = text[len(opening) : -len(closing)].strip()
    if re.match(r"[-+]?\$[0-9.]", text) and text.count("$") == 1:
        text = text.replace("$", r"\text{dollars}")
    return re.sub(r"\s*\.\s*$", "", text)


def _number(digits: str) -> list[Token]:
    if len(digits) > MAX_DIGITS:
        raise UnreadableError(f"it contains a number with more than {MAX_DIGITS} digits")
    return [Token("number", digits, Fraction(digits))]


def _without_separators(text: str) -> list[Token]:
    return _number(re.sub(r"[^0-9.]", "", text))


def _scientific(text: str) -> list[Token]:
    mantissa, exponent = re.split("[eE]", text)
    if len(mantissa) > MAX_DIGITS or abs(int(exponent)) > 1_000:
        raise UnreadableError("it contains a number with too many digits")
    return [Token("number", text, Fraction(mantissa) * Fraction(10) ** int(exponent))]


def _repeating(text: str) -> list[Token]:
    plain, _, period = text.partition("\\")
    whole, _, fixed = plain.partition(".")
    period = re.sub(r"[^0-9]", "", period)
    if len(text) > MAX_DIGITS:
        raise UnreadableError(f"it contains a number with more than {MAX_DIGITS} digits")
    value = Fraction(int(whole or "0")) + Fraction(int(fixed or "0"), 10 ** len(fixed))
    value += Fraction(int(period), 10 ** len(fixed) * (10 ** len(period) - 1))
    return [Token("number", text, value)]


def _command(text: str) -> list[Token]:
    name = _SYNONYMS.get(text[1:], text[1:])
    if name in GREEK:
        return [Token("symbol", name)]
    if name in FUNCTIONS:
        return [Token("function", name)]
    if name in _SIGNS:
        return [Token("sign", _SIGNS[name])]
    raise UnknownCommandError(f"unknown command {text[:20]}")


def _letters(text: str) -> list[Token]:
    lower = text.lower()
    if text in _PLAIN_FUNCTIONS:
        return [Token("function", text)]
    if text == "pi" or lower in {"theta", "alpha", "beta"}:
        return [Token("symbol", lower)]
    if lower in {"infinity", "inf"}:
        return [Token("sign", "infty")]
    if lower in {"and", "or"}:
        return [Token("sign", lower)]
    if lower == "percent":
        return [Token("sign", "%")]
    if len(text) == 1:
        return [Token("symbol", text)]
    return [Token("words", text)]


def letters_of(word: str) -> list[Token]:
    """Return the symbols of adjacent letters that may be a product; empty if they must be a word."""
    product = len(word) == 2 and word.islower() and "o" not in word
    row = len(set(word)) == len(word) and any(set(word) <= run for run in _RUNS)
    return [Token("symbol", letter) for letter in word] if product or row else []


def _upright(text: str) -> list[Token]:
    word = text[text.index("{") + 1 : -1].strip()
    if word in _PLAIN_FUNCTIONS or word == "e":
        return _letters(word)
    return [attrs.evolve(token, marked=text.startswith(r"\mathrm")) for token in _worded(word)]


def _words(text: str) -> list[Token]:
    held = text[text.index("{") + 1 : -1]
    if _NUMBER_AS_TEXT.match(held):
        return [attrs.evolve(token, marked=token.kind == "words") for token in tokenize(held)]
    return _worded(held)


def _worded(words: str) -> list[Token]:
    words = " ".join(words.split())
    lower = words.lower().strip(" ,")
    if lower in {"and", "or"}:
        return [Token("sign", lower)]
    if lower in {"percent", "%"}:
        return [Token("sign", "%")]
    return [Token("words", words, marked=True)] if words else []


def _environment(text: str) -> list[Token]:
    part, name = text[1:].split("{")[:2]
    return [Token("environment", f"{part.strip()} {name.partition('}')[0]}")]


def _escaped(text: str) -> list[Token]:
    if text == r"\%":
        return [Token("sign", "%")]
    if text in {r"\{", r"\}"}:
        return [Token("sign", text)]
    raise UnreadableError(f"unsupported character {text}")


_READERS: dict[str, Callable[[str], list[Token]]] = {
    "grouped": _without_separators,
    "apart": _without_separators,
    "comma": _without_separators,
    "scientific": _scientific,
    "repeating": _repeating,
    "number": _number,
    "degree": lambda _: [Token("sign", "degree")],
    "environment": _environment,
    "reals": lambda _: [Token("sign", "reals")],
    "upright": _upright,
    "words": _words,
    "command": _command,
    "row": lambda _: [Token("sign", "row")],
    "escaped": _escaped,
    "letters": _letters,
    "sign": lambda text: [Token("sign", "^" if text == "**" else text)],
}


def split(tokens: Sequence[Token], signs: frozenset[str]) -> tuple[list[list[Token]], list[str]]:
    """Split tokens at separators outside all brackets; return the parts and the separators."""
    parts: list[list[Token]] = [[]]
    between: list[str] = []
    depth = 0
    for token in tokens:
        depth += nesting(token)
        if depth < 0:
            raise UnreadableError("a closing bracket has no opening bracket")
        if depth == 0 and token.kind == "sign" and token.text in signs:
            parts.append([])
            between.append(token.text)
        else:
            parts[-1].append(token)
    if depth:
        raise UnreadableError("a bracket is not closed")
    return parts, between


def nesting(token: Token) -> int:
    """Return how a token changes the nesting depth: 1, 0 or -1."""
    if token.kind == "environment":
        return 1 if token.text.startswith("begin") else -1
    if token.kind != "sign":
        return 0
    opens = token.text in _OPENING or token.text in {"langle", "lfloor", "lceil"}
    closes = token.text in _CLOSING or token.text in {"rangle", "rfloor", "rceil"}
    return opens - closes


def with_braces(tokens: Sequence[Token]) -> list[Token]:
    r"""Return the tokens with braces around the digits of `\frac12`, `\frac1{2}` and `\frac{1}2`."""
    found: list[Token] = []
    index = 0
    while index < len(tokens):
        found.append(tokens[index])
        index += 1
        if found[-1].text != "frac" or found[-1].kind != "function":
            continue
        for _ in range(2):
            following = tokens[index] if index < len(tokens) else None
            if following is not None and following.kind == "number" and len(following.text) <= 2:
                found += [part for digit in following.text for part in _braced(digit)]
                index += 1
                if len(following.text) == 2:
                    break
            elif [token.text for token in tokens[index : index + 3 : 2]] == ["{", "}"]:
                found += tokens[index : index + 3]
                index += 3
            else:
                break
    return found


def _braced(digit: str) -> list[Token]:
    if not digit.isdigit():
        raise UnreadableError(r"the arguments of \frac need braces")
    return [Token("sign", "{"), Token("number", digit, Fraction(int(digit))), Token("sign", "}")]
