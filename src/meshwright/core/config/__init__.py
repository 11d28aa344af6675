"""Convert strict configuration: frozen dataclass <-> dict <-> TOML <-> flags.

The package is torch-free; dtypes are strings. A key that does not exist, or a value of the wrong type, is a
ConfigError that names the key, the place and the repair.
"""

from .flags import keys_text, parse_flags, take_flags
from .read import all_set, from_dict, load_toml, to_dict, to_toml
from .schema import field_doc, is_unset, public_keys, unset, without_mark

__all__ = [
    "all_set",
    "field_doc",
    "from_dict",
    "is_unset",
    "keys_text",
    "load_toml",
    "parse_flags",
    "public_keys",
    "take_flags",
    "to_dict",
    "to_toml",
    "unset",
    "without_mark",
]
