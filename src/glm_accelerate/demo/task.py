"""The demo's lessons: short questions in English and Chinese, each with exactly one right answer.

Phrases to translate, numbers to write out, records and registers to look things up in, lists to read
back: most are short, a few have several hundred tokens, as real conversations do. What is held out
(an eighth of all pairs and numbers) occurs in no training example, so it can't be answered by heart.
"""

import json
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

COLOURS = {
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
PEOPLE = (
    "Anna", "Boris", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Irene", "James", "Karen",
    "Louis", "Maria", "Nora", "Oscar", "Paula", "Robert", "Sara", "Thomas", "Ursula", "Victor", "Wendy",
)  # fmt: skip
PEOPLE_ZH = (
    "王芳", "李伟", "张敏", "刘洋", "陈静", "杨帆", "赵磊", "黄丽", "周杰", "吴霞", "徐鹏", "孙悦", "马超",
    "朱琳", "胡军", "郭靖", "何洁", "高峰", "林涛", "罗兰", "郑凯", "梁栋",
)  # fmt: skip
ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
DIGITS_ZH = "零一二三四五六七八九"


@dataclass(frozen=True, slots=True)
class Example:
    """One question with its answer. `lesson` names what is asked for."""

    lesson: str
    question: str
    answer: str


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
    return "".join(DIGITS_ZH[int(digit)] for digit in str(number))


def is_held_out(*words: str) -> bool:
    """Whether this combination is kept for the examination: a fixed eighth of all."""
    return zlib.crc32("|".join(words).encode()) % 8 == 0


def _pair(draw: random.Random, left: Sequence[str], right: Sequence[str], held_out: bool) -> tuple[str, str]:
    while True:
        pair = draw.choice(left), draw.choice(right)
        if is_held_out(*pair) == held_out:
            return pair


def _tail(draw: random.Random, low: int, high: int) -> int:
    """A long-tailed count: mostly near `low`, now and then near `high`."""
    return min(high, low + int(draw.paretovariate(1.3) * 2) - 2)


def _translate(draw: random.Random, held_out: bool) -> Example:
    colour, thing = _pair(draw, tuple(COLOURS), tuple(THINGS), held_out)
    english, chinese = f"the {colour} {thing}", f"{COLOURS[colour]}{THINGS[thing]}"
    if draw.random() < 0.5:
        return Example("translate", f"Translate into Chinese: {english}", chinese)
    return Example("translate", f"翻译成英文：{chinese}", english)


def _number(draw: random.Random, held_out: bool) -> Example:
    while True:
        number = draw.randrange(1000)
        if is_held_out(str(number)) == held_out:
            break
    form = draw.randrange(4)
    if form == 0:
        return Example("number", f"Write in words: {number}", in_english(number))
    if form == 1:
        return Example("number", f"Write in digits: {in_english(number)}", str(number))
    if form == 2:
        return Example("number", f"逐位读出：{number}", by_digit(number))
    return Example("number", f"用数字写：{by_digit(number)}", str(number))


def _record(draw: random.Random, held_out: bool) -> Example:
    english = draw.random() < 0.5
    cities, trades = (CITIES, TRADES) if english else (CITIES.values(), TRADES.values())
    people = PEOPLE if english else PEOPLE_ZH
    name, city = _pair(draw, people, tuple(cities), held_out)
    name, trade = _pair(draw, (name,), tuple(trades), held_out=False)
    age = str(draw.randrange(20, 80))
    if english:
        fields = [f"name: {name}", f"city: {city}", f"work: {trade}", f"age: {age}"]
        draw.shuffle(fields)
        asked, answer = draw.choice((("city", city), ("work", trade), ("age", age)))
        return Example("record", f"{', '.join(fields)}. What is the {asked}?", f"{asked}: {answer}")
    fields = [f"姓名：{name}", f"城市：{city}", f"职业：{trade}", f"年龄：{age}"]
    draw.shuffle(fields)
    asked, answer = draw.choice((("城市", city), ("职业", trade), ("年龄", age)))
    return Example("record", f"{'，'.join(fields)}。{asked}是什么？", f"{asked}：{answer}")


def _register(draw: random.Random, held_out: bool) -> Example:
    english = draw.random() < 0.5
    people = PEOPLE if english else PEOPLE_ZH
    cities = tuple(CITIES) if english else tuple(CITIES.values())
    asked, city = _pair(draw, people, cities, held_out)
    others = [person for person in people if person != asked]
    draw.shuffle(others)
    lines = [_pair(draw, (person,), cities, held_out=False) for person in others[: _tail(draw, 1, 21)]]
    lines.append((asked, city))
    draw.shuffle(lines)
    if english:
        facts = ", ".join(f"{person}: {place}" for person, place in lines)
        return Example("register", f"{facts}. Where is {asked}?", f"{asked}: {city}")
    facts = "，".join(f"{person}：{place}" for person, place in lines)
    return Example("register", f"{facts}。{asked}在哪里？", f"{asked}：{city}")


def _list(draw: random.Random, held_out: bool) -> Example:
    english = draw.random() < 0.5
    things = tuple(THINGS) if english else tuple(THINGS.values())
    people = PEOPLE if english else PEOPLE_ZH
    first = _pair(draw, things, things, held_out)
    others = [thing for thing in (*things, *people) if thing not in first]
    items = [*first, *draw.sample(others, k=_tail(draw, 1, len(others)))]
    if english:
        text = ", ".join(items)
        return Example("list", f"Read back: {text}.", text)
    text = "，".join(items)
    return Example("list", f"复述：{text}。", text)


LESSONS: tuple[Callable[[random.Random, bool], Example], ...] = (
    _translate,
    _number,
    _record,
    _register,
    _list,
)


def examples(count: int, *, seed: int, held_out: bool) -> list[Example]:
    """So many examples, the lessons in equal parts; the same seed gives the same ones."""
    draw = random.Random(seed)
    made = [LESSONS[index % len(LESSONS)](draw, held_out) for index in range(count)]
    draw.shuffle(made)
    return made


def vocabulary() -> list[str]:
    """Every word of the lessons, as the tokenizer may meet it: with and without a space before it."""
    english = [*COLOURS, *THINGS, *CITIES, *TRADES, *PEOPLE, *ONES, *TENS[2:]]
    english += "Translate into Chinese the Write in words digits name city work age What is The".split()
    english += "Where Read back hundred".split()
    chinese = [*COLOURS.values(), *THINGS.values(), *CITIES.values(), *TRADES.values(), *PEOPLE_ZH]
    chinese += [*DIGITS_ZH, "翻译成英文", "逐位读出", "用数字写", "姓名", "城市", "职业", "年龄"]
    chinese += ["是什么", "在哪里", "复述", "：", "，", "。", "？"]
    return [*english, *(f" {word}" for word in english), *chinese]


def write_examples(path: Path, made: Sequence[Example]) -> None:
    """One conversation a line, in the form that one's own data would have."""
    lines = (
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": example.question},
                    {"role": "assistant", "content": example.answer},
                ]
            },
            ensure_ascii=False,
        )
        for example in made
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
