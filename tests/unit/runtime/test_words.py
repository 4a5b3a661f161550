import pytest

from glm_accelerate.runtime.words import amount, duration, read_amount, read_rate


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (12, "12 B"), (512 << 10, "512 KiB"), (3 << 20, "3 MiB"), (1000 << 20, "1,000 MiB"),
     (1 << 30, "1 GiB"), (int(11.76 * 2**30), "11.8 GiB"), (149 << 30, "149 GiB"), (3 << 40, "3 TiB")],
)  # fmt: skip
def test_amounts_are_written(size: int, text: str) -> None:
    assert amount(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 µs"), (3e-6, "3 µs"), (0.0125, "12.5 ms"), (2.5, "2.5 s"), (119.0, "119 s"), (1800.0, "30 min"),
     (7200.0, "2 h"), (100_000.0, "27.8 h"), (200_000.0, "2.31 days")],
)  # fmt: skip
def test_durations_are_written(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12GiB", 12 << 30),
        ("12GB", 12 * 10**9),
        ("12gb", 12 * 10**9),
        (" 1.5 GiB ", 3 << 29),
        ("512MiB", 512 << 20),
        ("12", None),
        ("12G", None),
        ("-1GiB", None),
        ("1e3GiB", None),
        ("RTX 3060 12GB", None),
        ("١٢GiB", None),
        ("", None),
    ],
)
def test_amounts_are_read(text: str, size: int | None) -> None:
    assert read_amount(text) == size


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("100Gbit", 1.25e10),
        ("1.6 Tbit/s", 2e11),
        ("800mbit", 1e8),
        ("100GB", None),
        ("Gbit", None),
        ("-1Gbit", None),
    ],
)
def test_rates_are_read(text: str, rate: float | None) -> None:
    assert read_rate(text) == rate
