"""docs/zh/X says what docs/X says: headings, code, links and figures are the same, section by section."""

import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CHINESE = sorted((DOCS / "zh").rglob("*.md"))
TWINS = {"README.md": "README.zh.md"} | {
    f"docs/{page.relative_to(DOCS / 'zh')}": str(page.relative_to(ROOT)) for page in CHINESE
}
GENERATED = {"docs/config.md"}  # tables of the keys: tests/unit/config/test_reference.py compares them
# May only shrink: a new page comes with its twin. docs/why/ is for those who read the code.
ENGLISH_ONLY = {"architecture.md"}
MONTHS = "january february march april may june july august september october november december"
WORDS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
NUMBERS = {word: str(number) for number, word in enumerate(WORDS.split(), 1)} | {
    **{"twenty": "20", "thirty": "30", "sixty": "60", "once": "1", "twice": "2", "single": "1"},
    **{month: str(number) for number, month in enumerate(MONTHS.split(), 1)},
    **{"first": "1", "second": "2", "third": "3", "fourth": "4"},
}
UNITS = {
    **{"%": "%", "x": "times", "times": "times", "倍": "times"},
    **{"s": "s", "seconds": "s", "second": "s", "秒": "s", "ms": "ms", "毫秒": "ms"},
    **{"minutes": "min", "分钟": "min", "hours": "h", "小时": "h"},
    **{"bits": "bit", "bit": "bit", "位": "bit", "bytes": "B", "byte": "B", "字节": "B"},
    **{unit: unit for unit in ("GiB", "MiB", "KiB", "GB", "MB", "M", "Gbit/s")},
}
FIGURE = re.compile(
    r"(?<![A-Za-z0-9_.^-])(\d[\d,]*(?:[./]\d+)?(?:e-?\d+|\^\d+|[BNm](?![A-Za-z]))?)(?!\d)"
    rf"(?:(?:\s|-)?({'|'.join(sorted(UNITS, key=len, reverse=True))})(?![A-Za-z]))?(?![A-Za-z])"
)


@dataclass(frozen=True)
class Section:
    """What stands under a heading, or after a bold question of the FAQ, apart from its words."""

    level: int
    code: list[str]  # blocks, as they are typed
    inline: Counter[str]
    links: Counter[str]
    rows: int  # of tables
    figures: Counter[str]
    units: dict[str, set[str]]
    spelled: Counter[str]  # figures that English may write as words


def plain(code: str) -> str:
    return code.replace(" --lang zh", "").strip()


def spelled(text: str) -> str:
    return re.sub(r"\b[A-Za-z]+\b", lambda word: NUMBERS.get(word[0].lower(), word[0]), text)


def figures(text: str) -> list[tuple[str, str]]:
    return [
        (number.rstrip(",").replace(",", ""), UNITS.get(unit, "")) for number, unit in FIGURE.findall(text)
    ]


def goes_to(page: str, target: str) -> str:
    """The English page that a link leads to; a link to the other language's page of two is told apart."""
    if target.startswith("https://"):
        return target
    path = target.partition("#")[0]
    there = os.path.relpath((ROOT / page).parent / path, ROOT) if path else page
    english = {chinese: english for english, chinese in TWINS.items()}.get(there, there)
    own = TWINS.get(english, english) if page in TWINS.values() else english
    return english if there == own else f"{english} in the other language"


