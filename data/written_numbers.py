r"""Reader for written numbers. It reads one number from a text or its LaTeX, exactly and without arithmetic.

    whole      36   1,234   1{,}234   1\,234        fraction     1/2   \frac12   \dfrac{-1}{2}
    decimal    2.5   .5   5.                        mixed        12\frac12   12 1/2
    recurring  0.\overline{3}   0.\bar{3}   0.(3)   scientific   2.5 \times 10^3   1e-05

A number may have a sign, a currency, a percent sign or a unit. Texts that need arithmetic or are not numbers, such as
`36/2`, `2^{10}`, `--5`, `18 \times 10`, `18 million` and `5 ft 2 in`, are refused.
"""

import re
from fractions import Fraction
from typing import NamedTuple

_UNICODE = str.maketrans({
    "\u2212": "-", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "\u00d7": r"\times ", "\u00b7": r"\cdot ",
    "\u00f7": r"\div ", "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u2264": r"\le ", "\u2265": r"\ge ",
    "\u2260": r"\ne ", "\u00b1": r"\pm ", "\u222a": r"\cup ", "\u00b0": r"^\circ",
})  # fmt: skip
# Math delimiters, currencies, spaces, bracket sizes and styles carry no meaning.
_BLANK = re.compile(
    r"\\?[$\u20ac\u00a3]|(?<!\\)\\[()\[\],;:> \n]|[~\s]+|\\(?:q?quad|(?:thin|med|thick)?space|pounds|euro)(?![a-zA-Z])"
    r"|\\(?:boxed|fbox)(?![a-zA-Z])(?!\s*\{)|\\(?:[hv]?phantom|hspace\*?)\s*\{[^{}]*\}"
)
_NOTHING = re.compile(
    r"(?<!\\)\\!|\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])\.?|\\(?:(?:display|text|script)style|rm|bf|it|limits)(?![a-zA-Z])"
    r"|\\(?:tiny|small|normalsize|large|Large|LARGE|huge|Huge)(?![a-zA-Z])|\\(?:text)?color\s*\{[a-zA-Z]+\}"
)
_WORDS = r"text(?:bf|it|rm|sf|tt|up|normal)?|math(?:rm|bf|sf|tt)|[mh]box"
_TEXT = re.compile(rf"\\(?:{_WORDS})\s*\{{([^{{}}\\\"]*)\}}")
_FONT = re.compile(rf"\\(?:{_WORDS}|math(?:it|normal)|boldsymbol|bm|underline|boxed|fbox)\s*(?=\{{)")
_TWICE = re.compile(r"\{\ ?(?:\{([^{}]*)\}|(\\%))\ ?\}")
_ROOT = re.compile(r"(?<![\\a-zA-Z])sqrt ?\(([^()]*)\)")
_RATIO = re.compile(r'\\frac ?\{ ?"([^"]*)" ?\} ?\{ ?"([^"]*)" ?\}')
_ORDINAL = re.compile(r'\^ ?\{ ?("(?:st|nd|rd|th)") ?\}')
_DOTS = re.compile(r"(\.[0-9]*)\\dot ?\{?([0-9])\}?(?:([0-9]*)\\dot ?\{?([0-9])\}?)?")
_FRAC = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_AND = re.compile(r"[\s,]*\b(and|or)[\s,]*")
_SPACES = re.compile(r" {2,}")
_HAS_LETTER = re.compile("[a-zA-Z]")
_HAS_DIGIT = re.compile("[0-9]")
_PLAIN = re.compile(r"-?[0-9]{1,15}")
_MOST_BRACES = 8
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_WHOLE = rf"(?:[0-9]{{1,3}}(?:\ [0-9]{{3}})+|{WHOLE})"
_SIGNED = rf"\{{\ ?([-+]?)\ ?({_WHOLE})\ ?\}}"
_FRACTION = rf"""(?:
    \\frac\ ?(?:{_SIGNED}|([0-9]))\ ?(?:{_SIGNED}|([0-9])) | ({_WHOLE})\ ?(?:/|\\over)\ ?([-+]?)({_WHOLE})
)"""
_POWER = r"(?:\^\ ?(?:[1-3]|\{\ ?-?[1-3]\ ?\})|[\u00b2\u00b3])?"
# A word of two letters or more, or a quoted text. A single letter is a variable, except as a unit after a slash.
_NAME = rf'(?:"[^"=<>+*^_]*"|[a-zA-Z]{{2,}}(?![a-zA-Z])\.?|(?<=/)[smhgL](?![a-zA-Z])){_POWER}'
_DEGREE = r"\ ?(?:\^\ ?(?:\\circ(?![a-zA-Z])|\{\ ?\\circ\ ?\})|\\degree(?![a-zA-Z]))(?:\ ?[CF](?![a-zA-Z]))?"
UNIT = rf"(?:{_DEGREE})?(?:\ ?(?:(?:/|\\cdot)\ ?)?{_NAME})*"
_PERCENT = r'\ ?(?:\\?%|"?\ ?(?:per\ ?cent|percentage|pct)\b\ ?"?)'
_NUMBER = re.compile(
    rf"""
    (?P<sign>[-+]?)\ ?
    (?:
        (?:(?P<whole>{_WHOLE})(?:\ ?(?=\\)|\ ))?(?P<fraction>{_FRACTION})
      | (?=\.?[0-9]|\.\\) (?P<int>{_WHOLE})? (?:\.(?P<places>[0-9]*) (?:
            (?:\\(?:overline|bar|dot)\ ?(?:\{{\ ?(?P<bar>[0-9]+)\ ?\}}|(?P<digit>[0-9]))|\((?P<cycle>[0-9]+)\)) )? )?
        (?: \ ?(?:\\times|\\cdot|[*x])\ ?10\ ?\^\ ?[{{(]?\ ?(?P<power>[-+]?[0-9]{{1,3}})\ ?[)}}]?
          | [eE](?P<exponent>[-+]?[0-9]{{1,3}}) )?
    )
    (?: (?P<percent>{_PERCENT}) | (?P<unit>{UNIT}) )
    """,
    re.VERBOSE,
)
# Units of one letter. Another letter in \text{} is a variable in another font.
_LETTER_UNITS = frozenset("mghslLtdNJWVACF")
_WORD = re.compile("[a-zA-Z]+")
_QUOTED = re.compile('"([^"]*)"')
_BARE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
# An article, or the ending of an ordinal.
_FILLER = re.compile(r"\ban? (?=[a-z]{2})|^ ?(?:st|nd|rd|th)\b")
_SI = re.compile("[numcdkMGT]?(?:m|s|g|L|l|Hz|Pa|eV|W|J|N|V|A|B|mol|cal|Wh)")
# Without quotes, two or three letters may be variables, and so may more letters next to the number.
_TOUCHING = re.compile(r"(?:^|(?<=[^\\a-zA-Z ]))[a-zA-Z]{2,}")
_SHORT_UNIT = re.compile(
    "mm|cm|dm|km|mg|kg|m[lL]|in|ft|yd|mi|sq|cu|oz|lbs?|pt|qt|gal|hrs?|mins?|sec|day|men|way|cup|mph|kph|kmh|deg|per|rad"
)
# Units, and counted things that are not regular plurals.
_UNIT_WORD = re.compile(
    r"|".join(
        (
            _SHORT_UNIT.pattern,
            "(?:milli|centi|deci|kilo)?(?:met(?:er|re)|gram|lit(?:er|re)|watt|joule)|inch|foot|feet|yard|mile|acre|hectare",
            "ounce|pound|ton(?:ne)?|cubic|square|unit|gallon|quart|pint|second|minute|hour|week|month|year|decade|century",
            "degree|celsius|fahrenheit|kelvin|radian|knot|newton|volt|ampere|ohm|hertz|k?hz|k[wj]h?|mol|rpm|cc",
            "dollar|cent|euro|rupee|yen|yuan|peso|usd|eur|gbp|inr|cad|aud|rs",
            "people|person|woman|women|man|child|children|mice|geese|teeth|fish|sheep|deer|dice|each|total|altogether",
        )
    ),
    re.IGNORECASE,
)
_PLURAL = re.compile(r"[a-z]{2,}[^iusS]s")
_NO_PLURAL = re.compile(
    r"[a-z]*wards|profits|losses|gains|savings|always|besides|sometimes|perhaps|twos|tens|quarters|scores|lakhs|crores|grands"
    r"|(?:fif|six|seven|eigh|nin|ten|eleven|twelf|[a-z]+teen|[a-z]+tie|[mb]illion)ths|negatives|opposites|mills|brackets"
)
_NEGATIVE = re.compile(r"- ?\( ?([^-+()]*)\)")
_MAKES_ANOTHER = re.compile(
    r"not|n?or|minus|negative|plus|point|over|squared|cubed|factorial|wrong|incorrect|half|halves|thirds?|quarter|tenths?"
    r"|(?:dozen|hundred|thousand|million|billion|trillion)s?|(?:hundred|thousand)ths?"
    r"|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty"
)


