"""Every name that other libraries keep private and that this package reaches: one table, and one way to ask for it."""

from .looking_up import TABLE, absent, found, found_or_none, is_there, missing, needs
from .row import EVERYTHING, PrivateName

__all__ = ["EVERYTHING", "TABLE", "PrivateName", "absent", "found", "found_or_none", "is_there", "missing", "needs"]
