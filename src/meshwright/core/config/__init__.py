"""Strict configuration: frozen dataclass <-> dict <-> TOML <-> flags. Torch-free; dtypes are strings.

A key that does not exist, or a value of the wrong type, is a ConfigError that names the key, the place and the repair.
"""

from meshwright.core.config.flags import parse_flags
from meshwright.core.config.read import from_dict, to_dict
from meshwright.core.config.schema import field_doc, public_keys
from meshwright.core.config.toml import load_toml, to_toml

__all__ = ["field_doc", "from_dict", "load_toml", "parse_flags", "public_keys", "to_dict", "to_toml"]
