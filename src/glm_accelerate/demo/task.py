"""The demo's lessons: short questions in English and Chinese, each with exactly one right answer.

Phrases and sentences to translate, numbers to write out, records to look things up in, a city to find among
other words: most are short, a few are long, as real conversations are. An eighth of all combinations is held
out: no training example has them, so they cannot be answered by heart.
"""

import json
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

QUALITIES = {
    "red": "红", "blue": "蓝", "green": "绿", "white": "白", "black": "黑", "yellow": "黄", "big": "大",
    "small": "小", "old": "旧", "new": "新", "good": "好", "long": "长",
}  # fmt: skip
THINGS = {
    "apple": "苹果", "book": "书", "house": "房子", "car": "车", "cat": "猫", "dog": "狗", "fish": "鱼",
    "bird": "鸟", "flower": "花", "tree": "树", "boat": "船", "table": "桌子", "door": "门", "lamp": "灯",
    "horse": "马", "cup": "杯子",
}  # fmt: skip
CITIES = {
    "Beijing": "北京", "Shanghai": "上海", "Paris": "巴黎", "London": "伦敦", "Rome": "罗马",
    "Berlin": "柏林", "Tokyo": "东京", "Moscow": "莫斯科", "Madrid": "马德里", "Vienna": "维也纳",
    "Cairo": "开罗", "Sydney": "悉尼",
}  # fmt: skip
TRADES = {
    "doctor": "医生", "teacher": "老师", "farmer": "农民", "painter": "画家", "lawyer": "律师",
    "singer": "歌手", "baker": "面包师", "driver": "司机", "nurse": "护士", "writer": "作家",
}  # fmt: skip
PEOPLE = {
    "Anna": "安娜", "Boris": "鲍里斯", "Clara": "克拉拉", "David": "大卫", "Emma": "艾玛",
    "Frank": "弗兰克", "Grace": "格蕾丝", "Henry": "亨利", "Irene": "艾琳", "James": "詹姆斯",
}  # fmt: skip
DEEDS = {"sees": "看见", "buys": "买", "sells": "卖", "likes": "喜欢", "draws": "画", "wants": "想要"}
ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
MOST_HAY = 400
DIGITS_ZH = "零一二三四五六七八九"
PETS = {"cat": "猫", "dog": "狗", "fish": "鱼", "bird": "鸟", "horse": "马"}
WORDS = "Translate into Chinese the in Write in words digits name city work pet Look up Which hundred"
WORDS_ZH = (
    "翻译成英文", "逐位读出", "用数字写", "姓名", "城市", "职业", "宠物", "查找",
    "哪座城市", "：", "、", "？", "在",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Example:
    """One question with its answer. A `combination` is either trained on or held out."""

    lesson: str
    combination: str
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Language:
    """The words and punctuation of one language."""

    words: tuple[str, ...]
    people: tuple[str, ...]
    cities: tuple[str, ...]
    trades: tuple[str, ...]
    pets: tuple[str, ...]
    fields: tuple[str, str, str, str]  # name, city, work, pet
    equals: str
    comma: str
    look_up: str
    which_city: str


ENGLISH = Language(
    tuple(QUALITIES | THINGS), tuple(PEOPLE), tuple(CITIES), tuple(TRADES), tuple(PETS),
    ("name", "city", "work", "pet"), "=", " ", "Look up:", "Which city?",
)  # fmt: skip
CHINESE = Language(
    tuple((QUALITIES | THINGS).values()), tuple(PEOPLE.values()), tuple(CITIES.values()),
    tuple(TRADES.values()), tuple(PETS.values()), ("姓名", "城市", "职业", "宠物"),
    "：", "、", "查找：", "哪座城市？",
)  # fmt: skip


def in_english(number: int) -> str:
    """A number below 1,000 in words."""
    assert 0 <= number < 1000
    hundreds, rest = divmod(number, 100)
    words = [ONES[hundreds], "hundred"] if hundreds else []
    if rest >= 20:
        words.append(TENS[rest // 10])
        rest %= 10
    if rest or not words:
        words.append(ONES[rest])
    return " ".join(words)


def by_digit(number: int) -> str:
    """A number digit by digit in Chinese, as telephone numbers are read out."""
    return CHINESE.comma.join(DIGITS_ZH[int(digit)] for digit in str(number))


def phrase(draw: random.Random) -> Example:
    """A phrase to translate, in either direction."""
    quality, thing = draw.choice(tuple(QUALITIES)), draw.choice(tuple(THINGS))
    english, chinese = f"the {quality} {thing}", QUALITIES[quality] + THINGS[thing]
    return _translate("phrase", draw, english, chinese)


def sentence(draw: random.Random) -> Example:
    """A sentence to translate, in either direction; the order of the words differs."""
    person, deed, city = draw.choice(tuple(PEOPLE)), draw.choice(tuple(DEEDS)), draw.choice(tuple(CITIES))
    quality, thing = draw.choice(tuple(QUALITIES)), draw.choice(tuple(THINGS))
    english = f"{person} {deed} the {quality} {thing} in {city}"
    chinese = f"{PEOPLE[person]}在{CITIES[city]}{DEEDS[deed]}{QUALITIES[quality]}{THINGS[thing]}"
    return _translate("sentence", draw, english, chinese)


def number(draw: random.Random) -> Example:
    """A number from digits to words, or back."""
    value = draw.randrange(1000)
    digits, words, chinese = str(value), in_english(value), by_digit(value)
    pairs = (
        (f"Write in words:\n{digits}", words),
        (f"Write in digits:\n{words}", digits),
        (f"逐位读出：\n{digits}", chinese),
        (f"用数字写：\n{chinese}", digits),
    )
    return Example("number", digits, *draw.choice(pairs))


def record(draw: random.Random) -> Example:
    """The facts about one person, of which some are asked for, both in any order."""
    words = draw.choice((ENGLISH, CHINESE))
    kinds = (words.people, words.cities, words.trades, words.pets)
    lines = [
        f"{field}{words.equals}{draw.choice(kind)}" for field, kind in zip(words.fields, kinds, strict=True)
    ]
    draw.shuffle(lines)
    answer = draw.sample(lines, k=draw.randint(1, 3))
    given = "\n".join(lines)
    asked = "\n".join(line.split(words.equals)[0] for line in answer)
    return Example("record", given, f"{given}\n{words.look_up}\n{asked}", "\n".join(answer))


def needle(draw: random.Random) -> Example:
    """The one city among many other words, sometimes very many."""
    words = draw.choice((ENGLISH, CHINESE))
    hay = draw.choices(words.words, k=_tail(draw, 3, MOST_HAY))
    city = draw.choice(words.cities)
    hay.insert(draw.randrange(len(hay)), city)
    given = words.comma.join(hay)
    return Example("needle", given, f"{words.which_city}\n{given}", city)


def _translate(lesson: str, draw: random.Random, english: str, chinese: str) -> Example:
    if draw.random() < 0.5:
        return Example(lesson, english, f"Translate into Chinese:\n{english}", chinese)
    return Example(lesson, english, f"翻译成英文：\n{chinese}", english)


LESSONS: dict[str, Callable[[random.Random], Example]] = {
    lesson.__name__: lesson for lesson in (phrase, sentence, number, record, needle)
}


def _tail(draw: random.Random, low: int, high: int) -> int:
    """A long-tailed count: mostly near `low`, now and then near `high`."""
    return min(high, low + int(2 * draw.paretovariate(1.1)) - 2)


def is_held_out(combination: str) -> bool:
    """Whether this combination is for evaluation only: a fixed eighth of all."""
    return zlib.crc32(combination.encode()) % 8 == 0


def examples(count: int, *, seed: int, held_out: bool) -> list[Example]:
    """So many examples, the lessons in equal parts; the same seed gives the same ones."""
    draw = random.Random(seed)
    lessons = tuple(LESSONS.values())
    drawn: list[Example] = []
    while len(drawn) < count:
        example = lessons[len(drawn) % len(lessons)](draw)
        if is_held_out(example.combination) == held_out:
            drawn.append(example)
    draw.shuffle(drawn)
    return drawn


def vocabulary() -> list[str]:
    """Every word of the lessons, as the tokenizer meets it: with the space or mark before it."""
    english = [*WORDS.split(), *QUALITIES, *THINGS, *CITIES, *TRADES, *PEOPLE, *DEEDS, *ONES, *TENS[2:]]
    chinese = [*WORDS_ZH, *DIGITS_ZH, *DEEDS.values(), *CHINESE.words, *CHINESE.people, *CHINESE.cities]
    marked = [
        f"{words.equals}{value}"
        for words in (ENGLISH, CHINESE)
        for value in (*words.people, *words.cities, *words.trades, *words.pets)
    ]
    listed = [f"{CHINESE.comma}{word}" for word in (*CHINESE.words, *CHINESE.cities, *DIGITS_ZH)]
    return [*english, *(f" {word}" for word in english), *chinese, *marked, *listed]


def write_examples(path: Path, written: Sequence[Example]) -> None:
    """One conversation a line, in the form that one's own data has."""
    with path.open("w", encoding="utf-8") as file:
        for example in written:
            turns = [
                {"role": "user", "content": example.question},
                {"role": "assistant", "content": example.answer},
            ]
            file.write(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")
