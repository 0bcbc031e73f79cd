"""Downloads a wheel from the package index, without pip but as pip is set up on this machine.

Which index, mirrors and folders there are is read from pip's environment variables and configuration files; where pip
has none, from uv's variables. The index is asked, the file fetched and its hash checked by ``unearth``, which knows the
simple API (PEP 503, PEP 691), proxies and netrc.
"""

from __future__ import annotations

import configparser
import os
import re
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pilotfish.errors import NotFoundError, UnavailableError

if TYPE_CHECKING:
    from unearth import PackageFinder

PYPI = "https://pypi.org/simple"
_TIMEOUT_S = 15.0  # pip's
_OF_MACHINE, _OF_SITE = Path("/etc/pip.conf"), Path(sys.prefix) / "pip.conf"
_SECTIONS = ("global", "download")  # of pip's files; the later wins
_NAMED = re.compile(r"^[\w-]+=(?=\w+://)")  # uv's NAME=URL
_OF_UV = {
    "index-url": ("UV_DEFAULT_INDEX", "UV_INDEX_URL"),
    "extra-index-url": ("UV_INDEX", "UV_EXTRA_INDEX_URL"),
    "find-links": ("UV_FIND_LINKS",),
}

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all; 0 if nobody knows)."""


@dataclass(frozen=True)
class IndexSettings:
    """Where wheels come from, by the names of pip's options."""

    index_urls: tuple[str, ...] = (PYPI,)
    find_links: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()
    cert: str | None = None
    """File of certificates to trust."""
    proxy: str | None = None
    timeout_s: float = _TIMEOUT_S

    @classmethod
    def of_this_machine(cls, environ: Mapping[str, str] = os.environ) -> IndexSettings:
        """As pip would find them: its variables, then its files, site before user before machine."""
        options = _from_files(environ) | _from_variables(environ)
        urls = [] if _is_on(options.get("no-index")) else [options.get("index-url") or PYPI]
        urls += [] if not urls else options.get("extra-index-url", "").split()
        timeout = options.get("timeout") or options.get("default-timeout")
        return cls(
            index_urls=tuple(urls),
            find_links=tuple(os.path.expanduser(link) for link in options.get("find-links", "").split()),
            trusted_hosts=tuple(options.get("trusted-host", "").split()),
            cert=options.get("cert") or None,
            proxy=options.get("proxy") or None,
            timeout_s=_TIMEOUT_S if timeout is None else float(timeout),
        )


def download(
    package: str, version: str, sha256: str, folder: Path, progress: Progress, settings: IndexSettings | None = None
) -> Path:
    """A wheel in ``folder``, or where a local index keeps it.

    Args:
        package: its name.
        version: exactly this one.
        sha256: of the file, in hex; no other file is taken.
        folder: exists.
        progress: told as bytes arrive.
        settings: where to look; None for this machine's.

    Raises:
        NotFoundError: no index has it.
        UnavailableError: it cannot be fetched, or is another file than the one known.
    """
    import httpx2
    from unearth.errors import UnpackError

    settings = settings or IndexSettings.of_this_machine()
    asked = f"{package} {version} from {_places(settings)}"
    try:
        with _finder(settings) as finder:
            found = finder.find_matches(f"{package}=={version}")
            link = next((match.link for match in found if match.link.is_wheel), None)
            if link is None:
                raise NotFoundError(
                    f"cannot download {asked}: no such wheel there; is the package index reachable? It is taken from "
                    "PIP_INDEX_URL, pip.conf or UV_DEFAULT_INDEX"
                )
            hashes = {"sha256": [sha256]}
            return finder.download(link, folder, hashes, lambda _, done, total: progress(done, total or 0))
    except UnpackError as error:  # a hash that is not the known one is one, too
        raise UnavailableError(f"cannot download {asked}: {' '.join(str(error).split())}") from error
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
        raise UnavailableError(f"cannot download {asked}: {type(error).__name__}: {error}") from error


@contextmanager
def _finder(settings: IndexSettings) -> Iterator[PackageFinder]:
    from unearth import PackageFinder
    from unearth.auth import MultiDomainBasicAuth
    from unearth.fetchers import PyPIClient

    more: dict[str, Any] = {} if settings.proxy is None else {"proxy": settings.proxy}
    if settings.cert is not None:
        more["verify"] = ssl.create_default_context(cafile=settings.cert)
    trusted, timeout = settings.trusted_hosts, settings.timeout_s
    with PyPIClient(trusted_hosts=trusted, timeout=timeout, follow_redirects=True, **more) as session:
        session.auth = MultiDomainBasicAuth(prompting=False, index_urls=settings.index_urls)
        links = [link for link in settings.find_links if "://" in link or os.path.exists(link)]
        fetcher: Any = session  # a protocol that their own client does not keep to the letter
        finder = PackageFinder(fetcher, index_urls=settings.index_urls, find_links=links, trusted_hosts=trusted)
        if not settings.index_urls:  # told nothing else, it would ask PyPI
            finder.sources = [source for source in finder.sources if source["type"] != "index"]
        yield finder


def _places(settings: IndexSettings) -> str:
    """Where a wheel is looked for, without passwords."""
    from unearth.link import Link

    return " ".join((*(Link(url).redacted for url in settings.index_urls), *settings.find_links)) or "nowhere"


def _from_variables(environ: Mapping[str, str]) -> dict[str, str]:
    options = {}
    for option, names in _OF_UV.items():
        if value := next((environ[name] for name in names if environ.get(name)), None):
            options[option] = " ".join(_NAMED.sub("", part) for part in value.split())
    for name, value in environ.items():
        if name.startswith("PIP_") and value:
            options[name.removeprefix("PIP_").lower().replace("_", "-")] = value
    return options


def _from_files(environ: Mapping[str, str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for path in _files(environ):
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError) as error:
            raise UnavailableError(f"{path} is no configuration file of pip ({error}); mend it or move it") from error
        for section in _SECTIONS:
            options |= dict(parser.items(section)) if parser.has_section(section) else {}
    return options


def _files(environ: Mapping[str, str]) -> Iterator[Path]:
    """pip's configuration files, those that win last."""
    named = environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return
    home = Path(environ.get("HOME") or Path.home())
    for folder in reversed((environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep)):
        yield Path(folder) / "pip" / "pip.conf"
    yield _OF_MACHINE
    yield home / ".pip" / "pip.conf"
    yield Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"
    yield _OF_SITE
    if named:
        yield Path(named)


def _is_on(value: str | None) -> bool:
    return (value or "").lower() in ("1", "true", "yes", "on", "y", "t")
