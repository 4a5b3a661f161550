import pytest

from glm_accelerate.plan.hardware import ALSO, DEVICES, GIB, as_hardware, find_device, known
from glm_accelerate.runtime.errors import UserError


@pytest.mark.parametrize(
    "name",
    ["RTX 3060 12GB", "RTX 3060", "RTX 3090", "RTX 4090", "RTX 5090", "V100 16GB", "V100 32GB", "V100",
     "A100 40GB", "A100 80GB", "A100", "H100", "H200", "H20", "H800", "L20", "L40S", "Ascend 910B", "910b",
     "MLU370", "MLU370-X4", "MLU590", "rtx4090", "nvidia geforce rtx 4090", "Cambricon MLU590"],
)  # fmt: skip
def test_the_devices_people_have_are_known(name: str) -> None:
    found = find_device(name)
    assert 11 * GIB < found.memory < 200 * GIB
    assert found.products is not None
    assert found.products > 2e13
    assert found.bandwidth is not None


def test_a_size_is_a_device_of_which_nothing_else_is_known() -> None:
    found = find_device("12GiB")
    assert (found.memory, found.products) == (12 * GIB, None)
    assert find_device("12GB").memory == 12 * 10**9


@pytest.mark.parametrize(
    ("asked", "meant"), [("RTX 4900", "RTX 4090"), ("H2000", "H200"), ("Ascend 910", "Ascend 910B")]
)
def test_an_unknown_name_is_refused_with_the_nearest_and_the_list(asked: str, meant: str) -> None:
    with pytest.raises(UserError) as caught:
        find_device(asked)
    said = str(caught.value)
    assert said.startswith(f"no device called `{asked}` is known (did you mean `{meant}`? there are this, ")
    assert all(one.name in said for one in DEVICES)
    assert said.endswith("or say its memory: 12GiB)")


def test_nonsense_gets_the_list_alone() -> None:
    with pytest.raises(UserError, match=r"\(there are this, "):
        find_device("显卡")


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB"),
        ("Tesla V100-PCIE-32GB", "V100 32GB"),
        ("NVIDIA GeForce RTX 3060", "RTX 3060"),
        ("NVIDIA GeForce RTX 4090 D", "RTX 4090"),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 3060 Ti", None),
        ("Intel(R) Xeon(R)", None),
    ],
)
def test_names_as_drivers_have_them(driver: str, name: str | None) -> None:
    found = known(driver)
    assert (found and found.name) == name


def test_names_are_one_thing_each() -> None:
    names = [one.name for one in DEVICES]
    assert len(set(names)) == len(names)
    assert set(ALSO.values()) <= set(names)


def test_a_machine_that_is_not_here() -> None:
    made = as_hardware(find_device("V100 32GB"), 4)
    assert (made.device, made.count, made.bf16) == ("cuda", 4, False)
    assert as_hardware(find_device("MLU590"), 1).device == "mlu"
    size = as_hardware(find_device("12GiB"), 1)
    assert size.memory_bytes == 12 * GIB
