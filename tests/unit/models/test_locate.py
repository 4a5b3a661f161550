import pytest

from glm_accelerate.models.locate import locate
from glm_accelerate.runtime.errors import UserError


def test_what_keeps_a_name_from_being_fetched_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLM_ACCELERATE_OFFLINE", "1")
    with pytest.raises(UserError, match="nothing is fetched while HF_HUB_OFFLINE or GLM_ACCELERATE_OFFLINE"):
        locate("nobody/nosuch")
