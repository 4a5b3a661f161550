"""Messages of a run, to real servers on this machine."""

import json
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event as Signal
from threading import Thread
from typing import Any

import pytest

from glm_accelerate.config.load import override
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.observe import notices
from glm_accelerate.observe.notices import BETWEEN, SILENT, STEPS, TEXT_OF_CHAT, Notices, addresses_of
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.training.run import train

KEY = "a-secret-key"


class Hook(ThreadingHTTPServer):
    """Keeps what is posted; answers with `answers`, the last of them for ever."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.got: list[dict[str, Any]] = []
        self.answers: list[tuple[int, str]] = [(200, "{}")]
        self.came = Signal()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{KEY}"

    @property
    def texts(self) -> list[str]:
        return [message["text"] for message in self.got]


class _Handler(BaseHTTPRequestHandler):
    server: Hook  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status, text = self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]
        if status == 200 and '"errcode": 1' not in text:
            self.server.got.append(json.loads(body))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())
        self.server.came.set()

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Generator[Hook]:
    monkeypatch.setattr(notices, "PAUSES", (0.0, 0.0, 0.0))
    monkeypatch.setattr(notices, "LOOK", 0.02)
    with Hook() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def step(number: int, seconds: float = 1.0) -> dict[str, object]:
    return {"kind": "step", "step": number, "seconds": seconds}


def test_a_run_tells_its_end_and_keeps_the_key_to_itself(
    hook: Hook, tiny_run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_HOOK", hook.address)
    config = RunConfig.model_validate({**tiny_run, "observe": {"notify": ["env:MY_HOOK"]}})
    assert train(override(config, ["train.steps=2"]), tmp_path / "my run").done
    assert hook.texts[-1] == "glm-accelerate my run: finished at step 2"
    assert hook.got[-1]["event"]["reason"] == "done"
    files = [path for path in (tmp_path / "my run").rglob("*") if path.is_file()]
    assert [path.name for path in files if KEY.encode() in path.read_bytes()] == []


def test_a_failure_is_told_by_whoever_closes_without_an_end(hook: Hook) -> None:
    told = Notices([hook.address], "run")
    told.observe({"kind": "resume", "step": 3})
    told.observe(step(4))
    told.close()
    assert hook.texts == ["glm-accelerate run: FAILED after step 4"]
    never_begun = Notices([hook.address], "run")
    never_begun.close()
    assert len(hook.got) == 1


def test_warnings_come_once_in_a_while_and_are_counted(hook: Hook) -> None:
    now = [0.0]
    told = Notices([hook.address], "run", clock=lambda: now[0])
    for said in "abc":
        told.observe({"kind": "warning", "said": said})
    now[0] += BETWEEN
    told.observe({"kind": "warning", "said": "d"})
    told.observe({"kind": "stop", "step": 0, "reason": "SIGTERM"})
    told.close()
    said = [text.partition(": ")[2] for text in hook.texts]
    assert said == [
        "warning at step 0: a",
        "warning at step 0: d (and 2 more since the last message)",
        "stopped (SIGTERM) at step 0",
    ]


@pytest.mark.parametrize(("seconds", "limit"), [(1.0, SILENT), (100.0, STEPS * 100.0)])
def test_silence_is_told_once_until_steps_come_again(hook: Hook, seconds: float, limit: float) -> None:
    now = [0.0]
    told = Notices([hook.address], "run", clock=lambda: now[0])
    told.observe({"kind": "start", "step": 0})
    told.observe(step(7, seconds))
    now[0] += limit - 1
    assert not hook.came.wait(0.2)
    now[0] += 2
    assert hook.came.wait(20)
    hook.came.clear()
    told.observe(step(8, seconds))
    told.observe({"kind": "stop", "step": 8, "reason": "done"})
    told.close()
    assert [text.partition(": ")[2] for text in hook.texts] == [
        f"no step for {limit / 60:.0f} minutes, since step 7",
        "finished at step 8",
    ]


def test_a_server_that_fails_is_asked_again_and_then_left(hook: Hook) -> None:
    hook.answers = [(500, ""), (200, '{"errcode": 1, "errmsg": "busy"}'), (200, "{}")]
    told = Notices([hook.address], "run")
    told.observe({"kind": "stop", "step": 1, "reason": "done"})
    told.close()
    assert len(hook.got) == 1
    hook.answers = [(200, '{"errcode": 1, "errmsg": "keywords not in content"}')]
    told = Notices([hook.address], "run")
    told.observe({"kind": "stop", "step": 1, "reason": "done"})
    with pytest.raises(OSError, match=r"127.0.0.1 takes no messages: keywords not in content") as caught:
        told.close()
    assert KEY not in str(caught.value)


def test_nobody_there_is_no_reason_to_wait_or_to_name_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "PAUSES", (0.0, 0.0, 0.0))
    told = Notices([f"http://127.0.0.1:9/{KEY}"], "run")
    told.observe({"kind": "stop", "step": 1, "reason": "done"})
    with pytest.raises(OSError, match=r"127\.0\.0\.1 takes no messages") as caught:
        told.close()
    assert KEY not in str(caught.value)


def test_each_chat_has_its_form() -> None:
    """As their documents of November 2026 say."""
    forms = {host: text("hello") for host, text in TEXT_OF_CHAT.items()}
    assert forms["open.feishu.cn"] == {"msg_type": "text", "content": {"text": "hello"}}
    assert forms["oapi.dingtalk.com"] == forms["qyapi.weixin.qq.com"]
    assert forms["oapi.dingtalk.com"] == {"msgtype": "text", "text": {"content": "hello"}}


@pytest.mark.parametrize("given", ["env:NOT_SET", "ftp://host/x", "hello", "https://"])
def test_what_is_no_address_is_refused_without_being_shown(given: str) -> None:
    with pytest.raises(UserError, match=r"observe.notify") as caught:
        addresses_of([given])
    assert "hello" not in str(caught.value)
