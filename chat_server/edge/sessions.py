"""The HTTP side of sessions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from chat_server.commands import Commands
from chat_server.core.ids import is_id
from chat_server.edge.gate import Gate
from chat_server.edge.http import error_response, json_response
from chat_server.errors import ClientError
from chat_server.hub import Hub
from chat_server.joining import no_session


class Sessions:
    """``/v1/sessions/{id}``."""

    def __init__(self, gate: Gate, hub: Hub, commands: Commands) -> None:
        self._gate = gate
        self._hub = hub
        self._commands = commands

    async def delete(self, request: Request) -> Response:
        """Delete a conversation: what runs is cancelled, connections are closed with 1000, nothing comes back."""
        session_id: str = request.path_params["session_id"]
        try:
            principal = self._gate.identify(request, [])
            if not is_id(session_id):
                raise no_session(session_id)
            with self._gate.store_needed():
                live = await self._hub.open(principal, session_id)
                try:
                    await self._commands.delete_session(live)
                finally:
                    await self._hub.close(live)
        except ClientError as error:
            return error_response(error)
        return json_response({"id": session_id, "object": "realtime.session.deleted", "deleted": True})