def section(page: str, level: int, text: str) -> Section:
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^ *```\w*\n.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`]+)`", prose)
    prose = re.sub(r"`[^`]+`", "`", prose)
    links = Counter(goes_to(page, target) for target in re.findall(r"\]\(([^)]+)\)", prose))
    prose = re.sub(r"\]\([^)]+\)", "]", prose)
    found = figures(prose)
    units: dict[str, set[str]] = {}
    for number, unit in found:
        units.setdefault(number, set()).update({unit} - {""})
    return Section(
        level,
        [plain(block) for block in blocks],
        Counter(plain(span) for span in inline),
        links,
        len(re.findall(r"^ *\|", prose, re.MULTILINE)),
        Counter(number for number, _ in found),
        units,
        Counter(number for number, _ in figures(spelled(prose))),
    )


def sections(page: str, text: str) -> list[Section]:
    """Those of a page, without its links between the languages and README's paragraph in the other one."""
    text = re.sub(r"^\[(?:中文|English)\]\([^)]+\)\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^## (?:中文|English)\n.*?(?=^## |\Z)", "", text, flags=re.MULTILINE | re.DOTALL)
    fenced = re.compile(r"^ *```\w*\n.*?^ *```$", re.MULTILINE | re.DOTALL)
    hidden = fenced.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), text)
    starts = [0] + [found.start() for found in re.finditer(r"^(?:#+ |(?:- )?\*\*)", hidden, re.MULTILINE)]
    result: list[Section] = []
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        level = re.match(r"#*", text[start:])
        result.append(section(page, len(level[0]) if level else 0, text[start:end]))
    return result


def differences(english: Section, chinese: Section) -> list[str]:
    found: list[str] = []
    for what in ("level", "code", "inline", "links", "rows"):
        here, there = getattr(english, what), getattr(chinese, what)
        if isinstance(here, Counter) and here != there:
            found.append(f"{what}: English alone {dict(here - there)}, Chinese alone {dict(there - here)}")
        elif here != there:
            found.append(f"{what}: {here} and {there}")
    missing = english.figures - chinese.figures
    extra = chinese.figures - (english.spelled | english.figures)
    if missing or extra:
        found.append(f"figures: English alone {dict(missing)}, Chinese alone {dict(extra)}")
    for number, units in english.units.items():
        other = chinese.units.get(number, set())
        if units and other and units != other:
            found.append(f"units of {number}: {sorted(units)} and {sorted(other)}")
    return found


def compare(page: str, english: str, chinese: str) -> list[str]:
    """The differences of two texts that are to say the same, each with its place."""
    here, there = sections(page, english), sections(TWINS[page], chinese)
    if len(here) != len(there):
        return [f"{len(here)} sections and {len(there)}"]
    return [
        f"section {number} ({chinese_heads(chinese, number)}): {difference}"
        for number, (one, other) in enumerate(zip(here, there, strict=True))
        for difference in differences(one, other)
    ]


def chinese_heads(text: str, number: int) -> str:
    heads = re.findall(r"^(?:#+ |(?:- )?\*\*).*", re.sub(r"^ *```.*?```", "", text, flags=re.M | re.S), re.M)
    return heads[number - 1][:40] if 0 < number <= len(heads) else "top"


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", sorted(TWINS))
def test_twins_say_the_same(page: str) -> None:
    assert (ROOT / page).exists()
    if page not in GENERATED:
        assert compare(page, read(page), read(TWINS[page])) == []


@pytest.mark.parametrize("page", sorted(set(TWINS) - GENERATED - {"README.md"}))
def test_twins_link_to_each_other_at_the_top(page: str) -> None:
    for here, there, name in ((page, TWINS[page], "中文"), (TWINS[page], page, "English")):
        line = read(here).splitlines()[2]
        found = re.fullmatch(rf"\[{name}\]\((.+)\)", line)
        assert found, f"{here}: {line}"
        assert (ROOT / here).parent.joinpath(found[1]).resolve() == ROOT / there


def slug(heading: str) -> str:
    """The anchor that a heading gets where the pages are shown."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", sorted([*TWINS, *TWINS.values()]))
def test_anchors_are_headings(page: str) -> None:
    for path, anchor in re.findall(r"\]\(((?!https)[^)#]*)#([^)]+)\)", read(page)):
        target = (ROOT / page).parent / path if path else ROOT / page
        heads = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in {slug(head) for head in heads}, f"{path}#{anchor}"


def test_pages_without_a_twin_are_known() -> None:
    english = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    english = {page for page in english if not page.startswith(("zh/", "why/"))}
    alone = {page for page in english if f"docs/{page}" not in TWINS}
    assert alone == ENGLISH_ONLY


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("3.9", "3.8"),
        ("2 GiB", "2 MiB"),
        ("40%", "4%"),
        ("train my.yaml", "train my.yml"),
        ("`a=1`", "`a=2`"),
        ("howto/data.md", "howto/watch.md"),
        ("# 结果", "## 结果"),
        ("zh", "en"),
        ("| 2 |", "| 3 |"),
    ],
)
def test_a_change_on_one_side_is_found(old: str, new: str) -> None:
    english = (
        "# Result\n\n3.9 x as fast, five minutes, 2 GiB, 40% ([data](howto/data.md)), `a=1`.\n\n"
        "```\nglm-accelerate train my.yaml --lang zh\n```\n\n| n |\n| --- |\n| 2 |\n"
    )
    chinese = (
        "# 结果\n\n快 3.9 倍，5 分钟，2 GiB，40%（[数据](howto/data.md)），`a=1`。\n\n"
        "```\nglm-accelerate train my.yaml\n```\n\n| n |\n| --- |\n| 2 |\n"
    )
    page = "docs/faq.md"
    assert old in chinese or old == "zh"
    assert compare(page, english, chinese) == []
    if old == "zh":
        english = english.replace("--lang zh", "--lang en")
    assert compare(page, english, chinese.replace(old, new)) != []
