"""Every name that other libraries keep private and that this package reaches: one table, and one way to ask for it."""

from .library_names import EVERYTHING, PrivateName
from .looking_up import TABLE, absent, found, found_or_none, is_there, missing, needs

__all__ = ["EVERYTHING", "TABLE", "PrivateName", "absent", "found", "found_or_none", "is_there", "missing", "needs"]