def typeset(text: str) -> str:
    """Remove the typesetting of a text: spaces, fonts, sizes, currencies, `$`, outer braces, boxes. Put words in
    quotes."""
    if _PLAIN.fullmatch(text):
        return text
    found = _BLANK.sub(" ", _NOTHING.sub("", text.translate(_UNICODE))).replace("{,}", ",")
    found = _ROOT.sub(r"\\sqrt{\1}", found)
    if "\\" in found:
        found = _FRAC.sub(r"\\frac", _FONT.sub("", _TEXT.sub(_quoted, found)))
        found = found.replace(r"\langle", "(").replace(r"\rangle", ")").replace(r"{^\circ}", r"^\circ")
        found = _ORDINAL.sub(r"\1", _RATIO.sub(r'"\1/\2"', found))
        found = _TWICE.sub(lambda inner: inner[2] or f"{{{inner[1]}}}", _DOTS.sub(r"\1\\overline{\2\3\4}", found))
    found = _without_end(_SPACES.sub(" ", found).strip())
    for _ in range(_MOST_BRACES):
        if not found.startswith("{") or closing(found, 0) != len(found) - 1:
            break
        found = found[1:-1].strip()
    return _without_end(found)


def _without_end(text: str) -> str:
    return text if text.endswith("..") else text.rstrip(" .,;")


