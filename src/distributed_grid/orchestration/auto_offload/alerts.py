"""Tells people of trouble: posts an alert to an address, hands it to a program; neither may hold us up."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

log = logging.getLogger(__name__)

LIMIT_S = 10.0


async def send_alert(alert: Mapping[str, Any], *, webhook: str | None, command: Sequence[str] | None) -> list[str]:
    """Send it wherever it is to go, at once; what went wrong comes back as text, for there is nobody to raise to."""
    content = json.dumps(alert, default=str).encode()
    ways = []
    if webhook:
        ways.append(_posted(webhook, content))
    if command:
        ways.append(_handed(list(command), content))
    failed = [text for text in await asyncio.gather(*ways) if text]
    for text in failed:
        log.warning("%s", text)
    return failed


async def _posted(url: str, content: bytes) -> str:
    try:
        async with asyncio.timeout(LIMIT_S + 5):
            await asyncio.to_thread(_post, url, content)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"the webhook did not take the alert: {str(error) or type(error).__name__}"
    return ""


def _post(url: str, content: bytes) -> None:
    if not url.startswith(("http://", "https://")):
        raise ValueError("not an http address")
    headers = {"Content-Type": "application/json", "User-Agent": "distributed-grid"}
    request = urllib.request.Request(url, content, headers, method="POST")
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        answer.read(1024)


async def _handed(argv: list[str], content: bytes) -> str:
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return f"the alert command {argv[0]} could not be run: {error.strerror}"
    try:
        async with asyncio.timeout(LIMIT_S):
            await process.communicate(content)
    except TimeoutError:
        process.kill()
        await process.wait()
        return f"the alert command {argv[0]} took longer than {LIMIT_S:.0f} s and was ended"
    except OSError:
        await process.wait()  # it did not read its input, which is its own business
    return "" if process.returncode == 0 else f"the alert command {argv[0]} exited {process.returncode}"
