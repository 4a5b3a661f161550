"""Messages to where people read them (Feishu, DingTalk, WeCom, whatever takes JSON): how a run ended, its
warnings, that no step comes any more. A thread sends them: training never waits for a network.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from queue import Empty, Queue
from threading import Thread
from typing import cast
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from glm_accelerate.observe.events import BEGINNINGS, Event
from glm_accelerate.runtime.env import variable
from glm_accelerate.runtime.errors import UserError

VARIABLE = "env:"
SILENT, STEPS = 600.0, 20  # seconds, and usual steps, without a step: whichever is longer is told
LOOK = 5.0  # seconds between two looks
BETWEEN = 600.0  # seconds between messages of warnings
PAUSES = (1.0, 5.0, 0.0)  # after each try
TIMEOUT = 10.0
PATIENCE = 30.0  # seconds that the end of a run waits for its last message
# What a robot of a chat takes, by its host. Its key is in the address, never in a message.
TEXT_OF_CHAT: dict[str, Callable[[str], dict[str, object]]] = {
    "open.feishu.cn": lambda text: {"msg_type": "text", "content": {"text": text}},
    "open.larksuite.com": lambda text: {"msg_type": "text", "content": {"text": text}},
    "oapi.dingtalk.com": lambda text: {"msgtype": "text", "text": {"content": text}},
    "qyapi.weixin.qq.com": lambda text: {"msgtype": "text", "text": {"content": text}},
}


def addresses_of(notify: Sequence[str]) -> list[str]:
    """The addresses that a config names, or the variables that hold them."""
    found: list[str] = []
    for given in notify:
        name = given.removeprefix(VARIABLE)
        address = given if name == given else variable(name)
        if urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).hostname:
            text = "is no address" if name == given else f"names the variable {name}, which holds no address"
            cure = "an address that begins with https://, or env:NAME of a variable that holds one"
            raise UserError(f"one of its values {text}", where="observe.notify", cure=cure)
        found.append(address)
    return found


class Notices:
    """An observer that sends. `clock`: for tests, which do not wait for minutes."""

    def __init__(
        self, addresses: Sequence[str], run: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._addresses, self._run, self._clock = list(addresses), run, clock
        self._waiting: Queue[tuple[str, Event] | None] = Queue()
        self._begun = self._ended = False
        self._last, self._longest, self._step = math.inf, 0.0, 0
        self._warned, self._unsent = -math.inf, 0  # when a warning was sent, and how many were not since
        self._failure = ""
        self._thread = Thread(target=self._work, name="notices", daemon=True)
        self._thread.start()

    def observe(self, event: Event) -> None:
        """Hand over what is worth a message. OSError once a message could not be sent."""
        kind = event["kind"]
        if kind in BEGINNINGS:
            self._begun = True
        elif kind == "step":
            self._step = cast("int", event["step"])
            self._longest = max(self._longest, cast("float", event.get("seconds") or 0.0))
            self._last = self._clock()
        elif kind == "warning":
            self._warn(event)
        elif kind == "stop":
            self._ended = True
            done = event.get("reason") == "done"
            said = "finished" if done else f"stopped ({event.get('reason')})"
            self._waiting.put((f"{said} at step {event.get('step')}", event))
        self._raise()

    def close(self) -> None:
        """The last message, if the run did not end by itself, and those that still wait."""
        if self._begun and not self._ended:
            event = {"kind": "failure", "step": self._step}
            self._waiting.put((f"FAILED after step {self._step}", event))
        self._waiting.put(None)
        self._thread.join(PATIENCE)
        self._raise()

    def _warn(self, event: Event) -> None:
        now = self._clock()
        if now - self._warned < BETWEEN:
            self._unsent += 1
            return
        more = f" (and {self._unsent} more since the last message)" if self._unsent else ""
        self._warned, self._unsent = now, 0
        self._waiting.put((f"warning at step {self._step}: {event.get('said')}{more}", event))

    def _raise(self) -> None:
        if self._failure:
            raise OSError(self._failure)

    def _work(self) -> None:
        """Send until told to end; between messages, look whether steps still come."""
        told = -math.inf
        while True:
            try:
                message = self._waiting.get(timeout=LOOK)
            except Empty:
                last, limit = self._last, max(SILENT, STEPS * self._longest)
                if self._clock() - last > limit and last > told and not self._ended:
                    told = last
                    text = f"no step for {(self._clock() - last) / 60:.0f} minutes, since step {self._step}"
                    self._send(text, {"kind": "silence", "step": self._step})
                continue
            if message is None:
                return
            self._send(*message)

    def _send(self, said: str, event: Event) -> None:
        text = f"glm-accelerate {self._run}: {said}"
        for address in self._addresses:
            host = urlsplit(address).hostname or ""
            whole = {"text": text, "run": self._run, "event": dict(event)}
            body = TEXT_OF_CHAT[host](text) if host in TEXT_OF_CHAT else whole
            if failure := _post(address, json.dumps(body).encode()):
                self._failure = f"{host} takes no messages: {failure}"


def _post(address: str, body: bytes) -> str:
    """Send it, in three tries; why not, without the address, which holds a key."""
    failure = ""
    for pause in PAUSES:
        request = Request(address, body, {"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=TIMEOUT) as answer:
                told = json.loads(answer.read(1 << 16) or b"{}")
            # Robots of chats answer 200 and say in the body what was wrong.
            code = next((told[key] for key in ("errcode", "code", "StatusCode") if key in told), 0)
            if not code:
                return ""
            failure = str(told.get("errmsg") or told.get("msg") or code)
        except ValueError:
            return ""  # it was taken, and the answer is no JSON
        except (URLError, OSError) as error:
            failure = str(getattr(error, "reason", None) or error)
        time.sleep(pause)
    return failure