def _quoted(text: re.Match[str]) -> str:
    words = text[1]
    if _AND.fullmatch(words) or not _HAS_LETTER.search(words):
        return f" {words} "
    return f"{{{words}}}" if _HAS_DIGIT.search(words) else f'"{words}"'


def closing(text: str, start: int) -> int | None:
    r"""Return the index of the brace that closes the brace at `start`, or None if it is never closed. `\{` and `\}` are
    not counted."""
    depth = 0
    for brace in _BRACES.finditer(text, start):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return brace.start()
    return None


class Number(NamedTuple):
    """A written number. The value of a percentage is the number before the percent sign."""

    value: Fraction
    percent: bool = False

    def __str__(self) -> str:
        """Return the shortest text of the number. Equal numbers have the same text."""
        return f"{self.value}{'%' * self.percent}"

    def matches(self, other: "Number") -> bool:
        """Return whether two numbers are equal, to six decimal places if only one is a finite decimal.

        A percentage of 1% or more equals its number (50% equals 50). A percentage also equals a hundredth of its number
        (50% equals 0.5), unless the hundredth is a whole number."""
        is_same = _same(self.value, other.value)
        if self.percent == other.percent or (is_same and not 0 < abs(self.value) < 1):
            return is_same
        plain, percentage = (other, self) if self.percent else (self, other)
        return plain.value.denominator > 1 and _same(plain.value, percentage.value / 100)


def _same(one: Fraction, other: Fraction) -> bool:
    if one == other or _ends(one) == _ends(other):
        return one == other
    rounded = round(one, 6)
    return rounded != 0 and rounded == round(other, 6)


def _ends(value: Fraction) -> bool:
    return pow(10, value.denominator.bit_length(), value.denominator) == 0


