"""Errors of the swarm that the user can fix."""

from common.console import UserError


class SwarmError(UserError):
    """An error of the swarm that the user can fix; its text names settings in backquotes, as SwarmConfig has them."""
