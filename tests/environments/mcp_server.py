"""An MCP server on standard input and output, with four tools. For tests."""

from __future__ import annotations

import logging
import os
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("sums", log_level="CRITICAL")
logging.disable(logging.CRITICAL)


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def where(word: str = "") -> str:
    """The process of this server."""
    return f"{word}{os.getpid()}"


@server.tool()
def sleep(seconds: float) -> str:
    """Answer late."""
    time.sleep(seconds)
    return "late"


@server.tool()
def leave() -> str:
    """End without an answer."""
    os._exit(1)


if __name__ == "__main__":
    server.run()
