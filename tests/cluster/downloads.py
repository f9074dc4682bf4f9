"""Official release downloads, each verified by the checksum file that its project publishes."""

import hashlib
import http.client
import io
import tarfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 4.0  # also the limit of one read: an unreachable host must not delay the build


class DownloadError(Exception):
    """The release cannot be downloaded, or does not match its checksum."""


@dataclass(frozen=True)
class Release:
    """Location of one file of a release. `{version}` has no leading `v`.

    Attributes:
        url: the file.
        checksum_url: a file with only its SHA-256, or with lines of `digest  name`.
        member: path in the file, if it is a tar archive.
    """

    url: str
    checksum_url: str
    member: str = ""

    def fetch(self, version: str) -> bytes:
        """Download, verify and unpack.

        Returns:
            The content of the binary.

        Raises:
            DownloadError: the host does not answer, or the checksum differs.
        """
        url = self.url.format(version=version)
        digest = checksum_of(_get(self.checksum_url.format(version=version)).decode(), url.rsplit("/", 1)[-1])
        content = _get(url)
        if hashlib.sha256(content).hexdigest() != digest:
            raise DownloadError(f"{url} does not match its checksum {digest}")
        return unpack(content, self.member.format(version=version)) if self.member else content


def checksum_of(listing: str, file_name: str) -> str:
    """Return the SHA-256 of `file_name` in a checksum file: a bare digest, or the line that names the file.

    Raises:
        DownloadError: no line names the file.
    """
    lines = [line.split() for line in listing.splitlines() if line.strip()]
    if len(lines) == 1 and len(lines[0][0]) == 64:
        return lines[0][0]
    for line in lines:
        if len(line) == 2 and line[1].lstrip("*").rsplit("/", 1)[-1] == file_name:
            return line[0]
    raise DownloadError(f"the checksum file does not name {file_name}")


def unpack(archive: bytes, member: str) -> bytes:
    """Return one file of a (compressed) tar archive.

    Raises:
        DownloadError: the archive does not contain it.
    """
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        try:
            file = tar.extractfile(member)
        except KeyError:
            file = None
        if file is None:
            raise DownloadError(f"the archive holds no file {member}")
        return file.read()


def _get(url: str) -> bytes:
    host = urlsplit(url).netloc
    try:
        with urllib.request.urlopen(url, timeout=CONNECT_TIMEOUT_S) as answer:
            content: bytes = answer.read()
            return content
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise DownloadError(f"{host}: {getattr(error, 'reason', error)}") from None
