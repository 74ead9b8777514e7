"""A server that speaks OpenEnv's wire: GET /schema, and a session per WebSocket at /ws. For tests."""

from __future__ import annotations

import json
from typing import Any

from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect


class Countdown:
    """Subtract from a number that the seed chooses until nothing is left; a negative rest is an error."""

    def reset(self, seed: int) -> dict[str, Any]:
        self.left = 5 + seed % 3
        return self.look(None)

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        self.left -= action["take"]
        if self.left < 0:
            raise ValueError("nothing is left")
        return self.look(float(self.left == 0))

    def look(self, reward: float | None) -> dict[str, Any]:
        return {"observation": {"text": f"{self.left} left"}, "reward": reward, "done": self.left == 0}


FIELD = {"take": {"type": "integer"}, "metadata": {"type": "object"}}
sessions: list[int] = []  # the numbers of sessions that are open


def schema(request: Any) -> JSONResponse:
    return JSONResponse({"action": {"properties": FIELD, "required": ["take"]}, "observation": {}, "state": {}})


async def serve(socket: WebSocket) -> None:
    await socket.accept()
    game = Countdown()
    sessions.append(id(game))
    try:
        while True:
            message = json.loads(await socket.receive_text())
            if message["type"] == "close":
                break
            await socket.send_text(json.dumps(answer(game, message)))
    except WebSocketDisconnect:
        pass
    finally:
        sessions.remove(id(game))


def answer(game: Countdown, message: dict[str, Any]) -> dict[str, Any]:
    try:
        if message["type"] == "reset":
            return {"type": "observation", "data": game.reset(message["data"]["seed"])}
        if set(message["data"]) != {"take"} or message["data"]["take"] < 1:
            return {"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": []}}
        return {"type": "observation", "data": game.step(message["data"])}
    except ValueError as error:
        return {"type": "error", "data": {"message": str(error), "code": "EXECUTION_ERROR"}}


app = Starlette(routes=[Route("/schema", schema), WebSocketRoute("/ws", serve)])