def read_number(plain: str) -> Number | None:
    r"""Read a text without typesetting (see `typeset`) as one number. Return None for any other text.

    >>> [str(read_number(typeset(text))) for text in (r"\$36", r"0.1\overline{6}", r"12\frac12\%", "2.5e3", "5 cm")]
    ['36', '1/6', '25/2%', '2500', '5']
    >>> [read_number(text) for text in ("36/2", "(3)(6)", "--18", "e^0", "18 million", "5 ft 2 in", "18x", "25*10^2")]
    [None, None, None, None, None, None, None, None]
    """
    if _PLAIN.fullmatch(plain):
        return Number(Fraction(int(plain)))
    while plain[:1] == "(" and plain[-1:] == ")":
        plain = plain[1:-1].strip()
    if bracketed := _NEGATIVE.fullmatch(plain):
        plain = f"-{bracketed[1].strip()}"
    found = _NUMBER.fullmatch(plain)
    if found is None or not is_unit(found["unit"] or ""):
        return None
    size = _fraction(found) if found["fraction"] else _decimal(found)
    if size is None:
        return None
    return Number(-size if found["sign"] == "-" else size, found["percent"] is not None)


def is_unit(unit: str) -> bool:
    """Return whether the text after a number consists of units or counted things (known words and plurals).

    >>> [is_unit(text) for text in (" apples", '" m/s"^2', "cm", " bn", "xy", '" PM"', '" loss"', " mod")]
    [True, True, True, False, False, False, False, False]
    """
    quoted, bare = " ".join(_QUOTED.findall(unit)), _QUOTED.sub('"', unit)
    if any(not _SHORT_UNIT.fullmatch(word) for word in _TOUCHING.findall(bare)):
        return False
    if any(not is_counted(word) for word in _BARE.findall(bare)):
        return False
    words = _WORD.findall(_FILLER.sub("", quoted))
    return all(word in _LETTER_UNITS if len(word) == 1 else is_counted(word) or _SI.fullmatch(word) for word in words)


def is_counted(word: str) -> bool:
    """Return whether a word can name what a number counts: a unit, or a plural such as `apples`. Return False for words
    of one letter, and for plurals that multiply the number, such as `dozens`."""
    if _UNIT_WORD.fullmatch(word):
        return True
    return _PLURAL.fullmatch(word) is not None and not (_NO_PLURAL.fullmatch(word) or makes_another(word))


def _fraction(found: re.Match[str]) -> Fraction | None:
    """Return the value of a matched fraction or mixed number, or None if it is refused.

    A fraction is refused if its value is whole (36/2), its denominator is 0 or it has a second sign. A mixed number is
    refused if its fraction has a sign or is not below 1."""
    start = found.re.groupindex["fraction"]
    sign, top, digit, sign_below, bottom, other_digit, over, sign_under, under = found.groups()[start : start + 9]
    above, below = int(_digits(top or digit or over)), int(_digits(bottom or other_digit or under))
    signs = sign or "", sign_below or sign_under or ""
    if below == 0 or (above and above % below == 0) or (any(signs) and (found["sign"] or found["whole"])):
        return None
    part = Fraction(-above if signs.count("-") == 1 else above, below)
    if found["whole"] is None:
        return part
    return int(_digits(found["whole"])) + part if above < below else None


def _decimal(found: re.Match[str]) -> Fraction | None:
    """Return the value of a matched decimal number. The match includes recurring digits and a power of ten, if any.

    The number before a power of ten must be from 1 to below 10, or to below 1,000 if the exponent is a multiple of 3.
    Return None for any other number with a power of ten, or if the exponent is 0."""
    places = found["places"] or ""
    size = Fraction(int((_digits(found["int"] or "") + places) or "0"), 10 ** len(places))
    if cycle := found["bar"] or found["digit"] or found["cycle"]:
        size += Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(places))
    if (exponent := found["power"] or found["exponent"]) is None:
        return size
    power = int(exponent)
    if power == 0 or not 1 <= size < (1_000 if power % 3 == 0 else 10):
        return None
    return size * Fraction(10) ** power


def _digits(text: str) -> str:
    return text.replace(",", "").replace(" ", "")


def makes_another(word: str) -> bool:
    """Return whether a word next to a number changes or negates it, such as `million`, `half`, `or` and `not`."""
    return _MAKES_ANOTHER.fullmatch(word.strip("()[]{}.,;!?*'").lower()) is not None
