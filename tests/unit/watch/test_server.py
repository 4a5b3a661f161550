"""Who is served, over real HTTP."""

import json
from collections.abc import Generator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from threading import Thread

import pytest

from glm_accelerate.cli.watch import kept_token
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.watch.run import WatchedRun
from glm_accelerate.watch.server import LOOPBACK, PageServer

Headers = dict[str, str]


@pytest.fixture
def server(tmp_path: Path) -> Generator[PageServer]:
    (tmp_path / "events.jsonl").write_text('{"kind": "step", "step": 1}\n')
    (tmp_path / "config.yaml").write_text("secret: true\n")
    with PageServer([WatchedRun(tmp_path, "run")]) as running:
        thread = Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def get(
    server: PageServer, path: str, headers: Headers | None = None, verb: str = "GET"
) -> tuple[HTTPResponse, str]:
    connection = HTTPConnection(LOOPBACK, server.port, timeout=10)
    connection.request(
        verb, path, headers={"Cookie": f"{server.cookie}={server.token}"} if headers is None else headers
    )
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


def test_the_address_lets_a_browser_in_and_leaves_no_token_in_its_bar(server: PageServer) -> None:
    answer, _ = get(server, server.address.partition(str(server.port))[2], {})
    assert (answer.status, answer.headers["Location"]) == (303, "/")
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    page, text = get(server, "/", {"Cookie": cookie.partition(";")[0]})
    assert page.status == 200
    assert "<main>" in text
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert page.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "path", ["/", "/page.js", "/runs", "/events?run=0&from=0", "/?token=wrong", "/?token=é"]
)
def test_without_the_token_nothing_is_told(server: PageServer, path: str) -> None:
    path = path.encode().decode("latin-1") if path.isascii() else "/?token=%C3%A9"
    for headers in ({}, {"Cookie": f"{server.cookie}=wrong"}, {"Cookie": "other=1; ;;=\x7f"}):
        answer, text = get(server, path, headers)
        assert answer.status == 403
        assert "step" not in text


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1"},
        {"Host": "127.0.0.1.evil.example:{port}"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://localhost"},
    ],
)
def test_other_names_are_refused_even_with_the_token(server: PageServer, headers: Headers) -> None:
    """A name that leads here (DNS rebinding), or a page of someone else."""
    given = {name: value.replace("{port}", str(server.port)) for name, value in headers.items()}
    answer, text = get(server, "/runs", {"Cookie": f"{server.cookie}={server.token}", **given})
    assert answer.status == 403
    assert "run" not in text


def test_its_own_names_are_not(server: PageServer) -> None:
    own = {"Host": f"localhost:{server.port}", "Origin": f"http://localhost:{server.port}"}
    answer, text = get(server, "/runs", {"Cookie": f"{server.cookie}={server.token}", **own})
    assert answer.status == 200
    assert json.loads(text)[0]["name"] == "run"


@pytest.mark.parametrize(
    "path",
    [
        "/config.yaml",
        "/../config.yaml",
        "/%2e%2e/config.yaml",
        "/events?run=1",
        "/events?run=-1",
        "/events?run=0&from=-5",
        "/events?run=x",
        "/answers?run=0&step=../../config",
        "/answers?run=0&step=-1",
        "//etc/passwd",
        "/nothing",
    ],
)
def test_nothing_else_can_be_read(server: PageServer, path: str) -> None:
    answer, text = get(server, path)
    assert answer.status == 404
    assert "secret" not in text


def test_events_are_given_from_where_the_page_was(server: PageServer) -> None:
    first = json.loads(get(server, "/events?run=0&from=0")[1])
    assert [event["step"] for event in first["events"]] == [1]
    assert json.loads(get(server, f"/events?run=0&from={first['next']}")[1])["events"] == []


def test_nodes_come_with_the_events(server: PageServer, tmp_path: Path) -> None:
    assert json.loads(get(server, "/events?run=0&from=0")[1])["nodes"] == []
    rank = {"rank": 0, "process": 7, "step": 3, "phase": "training", "silent": 0.5, "stopped": False}
    said = {
        "node": "<script>", "time": 1.7e9, "attempt": 1, "ended": True, "load": 1.5, "cores": 2,
        "memory": {"free": 1, "whole": 2}, "ranks": [rank],
        "others": [{"device": "cuda:0", "bytes": 5, "count": 1, "named": ["<img>"]}],
    }  # fmt: skip
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks/torn.json").write_text(json.dumps(said)[:-9])
    (tmp_path / "ranks/n.json").write_text(json.dumps(said))
    answer, text = get(server, "/events?run=0&from=0")
    assert answer.headers["Content-Type"].startswith("application/json")
    (node,) = json.loads(text)["nodes"]
    assert (node["node"], node["ranks"][0]["state"], node["others"]) == ("<script>", "ended", said["others"])


def test_prometheus_is_served_with_the_token(server: PageServer) -> None:
    bearer = {"Authorization": f"Bearer {server.token}"}
    for path, headers in (("/metrics", bearer), (f"/metrics?token={server.token}", {})):
        answer, text = get(server, path, headers)
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert 'glm_step{run="run"} 1.0\n' in text
    refused = ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {server.token}"})
    assert [get(server, "/metrics", headers)[0].status for headers in refused] == [403, 403, 403]
    assert get(server, "/metrics", {**bearer, "Host": "evil.example"})[0].status == 403
    assert get(server, "/runs", bearer)[0].status == 403  # a scraper sees figures and no texts


def test_a_token_that_is_kept_is_its_owners_alone(tmp_path: Path) -> None:
    file = tmp_path / "token"
    kept = kept_token(file)
    assert kept == kept_token(file)
    with PageServer([], token=kept) as running:
        assert running.token == kept
    file.chmod(0o644)
    with pytest.raises(UserError, match="others can read it"):
        kept_token(file)


@pytest.mark.parametrize("verb", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_it_takes_nothing(server: PageServer, verb: str) -> None:
    assert get(server, "/runs", verb=verb)[0].status == 501


def test_it_listens_to_this_machine_alone(server: PageServer) -> None:
    assert server.server_address[0] == LOOPBACK
